"""Caches of 8 bits in the portable kernels, in the interpreter: the formula of what they stand for,
the contract, both ways to read e4m3.
"""

import itertools

import pytest
import torch
from helpers.eight_bits import DTYPES, KINDS, quantised
from helpers.tiers import every, sample, sample_rows

import tilewise
from tilewise.kernels.portable import decode_launch
from tilewise.testing import use_interpreter
from tilewise.testing.tolerance import assert_within

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SPLIT = 64
QUERIES, LENGTHS = [1, 3, 0, 6], [130, 64, 5, 200]
FEATURES = {
    "window": dict(causal=True, window=(45, 0)),
    "softcap": dict(causal=True, softcap=2.0, alibi_slopes=torch.tensor([0.3, 0.1, 0.7, 0.2])),
    "sinks": dict(causal=True, sinks=torch.tensor([0.3, 2.0, -1.0, 0.0])),
    "mask": dict(mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (kv_idx % 5 != h)),
}


@pytest.fixture(autouse=True)
def interpreted():
    with use_interpreter():
        yield


def run(x, page_size=16, seed=0, attend=tilewise.attention, split_size=SPLIT, **options):
    if attend is tilewise.attention:
        options |= dict(split_size=split_size, backend="portable")
    return attend(torch.cat(x.s.q), **x.cache(page_size, seed), return_lse=True, **options)


def assert_right(x, found, page_size=None, **options):
    reference = tilewise.attention_reference
    exact = x._replace(s=x.s._replace(q=[q.double() for q in x.s.q]))
    oracle = run(exact, page_size, attend=reference, **options)
    plain = run(x, page_size, attend=reference, upcast=False, **options)
    for mine, wanted, rough, name in zip(found, oracle, plain, ("out", "lse")):
        assert_within(mine, wanted, rough, name)


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


CASES = list(itertools.product(KINDS, DTYPES))
OTHERS = sample_rows(CASES, ("row", "int8"), ("sequence", "e4m3"))


@pytest.mark.parametrize("kind, dtype", OTHERS)
@pytest.mark.parametrize("q_dtype", sample([BF16, torch.float16], BF16))
def test_against_fp64_of_what_was_stored(kind, dtype, q_dtype):
    x = quantised(QUERIES, LENGTHS, DTYPES[dtype], kind, headdims=(16, 24), q_dtype=q_dtype)
    found = run(x, causal=True)
    assert_right(x, found, causal=True)
    assert_equal(run(x, None, causal=True), found)
    if dtype == "e4m3" and kind in ("head", "row"):
        assert_right(x, run(x, causal=True, split_size=1024), causal=True)  # one launch


def test_fp16():
    for dtype in DTYPES.values():
        x = quantised([2], [70], dtype, "row", q_dtype=torch.float16)
        assert_right(x, run(x, causal=True), causal=True)


@pytest.mark.parametrize("name", every(2, FEATURES))
def test_with_everything_else(name):
    for kind in ("sequence", "row"):
        x = quantised(QUERIES, LENGTHS, E4M3, kind)
        assert_right(x, run(x, **FEATURES[name]), **FEATURES[name])


@pytest.mark.parametrize("kind", sample(KINDS, "row"))
def test_e4m3_by_integer_moves_has_the_same_bits(monkeypatch, kind):
    x = quantised(QUERIES, LENGTHS, E4M3, kind)
    expected = run(x)
    monkeypatch.setattr(decode_launch, "converts_e4m3", lambda device: False)
    assert_equal(run(x), expected)
    x = quantised(QUERIES, LENGTHS, E4M3, kind, q_dtype=torch.float16)
    found = run(x)
    monkeypatch.setattr(decode_launch, "converts_e4m3", lambda device: True)
    assert_equal(found, run(x))


@pytest.mark.parametrize("kind, dtype", sample_rows(CASES, ("row", "e4m3")))
def test_neither_mates_nor_order_nor_pages_nor_queries(kind, dtype):
    x = quantised([8, 1, 3], [3 * SPLIT + 9, 4 * SPLIT, 150], DTYPES[dtype], kind)
    out, lse = run(x, causal=True)
    assert_equal(run(x, 7, 5, causal=True), (out, lse))
    turned = run(x.only(2, 0, 1), None, causal=True)
    assert torch.equal(turned[0], torch.cat([out[9:], out[:9]]))
    if kind == "tensor":
        return  # another sequence's number would be taken
    stop = 3 * SPLIT + 9
    for n in (1, 2, 5):
        found = run(x.cut(0, stop - 8, stop - 8 + n), 64, causal=True)
        assert_equal(found, (out[:n], lse[:, :n]))


def test_q_in_fp32_is_refused():
    x = quantised([1], [9], E4M3, "none", q_dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="q must be bfloat16 or float16"):
        run(x)


@pytest.mark.parametrize("capability, converts", [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_which_gpus_convert_e4m3(monkeypatch, capability, converts):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert decode_launch.converts_e4m3(torch.device("cuda", 0)) == converts
    assert decode_launch.converts_e4m3(torch.device("cpu"))
