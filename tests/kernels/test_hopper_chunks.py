"""Many queries with a KV cache in the emulator, by two warpgroups of Hopper's kernel that share
tiles of keys: the formula, and the bits of one warpgroup.
"""

import math

import pytest
import torch
import triton.language as tl
from helpers.cached_calls import check_cached
from helpers.caches import paged
from helpers.emulated_decoding import BF16, FEATURES, assert_equal, check, drawn, run
from helpers.tiers import sample, sample_rows

import tilewise
from tilewise import mods
from tilewise.kernels.hopper.decode import launch
from tilewise.testing import use_emulator
from tilewise.tile import split_schedule

# Tiles are of 64 tokens, halves of 32: a whole tile and a ragged one, whose second half has rows
# or none; a half alone; one query; none
QUERIES, LENGTHS = [80, 1, 33, 0, 130], [330, 268, 279, 5, 200]
choose = launch.warpgroups_of


@pytest.fixture
def warpgroups(monkeypatch):
    """Sets how many share tiles, whatever the call."""

    def use(count):
        monkeypatch.setattr(launch, "warpgroups_of", lambda *args, **named: count)

    use(2)
    return use


def by_one(warpgroups, s, *args, **options):
    warpgroups(1)
    found = run(s, *args, **options)
    warpgroups(2)
    return found


@pytest.mark.parametrize("name", sample(FEATURES, "window"))
def test_features(name, warpgroups):
    s = drawn(QUERIES, LENGTHS)
    found = run(s, 16, **FEATURES[name])
    check(s, found, **FEATURES[name])
    assert_equal(by_one(warpgroups, s, 16, **FEATURES[name]), found)


@pytest.mark.parametrize("name", sample(["causal", "window", "mask"], "window"))
@pytest.mark.parametrize("page_size", sample([None, 128, 8, 3, 1], 8, 3))
def test_pages_change_no_bit(page_size, name, warpgroups):
    """Neither by TMA, where one warp clears values that are not in use, nor by cp.async."""
    s = drawn([80, 1, 33], [330, 268, 279])
    expected = by_one(warpgroups, s, 16, **FEATURES[name])
    assert_equal(run(s, page_size, seed=1, **FEATURES[name]), expected)


SHAPES = [
    ((1, 1), (64, 128)),
    ((6, 2), (128, 64)),
    ((34, 2), (72, 72)),  # halves of 51 rows
    ((8, 1), (128, 128)),
    ((4, 4), (192, 128)),  # one stage of queries
]


@pytest.mark.parametrize("heads, headdims", sample_rows(SHAPES, SHAPES[4]))
def test_heads_and_headdims(heads, headdims, warpgroups):
    s = drawn([150, 5], [300, 70], heads, headdims)
    found = run(s, 16, causal=True)
    check(s, found, causal=True)
    assert_equal(by_one(warpgroups, s, 8, causal=True), found)


@pytest.mark.parametrize("name", sample(["causal", "window", "alibi"], "causal"))
def test_a_chunk_has_the_bits_of_its_tokens(name, warpgroups):
    """C0, C1, C2: through tiles of either size, among mates and alone, in any cut."""
    s = drawn([140, 1, 3], [330, 268, 279])
    options = FEATURES[name] | dict(causal=True)
    out, lse = run(s, 16, **options)
    turned, _ = run(type(s)(*(x[::-1] for x in s)), 8, seed=3, **options)
    assert torch.equal(torch.cat(turned.split([3, 1, 140])[::-1]), out)
    for count in (1, 2):
        warpgroups(count)
        for a, b in ((0, 1), (30, 94), (139, 140)):
            n = 330 - 140 + b
            part = type(s)([s.q[0][a:b]], [s.k[0][:n]], [s.v[0][:n]])
            assert_equal(run(part, 8, **options), (out[a:b], lse[:, a:b]))


@pytest.mark.parametrize("name", sample(["plain", "causal", "window"], "window"))
def test_how_a_tile_is_divided_changes_no_bit(name, warpgroups, monkeypatch):
    """In one part or several, folded by halves or in slices."""
    s = drawn([100, 1, 20], [700, 390, 513])
    expected = by_one(warpgroups, s, 16, **FEATURES[name])
    for most in (0, 256, 10**6):
        monkeypatch.setattr(split_schedule, "MANY_STATES", tl.constexpr(most))
        assert_equal(run(s, 16, **FEATURES[name]), expected)
    monkeypatch.setattr(launch, "WORKSPACE", 0)
    assert_equal(run(s, 16, **FEATURES[name]), expected)


MIXED = [1] * 40 + [150], [150] + [1] * 40, [70, 1, 1, 90, 1]


@pytest.mark.parametrize("queries", sample(MIXED, MIXED[2]))
def test_parts_of_long_and_short_sequences_alternate(queries, warpgroups):
    """Of more sequences than a warp has lanes; each program gets parts of both kinds."""
    lengths = [n + 140 * (i % 3) for i, n in enumerate(queries)]
    s = drawn(queries, lengths, (2, 1))
    found = run(s, 16, causal=True)
    check(s, found, causal=True)
    assert_equal(by_one(warpgroups, s, 16, causal=True), found)


