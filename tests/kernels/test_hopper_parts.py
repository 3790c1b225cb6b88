"""Chunks over a KV cache with fewer tiles than SMs in the emulator: programs share the keys of each
tile of Hopper's training forward.
"""

import math

import pytest
import torch
import triton.language as tl
from helpers.caches import contiguous, paged, sequences
from helpers.tiers import sample, sample_rows

import tilewise
from tilewise.kernels.hopper.fwd import cached as schedules
from tilewise.kernels.hopper.fwd import parts, parts_launch
from tilewise.testing import use_emulator
from tilewise.testing.tolerance import assert_within

BF16 = torch.bfloat16
QUERIES, LENGTHS = 20, [300, 133, 10, 0]  # of the third some see no key, of the last none
FEATURES = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=(150, 3)),
    "softcap": dict(causal=True, softcap=3.0, alibi_slopes=torch.tensor([0.5, 0.1, 0.02, 0.01])),
    "sinks": dict(causal=True, sinks=torch.tensor([1.0, -math.inf, 0.0, 4.0])),
}


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    """How many parts each tile has, if it has as many blocks."""
    count = [3]
    monkeypatch.setattr(schedules, "least_queries", lambda nheads, group: 9)
    monkeypatch.setattr(schedules, "count_of", lambda tiles, sms, blocks: count[0])
    monkeypatch.setattr(parts, "FEWEST_BLOCKS", tl.constexpr(1))
    return count


def drawn(heads=(4, 1), headdims=(64, 64), lengths=LENGTHS, queries=QUERIES, seed=0):
    return sequences([queries] * len(lengths), lengths, heads, headdims, BF16, seed)


def run(s, page_size=None, seed=0, fill=math.nan, **options):
    table, k, v = None, contiguous(s.k), contiguous(s.v)
    if page_size is not None:
        k, v, table = paged(s, page_size, seed, fill=fill)
    q, at = torch.stack(s.q), dict(page_table=table, seqused_k=s.lengths, return_lse=True)
    with use_emulator(seed):
        out = torch.full((*q.shape[:-1], v.shape[3]), math.nan, dtype=BF16)
        return tilewise.attention(q, k, v, out=out, **at, **options)


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def check(s, found, **options):
    q, k, v = torch.stack(s.q), *(contiguous(x).nan_to_num() for x in (s.k, s.v))
    options |= dict(seqused_k=s.lengths, return_lse=True)
    exact = tilewise.attention_reference(q.double(), k.double(), v.double(), **options)
    rough = tilewise.attention_reference(q, k, v, upcast=False, **options)
    for name, *triple in zip(("out", "lse"), found, exact, rough):
        assert_within(*triple, name)


@pytest.mark.parametrize("name", sample(FEATURES, "causal"))
@pytest.mark.parametrize("count", sample([2, 3, 15], 3))
def test_features(name, count, shared):
    """More parts than a tile has blocks, too."""
    shared[0] = count
    s = drawn()
    found = run(s, 16, **FEATURES[name])
    check(s, found, **FEATURES[name])
    assert_equal(run(s, seed=1, **FEATURES[name]), found)


SHAPES = [((8, 1), (128, 128)), ((4, 4), (192, 128)), ((4, 2), (256, 256)), ((6, 2), (128, 64))]


@pytest.mark.parametrize("heads, headdims", sample_rows(SHAPES, SHAPES[0]))
def test_heads_and_headdims(heads, headdims):
    s = drawn(heads, headdims, [300])
    check(s, run(s, 16, causal=True), causal=True)


@pytest.mark.parametrize("seed", sample(range(1, 9), 1))
def test_the_order_in_which_parts_end_and_batch_mates_change_no_bit(seed):
    s = drawn((2, 1), lengths=[300, 133])
    found = run(s, 16, causal=True)
    turned = run(type(s)(*(x[::-1] for x in s)), 64, seed=seed, fill=math.inf, causal=True)
    assert_equal([x.flip(0) for x in turned], found)
    alone = run(type(s)(*(x[1:2] for x in s)), seed=seed, causal=True)
    assert_equal([x[0] for x in alone], [x[1] for x in found])


def test_a_sequence_of_few_keys_uses_few_parts(shared, monkeypatch):
    """By its own keys, whatever there is room for."""
    shared[0] = 5
    monkeypatch.setattr(parts, "FEWEST_BLOCKS", tl.constexpr(2))
    s = drawn((2, 1), lengths=[600, 133])
    found = run(s, 16, causal=True)
    check(s, found, causal=True)
    alone = run(type(s)(*(x[1:2] for x in s)), causal=True)
    assert_equal([x[0] for x in alone], [x[1] for x in found])


@pytest.mark.parametrize("name", sample(FEATURES, "window"))
@pytest.mark.parametrize("whole", sample([1, 2, 3, 4], 3))
def test_a_program_that_has_all_parts_of_a_tile_sums_them_alike(name, whole, monkeypatch):
    """Of `whole` tiles, while programs share the parts of the others."""
    s = drawn()
    monkeypatch.setattr(parts_launch, "whole_of", lambda tiles, count, sms: 0)
    shared_by_all = run(s, 16, **FEATURES[name])
    asked = []
    monkeypatch.setattr(parts_launch, "whole_of", lambda *of: asked.append(of) or whole)
    assert_equal(run(s, seed=1, **FEATURES[name]), shared_by_all)
    assert asked == [(4, 3, 132)]


def test_how_many_tiles_are_whole():
    """None where parts fill the SMs, all where tiles do, else whole turns of them."""
    tiles = (32, 64, 96, 128, 132, 160, 256, 264, 288)
    found = [parts_launch.whole_of(n, 4, 132) for n in tiles]
    assert found == [0, 0, 0, 128, 132, 132, 256, 264, 264]


def test_how_many_parts():
    """By what takes least time alone: whole turns of the SMs, none in a short window."""
    tiles, blocks = (8, 16, 32, 64, 96, 128, 132), (2, 4, 8, 16, 256)
    assert [parts_launch.count_of(n, 132) for n in tiles] == [15, 8, 4, 2, 4, 1, 1]
    assert [parts_launch.count_of(32, 132, n) for n in blocks] == [1, 1, 1, 4, 4]
