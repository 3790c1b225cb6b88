"""Chunks over a KV cache on the schedule of Hopper's training forward, in the emulator: the
formula, the same bits wherever keys lie and whatever is beside them, and which calls take it.
"""

import math

import pytest
import torch
from helpers.cached_calls import check_cached
from helpers.caches import contiguous, paged, sequences
from helpers.tiers import sample, sample_rows

import tilewise
from tilewise.kernels.hopper.fwd import cached as schedules
from tilewise.testing import use_emulator
from tilewise.testing.tolerance import assert_within

BF16, INT32 = torch.bfloat16, torch.int32
QUERIES, LENGTHS = 70, [300, 133, 20, 0]  # of the third some see no key, of the last none
FEATURES = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(150, 3)),
    "softcap": dict(causal=True, softmax_scale=0.7, softcap=3.0),
    "alibi": dict(causal=True, alibi_slopes=torch.tensor([0.5, 0.1, 0.02, 0.01])),
    "sinks": dict(causal=True, learnable_sink=torch.tensor([1.0, -math.inf, 0.0, 4.0])),
}
WORDS = {"window_size": "window", "softmax_scale": "scale", "learnable_sink": "sinks"}


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


def drawn(heads=(4, 2), headdims=(64, 64), lengths=LENGTHS, queries=QUERIES, seed=0):
    return sequences([queries] * len(lengths), lengths, heads, headdims, BF16, seed)


def run(s, page_size=None, seed=0, fill=math.nan, **options):
    table, k, v = None, contiguous(s.k), contiguous(s.v)
    if page_size is not None:
        k, v, table = paged(s, page_size, seed, fill=fill)
    with use_emulator(seed):
        return tilewise.flash_attn_with_kvcache(
            *(torch.stack(s.q), k, v),
            cache_seqlens=s.lengths,
            page_table=table,
            return_softmax_lse=True,
            **options,
        )


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def check(s, found, **options):
    """Against the formula in fp64, and as near to it as plain torch in bf16."""
    words = {WORDS.get(name, name): x for name, x in options.items()}
    q, k, v = torch.stack(s.q), *(contiguous(x).nan_to_num() for x in (s.k, s.v))
    words |= dict(seqused_k=s.lengths, return_lse=True)
    exact = tilewise.attention_reference(q.double(), k.double(), v.double(), **words)
    rough = tilewise.attention_reference(q, k, v, upcast=False, **words)
    for name, *triple in zip(("out", "lse"), found, exact, rough):
        assert_within(*triple, name)


@pytest.mark.parametrize("name", sample(FEATURES, "window"))
def test_features(name, served):
    s = drawn()
    found = run(s, 16, **FEATURES[name])
    check(s, found, **FEATURES[name])
    assert_equal(run(s, **FEATURES[name]), found)
    assert served == [True, True]


PAGES = [8, 16, 32, 64, 128, 256]


@pytest.mark.parametrize("name", sample(["plain", "causal", "window"], "causal"))
@pytest.mark.parametrize("page_size", sample(PAGES, 8))
def test_where_pages_lie_and_how_large_they_are_changes_no_bit(page_size, name, served):
    s = drawn(lengths=[300, 133])
    expected = run(s, **FEATURES[name])
    assert_equal(run(s, page_size, seed=1, **FEATURES[name]), expected)
    assert_equal(run(s, page_size, seed=2, fill=math.inf, **FEATURES[name]), expected)
    assert all(served)


SHAPES = [
    ((1, 1), (64, 128)),
    ((6, 2), (128, 64)),
    ((8, 1), (128, 128)),  # heads of a group share a tile
    ((4, 4), (192, 128)),  # columns of K in three groups
    ((4, 2), (256, 256)),
    ((2, 1), (72, 72)),
]


@pytest.mark.parametrize("heads, headdims", sample_rows(SHAPES, SHAPES[2]))
def test_heads_and_headdims(heads, headdims, served):
    s = drawn(heads, headdims, [200, 90])
    found = run(s, 16, causal=True)
    check(s, found, causal=True)
    assert_equal(run(s, 64, seed=1, causal=True), found)
    assert all(served)


@pytest.mark.parametrize("page_size", sample([None, 16], 16))
def test_batch_mates_change_no_bit(page_size, served):
    """C0 and C1: again, in another order, alone."""
    s = drawn()
    found = run(s, page_size, causal=True)
    turned = run(type(s)(*(x[::-1] for x in s)), page_size, seed=1, causal=True)
    for x, y in zip(turned, found):
        assert torch.equal(x.flip(0), y)
    alone = run(type(s)(*(x[1:2] for x in s)), page_size, seed=2, causal=True)
    assert_equal([x[0] for x in alone], [x[1] for x in found])
    assert all(served)


