"""Chunks over a KV cache of 8 bits on the schedule of Hopper's training forward, in the emulator:
the bits of a cache that was converted before, and which calls take it.
"""

import math

import pytest
import torch
from helpers.cached_calls import check_cached
from helpers.eight_bits import DTYPES, quantised
from helpers.tiers import sample, sample_rows

import tilewise
from tilewise.kernels.hopper.fwd import cached as schedules
from tilewise.kernels.hopper.fwd import parts_launch
from tilewise.testing import use_emulator
from tilewise.testing.tolerance import assert_within

BF16, FP16, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
QUERIES, LENGTHS = 70, [300, 133, 20]  # of the third some see no key
FEATURES = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(150, 0)),
    "softcap": dict(causal=True, scale=0.7, softcap=3.0),
    "alibi": dict(causal=True, alibi_slopes=torch.tensor([0.5, 0.1, 0.02, 0.01])),
    "sinks": dict(causal=True, sinks=torch.tensor([1.0, -math.inf, 0.0, 4.0])),
}


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Few queries are enough; whether each call was served so, in order."""
    seen, why = [], schedules.why_in_pieces

    def noted(*asked):
        reason = why(*asked)
        seen.append(reason is None)
        return reason

    monkeypatch.setattr(schedules, "why_in_pieces", noted)
    monkeypatch.setattr(schedules, "least_queries", lambda nheads, group: 9)
    monkeypatch.setattr(schedules, "parts_of", lambda cached, problem: 1)
    return seen


def drawn(dtype=E4M3, kind="sequence", lengths=LENGTHS, headdims=(64, 64), **options):
    return quantised([QUERIES] * len(lengths), lengths, dtype, kind, headdims=headdims, **options)


def arguments(x, page_size, seed):
    at = x.cache(page_size, seed)
    del at["cu_seqlens_q"]
    return dict(q=torch.stack(x.s.q), **at, return_lse=True)


def run(x, page_size=16, seed=0, **options):
    with use_emulator(seed):
        return tilewise.attention(**arguments(x, page_size, seed), **options, backend="hopper")


def run_converted(x, page_size=16, seed=0, **options):
    """Over the cache in 16 bits, without scales."""
    at = arguments(x, page_size, seed)
    for name in ("k", "v"):
        at[name] = at[name].to(at["q"].dtype)
        at.pop(f"{name}_descale")
    with use_emulator(seed):
        return tilewise.attention(**at, **options, backend="hopper")


def assert_right(x, found, **options):
    reference = tilewise.attention_reference
    exact = x._replace(s=x.s._replace(q=[q.double() for q in x.s.q]))
    oracle = reference(**arguments(exact, None, 0), **options)
    plain = reference(**arguments(x, None, 0), **options, upcast=False)
    for name, *triple in zip(("out", "lse"), found, oracle, plain):
        assert_within(*triple, name)


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


CASES = [(BF16, "e4m3"), (FP16, "e4m3"), (BF16, "int8"), (FP16, "int8")]


@pytest.mark.parametrize("q_dtype, dtype", sample_rows(CASES, CASES[0]))
def test_the_bits_of_a_cache_that_was_converted_before(q_dtype, dtype, served):
    x = drawn(DTYPES[dtype], "none", q_dtype=q_dtype)
    found = run(x, causal=True)
    assert_equal(run_converted(x, causal=True), found)
    assert_equal(run(x, None, causal=True), found)
    assert_right(x, found, causal=True)
    assert all(served)


@pytest.mark.parametrize("kind", sample(["tensor", "head", "sequence", "row"], "row"))
@pytest.mark.parametrize("name", sample(FEATURES, "window"))
def test_scales_and_features(name, kind, served):
    x = drawn(kind=kind)
    found = run(x, **FEATURES[name])
    assert_right(x, found, **FEATURES[name])
    assert_equal(run(x, None, 1, **FEATURES[name]), found)
    assert served == [True, True]


@pytest.mark.parametrize("scale", sample([-0.5, 0.0, math.nan], -0.5))
def test_scales_that_are_no_factor_of_an_exponent(scale):
    x = drawn(kind="tensor", lengths=[90, 133])
    x = x._replace(k_scales=[torch.full_like(each, scale) for each in x.k_scales])
    found = run(x, causal=True)
    if math.isnan(scale):
        assert found[0].isnan().any()
    else:
        assert_right(x, found, causal=True)


def test_a_sequence_without_keys_has_no_scale(served):
    x = drawn(lengths=[90, 133])
    at = arguments(x, 16, 0)
    at["seqused_k"][1] = 0
    for name in ("k_descale", "v_descale"):
        at[name][1] = math.nan
    with use_emulator():
        out, lse = tilewise.attention(**at, causal=True, backend="hopper")
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all() and not out.isnan().any()
    assert served == [True]


@pytest.mark.parametrize("page_size", sample([8, 16, 32, 64, 128, 256], 8))
def test_where_pages_lie_changes_no_bit(page_size, served):
    x = drawn(lengths=[300, 133])
    expected = run(x, None, causal=True)
    assert_equal(run(x, page_size, 1, causal=True), expected)
    assert all(served)


SHAPES = [((1, 1), (128, 128)), ((6, 2), (80, 80)), ((8, 1), (128, 128)), ((4, 4), (64, 64))]


@pytest.mark.parametrize("heads, headdims", sample_rows(SHAPES, SHAPES[2]))
def test_heads_and_headdims(heads, headdims, served):
    x = drawn(kind="none", heads=heads, headdims=headdims, lengths=[200, 90])
    assert_equal(run(x, causal=True), run_converted(x, causal=True))
    assert all(served)


@pytest.mark.parametrize("count", sample([2, 3], 3))
@pytest.mark.parametrize("sms", sample([132, 2], 2))
def test_parts_have_the_bits_of_a_cache_that_was_converted_before(sms, count, served, monkeypatch):
    """Of tiles that programs share, and of those that one program computes whole."""
    monkeypatch.setattr(schedules, "parts_of", lambda cached, problem: count)
    monkeypatch.setattr(parts_launch, "sms_of", lambda device: sms)
    x = drawn(kind="none", heads=(2, 1), lengths=[1700])
    found = run(x, 64, causal=True)
    assert_equal(run_converted(x, 64, causal=True), found)
    for kind, causal in (("sequence", True), ("row", True), ("row", False)):
        y = drawn(kind=kind, heads=(2, 1), lengths=[1700])
        assert_right(y, run(y, causal=causal), causal=causal)
    assert all(served)


@pytest.mark.parametrize("name", ["k", "v", "kv"])
def test_scales_of_rows_that_are_1_change_no_bit(name, served):
    x = drawn(kind="row", lengths=[300, 133])
    ones = [torch.ones(len(k), 2) for k in x.s.k]
    x = x._replace(k_scales=ones, v_scales=ones)
    at = arguments(x, 16, 0)
    for side in set("kv") - set(name):
        at[f"{side}_descale"] = None
    with use_emulator():
        found = tilewise.attention(**at, causal=True, backend="hopper")
    assert_equal(run_converted(x, causal=True), found)
    assert all(served)


def test_scales_that_a_window_has_left_behind_may_be_anything(served):
    """Also beside keys that are seen, in a block that TMA reads."""
    x = drawn(kind="row", lengths=[300])
    options = dict(causal=True, window=(100, 0))
    at, first = arguments(x, 16, 0), 300 - QUERIES - 100
    assert first % 128 > 0
    pages = at["page_table"][0, : first // 16].long()
    at["k_descale"][pages] = at["v_descale"][pages] = math.nan
    with use_emulator():
        found = tilewise.attention(**at, **options, backend="hopper")
    assert_equal(run(x, **options), found)
    assert served == [True, True]


def run_packed(x, page_size=16, seed=0, **options):
    """As packed queries, of which decodes and chunks are two launches."""
    at = dict(q=torch.cat(x.s.q), **x.cache(page_size, seed), return_lse=True, max_seqlen_q=QUERIES)
    with use_emulator(seed):
        out, lse = tilewise.attention(**at, **options, backend="hopper")
    rows = [len(q) for q in x.s.q]
    return list(zip(out.split(rows), lse.split(rows, 1)))


@pytest.mark.parametrize("page_size", sample([16, None], 16))
@pytest.mark.parametrize("name, kind", [("causal", "sequence"), ("window", "row")])
def test_packed_chunks_have_the_bits_of_those_in_a_batch(name, kind, page_size, served):
    """Beside decodes, whose rows are others' launch."""
    queries, heads = [1, QUERIES, 0, 3, QUERIES], (4, 1)  # in tiles of 8 rows and of 16
    x = quantised(queries, [300, 133, 90, 5, 70], E4M3, kind, heads, headdims=(64, 64))
    found = run_packed(x, page_size, **FEATURES[name])
    assert served == [True]
    for i, count in enumerate(queries):
        if count:
            out, lse = run(x.only(i), page_size, 1, **FEATURES[name])
            assert torch.equal(out[0], found[i][0]) and torch.equal(lse[0], found[i][1]), i


def test_batch_mates_change_no_bit(served):
    """C0 and C1."""
    x = drawn()
    out, lse = run(x, causal=True)
    turned = run(x.only(2, 0, 1), 8, 1, causal=True)
    assert torch.equal(turned[0], out[[2, 0, 1]]) and torch.equal(turned[1], lse[[2, 0, 1]])
    alone = run(x.only(1), None, 2, causal=True)
    assert torch.equal(alone[0][0], out[1]) and torch.equal(alone[1][0], lse[1])
    assert all(served)


OTHERS = {
    "over 128": dict(headdims=(192, 192)),
    "differ": dict(headdims=(64, 128)),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_what_is_not_converted_is_in_pieces(reason):
    x = drawn(**OTHERS[reason], lengths=[90])
    at = arguments(x, None, 0)
    numbers, lengths = (True, None, None, None, None), (at["seqused_k"], None)
    scales = at["k_descale"], at["v_descale"]
    asked = at["q"], at["k"], at["v"], None, lengths, (None, None, None), numbers, "bshd", scales
    cached = check_cached(*asked)
    out = at["q"].new_empty(*at["q"].shape[:-1], at["v"].shape[-1])
    assert reason in schedules.why_in_pieces(cached, out)