@pytest.mark.parametrize("fill", sample([math.nan, math.inf], math.nan))
@pytest.mark.parametrize("page_size", sample([8, 64, 3], 8))
def test_what_is_not_in_use_changes_nothing(fill, page_size, warpgroups):
    """Keys past the end and before a window, which neither half of a tile sees."""
    s = drawn([70, 2, 2], [400, 133, 0])
    options = dict(causal=True, window=(140, 0))
    expected = by_one(warpgroups, s, None, **options)
    k, v, table = paged(s, page_size, fill=fill)
    hidden = (400 - 70 - 140) // page_size
    k[table[0, :hidden].long()] = fill
    v[table[0, :hidden].long()] = fill
    table[0, :hidden] = -1
    at = dict(page_table=table, seqused_k=s.lengths, cu_seqlens_q=s.starts)
    with use_emulator(1):
        found = tilewise.attention(
            torch.cat(s.q), k, v, **at, **options, split_size=128, return_lse=True, backend="hopper"
        )
    assert_equal(found, expected)


@pytest.mark.parametrize("seed", sample(range(12), 1))
def test_any_order_of_warps(seed, warpgroups):
    """Halves that end at different blocks, and parts of one block, whose stages are passed."""
    s = drawn([130, 1, 40, 65], [130, 60, 300, 64])
    expected = by_one(warpgroups, s, 16, causal=True)
    assert_equal(run(s, 16, seed, causal=True), expected)
    assert_equal(run(s, 3, seed, causal=True), by_one(warpgroups, s, 3, causal=True))


@pytest.mark.parametrize("factor", sample([3.0, 30.0], 30.0))
def test_maxima_that_grow(factor, warpgroups):
    """A row's m lags behind its maximum, up to a threshold, by the same rule on all paths: two
    warpgroups, one, and one query at a time, whose operands are swapped.
    """
    s = drawn([80, 1, 33], [330, 268, 279])
    grown = [x * torch.linspace(0, factor, len(x))[:, None, None].to(BF16) for x in s.k]
    s = type(s)(s.q, grown, s.v)
    options = dict(causal=True, split_size=256)
    found = run(s, 16, **options)
    check(s, found, causal=True)
    assert_equal(by_one(warpgroups, s, 8, **options), found)
    warpgroups(1)
    for i in (0, 41, 79):
        n = 330 - 79 + i
        one = type(s)([s.q[0][i : i + 1]], [s.k[0][:n]], [s.v[0][:n]])
        assert_equal(run(one, 8, **options), (found[0][i : i + 1], found[1][:, i : i + 1]))


def test_a_tree_of_drafts(warpgroups):
    s = drawn([70, 3], [300, 133])
    chain = [(1 << i + 1) - 1 for i in range(64)] + [0] * 6
    ancestors = torch.tensor([x - (x >> 63 << 64) for x in chain] + [1, 1, 5])
    mask = mods.tree(ancestors, s.lengths, s.starts)
    found = run(s, 16, mask_mod=mask)
    assert_equal(by_one(warpgroups, s, 16, mask_mod=mask), found)


def test_training_has_the_bits_of_decoding(warpgroups):
    """C3."""
    s = drawn([300], [300])
    q, k, v = (x[0].unsqueeze(0) for x in s)
    options = dict(causal=True, split_size=128, backend="hopper", return_lse=True)
    with use_emulator(4):
        out, lse = tilewise.attention(q.clone().requires_grad_(), k, v, **options)
    for a, b in ((0, 150), (150, 300), (128, 129)):
        part = type(s)([s.q[0][a:b]], [s.k[0][:b]], [s.v[0][:b]])
        found = by_one(warpgroups, part, 16, causal=True)
        assert_equal(found, (out[0, a:b].detach(), lse[0, :, a:b].detach()))


def test_which_calls_get_two():
    """Many queries of each sequence, and as many tiles as programs; not caches of 8 bits, nor
    headdims without registers for it. Any shape, whatever the lengths on the device.
    """

    def asked(queries, batch, heads=(32, 8), headdim=128, kept=BF16, programs=132):
        q = torch.empty(queries, heads[0], headdim, dtype=BF16)
        k = torch.empty(batch, 1, heads[1], headdim).to(kept)
        starts = torch.linspace(0, queries, batch + 1).int()
        lengths = None, starts
        cached = check_cached(
            q, k, k, None, lengths, (None,) * 3, (False, None, None, None, None), "bshd"
        )
        return choose(cached.problem, cached, batch, programs)

    assert [asked(n, 1) for n in (8, 256, 512, 2048)] == [1, 1, 2, 2]
    assert asked(63 + 2048, 64) == asked(63 + 512, 64) == 2
    assert asked(256, 256) == asked(8 * 256, 256) == 1
    assert asked(2048, 1, headdim=256) == asked(2048, 1, kept=torch.float8_e4m3fn) == 1
    assert asked(2048, 1, heads=(4, 1)) == 1  # half as many tiles as programs
