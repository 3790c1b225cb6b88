"""Hopper's kernel of a cache, instruction by instruction: against fp64, and
the same bits for every way to store a cache.
"""

import itertools

import pytest
import torch
from helpers.cache_shards import attend_apart, filled
from helpers.caches import contiguous, paged, sequences
from helpers.eight_bits import DTYPES, quantised

import tilewise
import tilewise.distributed as td
from ptx import executing
from tilewise.kernels.hopper.decode import launch
from tilewise.testing import use_emulator
from tilewise.testing.tolerance import assert_within

pytestmark = pytest.mark.slow

BF16 = torch.bfloat16
SPLIT = 128
QUERIES, LENGTHS = [1, 3, 0, 6], [300, 64, 5, 401]
FEATURES = {
    "causal": dict(causal=True),
    "window": dict(window=(150, 3)),
    "softcap": dict(causal=True, scale=0.7, softcap=3.0),
    "alibi": dict(causal=True, alibi_slopes=torch.tensor([0.5, 0.1, 0.02, 0.01])),
    "sinks": dict(causal=True, sinks=torch.tensor([1.0, -torch.inf, 0.0, 4.0])),
}
REFERENCE = tilewise.attention_reference


def run(patch, q, cache, seed=None, **options):
    options |= dict(return_lse=True, split_size=SPLIT, backend="hopper")
    with executing(patch, seed=seed, strict=True), use_emulator():
        return tilewise.attention(q, **cache, **options)


def assert_right(q, cache, found, **options):
    exact = {k: x.double() if k in "kv" and x.dtype == BF16 else x for k, x in cache.items()}
    oracle = REFERENCE(q.double(), **exact, return_lse=True, **options)
    plain = REFERENCE(q, **cache, return_lse=True, upcast=False, **options)
    for mine, wanted, rough, name in zip(found, oracle, plain, ("out", "lse")):
        assert_within(mine, wanted, rough, name)


def cache_of(s, page_size, seed=0):
    at = dict(seqused_k=s.lengths, cu_seqlens_q=s.starts)
    if page_size is None:
        return dict(k=contiguous(s.k), v=contiguous(s.v), **at)
    k, v, table = paged(s, page_size, seed)
    return dict(k=k, v=v, page_table=table, **at)


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    "headdim, page_sizes",
    [(64, (16,)), *((d, (None, 16, 5, 1)) for d in (64, 128, 256)), (128, (None, 8, 64, 192))],
)
def test_pages(headdim, page_sizes, monkeypatch):
    """Contiguous, pages that TMA copies, and pages that threads copy."""
    s = sequences([1, 3], [130, 70], (4, 2), (headdim, headdim), BF16)
    q = torch.cat(s.q)
    found = [run(monkeypatch, q, cache_of(s, size), causal=True) for size in page_sizes]
    assert_right(q, cache_of(s, None), found[0], causal=True)
    for other in found[1:]:
        assert_equal(other, found[0])


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", FEATURES)
def test_features(name, seed, monkeypatch):
    """Several parts a sequence, by four programs."""
    s = sequences(QUERIES, LENGTHS, (4, 2), (64, 64), BF16)
    q, cache = torch.cat(s.q), cache_of(s, 16)
    found = run(monkeypatch, q, cache, seed, **FEATURES[name])
    assert_right(q, cache_of(s, None), found, **FEATURES[name])


@pytest.mark.parametrize("most, ahead", [(0, 16), (0, 2), (10**6, 16)])
@pytest.mark.parametrize("seed", [None, 3])
def test_folds(most, ahead, seed, monkeypatch):
    """By all programs, in slices, or by the one that ends the last part."""
    import triton.language as tl

    from tilewise.kernels.hopper.decode import factors
    from tilewise.tile import split_schedule

    s = sequences([1, 40], [520, 650], (4, 2), (64, 64), BF16)
    q, cache = torch.cat(s.q), cache_of(s, 16)
    monkeypatch.setattr(split_schedule, "MANY_STATES", tl.constexpr(most))
    monkeypatch.setattr(factors, "STATES_AHEAD", tl.constexpr(ahead))
    found = run(monkeypatch, q, cache, seed, causal=True)
    assert_right(q, cache_of(s, None), found, causal=True)