def test_wrong_lengths_and_pages_reach_no_other_memory(served):
    """As on a GPU, where they are not looked at: cut to what there is room for."""
    s = drawn(lengths=[96, 96], queries=32)
    k, v, table = paged(s, 16, unused=(0, 0))
    q, numbers = torch.stack(s.q), (True, None, None, None, None)
    cached = check_cached(q, k, v, table, (s.lengths, None), (None,) * 3, numbers, "bshd")
    cached.extras.seqused_k.copy_(torch.tensor([2**31 - 1, -5]))
    table[0, 2] = 10**9
    k.nan_to_num_(), v.nan_to_num_()
    out, lse = torch.full_like(q, math.nan), torch.full((2, 4, 32), math.nan)
    with use_emulator():
        schedules.forward(cached, out, lse)
    assert served == [True] and not out.isnan().any()
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()


def test_it_writes_the_callers_out(served):
    s = drawn(lengths=[150, 64], queries=30)
    expected, _ = run(s, 16, causal=True)
    out = torch.full_like(expected, math.nan)
    assert run(s, 16, causal=True, out=out)[0] is out
    assert torch.equal(out, expected) and served == [True, True]
    apart = torch.zeros(*out.shape[:-1], 68, dtype=BF16)[..., 4:]  # at 8 bytes: no copy of TMA
    run(s, 16, causal=True, out=apart)
    assert served[-1] is False
    torch.testing.assert_close(apart, expected, atol=0.02, rtol=0.02)


def test_the_contract_is_asked_for(served):
    """C2: a chunk has the bits of its tokens, one by one, by either way of asking."""
    s = drawn(lengths=[300], queries=40)
    with tilewise.batch_invariant():
        whole = run(s, 16, causal=True)
        k, v, table = paged(s, 16)
        at = dict(page_table=table, seqused_k=s.lengths, backend="hopper", return_lse=True)
        with use_emulator():
            q = torch.stack(s.q)
            assert_equal(tilewise.attention(q, k, v, causal=True, split_size=512, **at), whole)
    last = type(s)([s.q[0][-1:]], s.k, s.v)
    one = run(last, 16, causal=True)
    assert_equal([x[0] for x in one], [whole[0][0, -1:], whole[1][0, :, -1:]])
    assert served == [False] * 3
    run(s, 16, causal=True)
    assert served[-1]


def asked(queries=128, page_size=16, kept=BF16, packed=False, split_size=None, **of):
    """A call's answer, of tensors that are not written."""
    shape = (2, 64) if page_size is None else (3, page_size)
    k = of.get("k", torch.empty(*shape, 8, 64, dtype=kept))
    q = torch.empty(2, queries, 32, k.shape[3], dtype=BF16)
    table = None if page_size is None else torch.zeros(2, 64, dtype=INT32)
    starts = torch.tensor([0, queries, 2 * queries], dtype=INT32) if packed else None
    lengths = of.get("used", torch.full((2,), 64, dtype=INT32)), starts
    q = q.flatten(0, 1) if packed else q
    scores = None, None, of.get("mask")
    numbers = True, None, None, None, split_size
    cached = check_cached(q, k, of.get("v", k), table, lengths, scores, numbers, "bshd")
    return schedules.why_in_pieces(cached, torch.empty_like(q))


def test_which_calls_are_served_so(monkeypatch):
    """A call's form and one sequence's numbers say so."""
    monkeypatch.undo()
    heads = (32, 4), (8, 1), (128, 1), (512, 64)
    assert [schedules.least_queries(*x) for x in heads] == [128, 512, 128, 9]
    for page_size in (None, 8, 16, 64, 128, 256, 1024):
        assert asked(page_size=page_size) is None
    assert asked(32) is None and "fewer than 32 queries" in asked(31)
    assert "fewer than 128 queries" in asked(127, page_size=None, used=None)
    assert "split_size" in asked(split_size=512)
    with tilewise.batch_invariant():
        assert "batch_invariant" in asked()
    assert "packed" in asked(packed=True)
    assert asked(kept=torch.float8_e4m3fn) is None and asked(kept=torch.int8) is None
    assert "mask_mod" in asked(mask=lambda b, h, q_idx, kv_idx: kv_idx <= q_idx)
    for page_size in (1, 4, 48):
        assert "no boxes of TMA" in asked(page_size=page_size)
    k, v = (torch.empty(3, 8, 8, n, dtype=BF16) for n in (192, 128))
    assert "over 32 copies" in asked(page_size=8, k=k, v=v)
    assert "without seqused_k" in asked(used=None)
    memory = torch.empty(3 * 8456, dtype=BF16)
    assert "heads apart" in asked(k=memory.as_strided((3, 16, 8, 64), (8456, 512, 64, 1)))