@pytest.mark.parametrize(
    "queries, size, kept", [(1, 128, BF16), (3, 64, BF16), (1, 64, torch.int8)]
)
def test_states_of_ranks(queries, size, kept, monkeypatch):
    """Written by each of two ranks and folded by Triton's kernel, they have the bits of one."""

    def attend(shards, k, v, table):
        options = dict(seqused_k=s.lengths, page_table=table, split_size=size, causal=True)
        options |= dict(return_lse=True, backend="hopper", sinks=torch.tensor([1.0, 0, -1, 2]))
        if kept == torch.int8:
            options |= dict(k_descale=torch.tensor([0.03, 0.02]), v_descale=torch.tensor(0.03))
            k, v = ((30 * x).nan_to_num().clamp(-127, 127).to(kept) for x in (k, v))
        with executing(monkeypatch), use_emulator():
            return shards.attention(q, k, v, **options)

    s = sequences([queries] * 3, [523, 7, 300], (4, 2), (128, 128), BF16)
    q, alone = torch.stack(s.q), td.CacheShards(128, 1)
    assert_equal(attend_apart(attend, s, piece=128, ranks=2), attend(alone, *filled(alone, s)))


EIGHT_BITS = list(itertools.product(DTYPES, ("tensor", "row"), (None, 16, 3), (64, 128)))


@pytest.mark.parametrize("dtype, kind, page_size, headdim", EIGHT_BITS)
def test_eight_bits(dtype, kind, page_size, headdim, monkeypatch):
    x = quantised([1, 3], [130, 70], DTYPES[dtype], kind, headdims=(headdim, headdim))
    q = torch.cat(x.s.q)
    found = run(monkeypatch, q, x.cache(page_size), causal=True)
    assert_right(q, x.cache(), found, causal=True)


@pytest.mark.parametrize("headdim, rows", [(64, 64), (128, 16), (128, 32), (128, 64), (256, 64)])
def test_rows_of_a_tile_change_no_bit(headdim, rows, monkeypatch):
    x = quantised([1, 3], [130, 70], DTYPES["e4m3"], "row", headdims=(headdim, headdim))
    q = torch.cat(x.s.q)
    found = run(monkeypatch, q, x.cache(16), causal=True)
    monkeypatch.setattr(launch, "rows_of", lambda *asked: rows)
    assert_equal(run(monkeypatch, q, x.cache(16), seed=rows, causal=True), found)
    assert_right(q, x.cache(), found, causal=True)


@pytest.mark.parametrize("headdim, rows", [(64, 32), (128, 16), (128, 64)])
def test_operands_that_are_swapped_change_no_bit(headdim, rows, monkeypatch):
    s = sequences([1, 2], [130, 70], (4, 2), (headdim, headdim), BF16)
    q, cache = torch.cat(s.q), cache_of(s, 16)
    found = run(monkeypatch, q, cache, causal=True)
    monkeypatch.setattr(launch, "rows_of", lambda *asked: rows)
    assert_equal(run(monkeypatch, q, cache, seed=rows, causal=True), found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_eight_bits_in_any_order(dtype, seed, monkeypatch):
    """Of several parts, by four programs; fp16 queries."""
    x = quantised(QUERIES, LENGTHS, DTYPES[dtype], "row", headdims=(64, 64), q_dtype=torch.float16)
    q = torch.cat(x.s.q)
    found = run(monkeypatch, q, x.cache(16), seed, causal=True)
    assert_right(q, x.cache(), found, causal=True)


CHUNKS = list(itertools.product((16, 3), (64, 128), ("causal", "window")))


@pytest.mark.parametrize("page_size, headdim, name", CHUNKS)
def test_two_warpgroups(page_size, headdim, name, monkeypatch):
    """Halves of a tile that see other blocks, a half without rows, values that are not in use."""
    monkeypatch.setattr(launch, "warpgroups_of", lambda *asked: 2)
    s = sequences([70, 1, 20], [200, 130, 150], (4, 2), (headdim, headdim), BF16)
    q, options = torch.cat(s.q), FEATURES[name]
    found = run(monkeypatch, q, cache_of(s, page_size), **options)
    assert_right(q, cache_of(s, None), found, **options)
    monkeypatch.setattr(launch, "warpgroups_of", lambda *asked: 1)
    assert_equal(run(monkeypatch, q, cache_of(s, 16), **options), found)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_warpgroups_in_any_order(seed, monkeypatch):
    monkeypatch.setattr(launch, "warpgroups_of", lambda *asked: 2)
    s = sequences([70, 1, 20], [400, 130, 350], (4, 2), (64, 64), BF16)
    q, cache = torch.cat(s.q), cache_of(s, 16)
    found = run(monkeypatch, q, cache, seed, causal=True)
    assert_right(q, cache_of(s, None), found, causal=True)
