"""Blocks that a tile visits hold every visible pair, and full blocks hold nothing else."""

import pytest
import torch
import triton
import triton.language as tl
from helpers.records import features, sequence, tile_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tilewise.testing import interpret
from tilewise.tile.bounds import count_partial, key_blocks, partial_block, query_blocks
from tilewise.tile.predicates import within_left, within_right


@triton.jit
def key_blocks_kernel(
    first_block,
    ranges,
    partials,
    seq,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
):
    at = tl.program_id(0)
    blocks = key_blocks((first_block + at) * TILE.BLOCK_M, seq, FEATURES, TILE)
    store_range(ranges + 4 * at, partials + MOST * at, blocks, MOST)


@triton.jit
def query_blocks_kernel(
    first_block,
    ranges,
    partials,
    seq,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
):
    at = tl.program_id(0)
    blocks = query_blocks((first_block + at) * TILE.BLOCK_N, seq, FEATURES, TILE)
    store_range(ranges + 4 * at, partials + MOST * at, blocks, MOST)


@triton.jit
def store_range(to, partials, blocks, MOST: tl.constexpr):
    tl.store(to, blocks.first)
    tl.store(to + 1, blocks.full_first)
    tl.store(to + 2, blocks.full_stop)
    tl.store(to + 3, blocks.stop)
    for i in range(tl.minimum(count_partial(blocks), MOST)):
        tl.store(partials + i, partial_block(blocks, i))


def ranges_of(kernel, tiles, seq, on, tile, first_block=0, most=100):
    """One (first, full_first, full_stop, stop) for each tile, and the partial blocks it visits."""
    ranges = torch.full((tiles, 4), -7, dtype=torch.int64)
    partials = torch.full((tiles, most), -7, dtype=torch.int64)
    interpret(kernel)[(tiles,)](
        first_block, ranges, partials, seq, FEATURES=on, TILE=tile, MOST=most
    )
    return ranges.tolist(), [[x for x in row if x != -7] for row in partials.tolist()]


def visible_pairs(seq, on):
    """(seqlen_q, seqlen_k): which query sees which key."""
    q_idx = torch.arange(seq.lengths.seqlen_q)[:, None]
    k_idx = torch.arange(seq.lengths.seqlen_k)[None, :]
    visible = torch.ones(seq.lengths[:2], dtype=torch.bool)
    if on.LEFT:
        visible &= within_left(q_idx, k_idx, seq.lengths.diagonal, seq.numbers.left)
    if on.RIGHT:
        visible &= within_right(q_idx, k_idx, seq.lengths.diagonal, seq.numbers.right)
    return visible


def check_ranges(ranges, partials, visible, rows, columns):
    """`visible` has one row for each row of the tiles that walk, `rows` of them to a tile."""
    blocks = triton.cdiv(visible.shape[1], columns)
    for i, ((first, full_first, full_stop, stop), partial) in enumerate(zip(ranges, partials)):
        assert 0 <= first <= full_first <= full_stop <= stop <= blocks
        assert partial == [*range(first, full_first), *range(full_stop, stop)]
        mine = visible[i * rows : (i + 1) * rows]
        for j in range(blocks):
            pairs = mine[:, j * columns : (j + 1) * columns]
            if not first <= j < stop:
                assert not pairs.any(), (i, j)
            if full_first <= j < full_stop:
                assert pairs.all() and pairs.shape[1] == columns, (i, j)


def both_walks(seq, on, tile):
    """Checks the forward's walk over keys and the backward's over queries."""
    visible = visible_pairs(seq, on)
    tiles = triton.cdiv(seq.lengths.seqlen_q, tile.BLOCK_M)
    found = ranges_of(key_blocks_kernel, tiles, seq, on, tile)
    check_ranges(*found, visible, tile.BLOCK_M, tile.BLOCK_N)
    # of a padded batch, where tiles past seqused_k exist as well: they visit nothing
    tiles = triton.cdiv(seq.lengths.seqlen_k, tile.BLOCK_N)
    ranges, partials = ranges_of(query_blocks_kernel, tiles + 2, seq, on, tile)
    assert all(first == stop for first, _, _, stop in ranges[tiles:])
    check_ranges(ranges[:tiles], partials[:tiles], visible.T, tile.BLOCK_N, tile.BLOCK_M)
    assert partials[tiles:] == [[], []]


sides = st.one_of(st.just(-1), st.integers(0, 150))
blocks = st.sampled_from([16, 32, 64])


@settings(max_examples=60, deadline=None, database=None)
@given(
    seqlen_q=st.integers(1, 130),
    seqlen_k=st.integers(0, 130),
    left=sides,
    right=sides,
    top_left=st.booleans(),
    block_m=blocks,
    block_n=blocks,
)
@example(130, 5, -1, 0, False, 16, 16)  # rows that see nothing: a negative diagonal
@example(5, 130, 0, 0, False, 64, 16)
@example(96, 0, 3, 0, False, 32, 32)  # no key
@example(128, 128, 31, 31, True, 32, 32)
@example(1, 100, 70, 0, False, 64, 64)  # one row of a tile is there
def test_bounds(seqlen_q, seqlen_k, left, right, top_left, block_m, block_n):
    diagonal = 0 if top_left else None
    seq = sequence(seqlen_q, seqlen_k, diagonal, left, right)
    on = features(LEFT=left >= 0, RIGHT=right >= 0, TOP_LEFT=top_left)
    both_walks(seq, on, tile_of(block_m, block_n))


def test_full_blocks_are_found():
    """Nothing above says that a block which needs no mask is called full."""
    tile = tile_of(32, 32)
    seq = sequence(128, 144)
    every, _ = ranges_of(key_blocks_kernel, 4, seq, features(), tile)
    assert every == [[0, 0, 4, 5]] * 4  # the last one is cut by the end of the keys
    seq = sequence(128, 128, right=0)
    causal, _ = ranges_of(key_blocks_kernel, 4, seq, features(RIGHT=True), tile)
    assert causal == [[0, 0, i, i + 1] for i in range(4)]
    causal, _ = ranges_of(query_blocks_kernel, 4, seq, features(RIGHT=True), tile)
    assert causal == [[i, i + 1, 4, 4] for i in range(4)]
    seq = sequence(128, 128, left=64, right=64)
    band, _ = ranges_of(key_blocks_kernel, 4, seq, features(LEFT=True, RIGHT=True), tile)
    assert band == [[0, 0, 2, 3], [0, 0, 3, 4], [0, 1, 4, 4], [1, 2, 4, 4]]


HUGE = 2**30 - 256


@pytest.mark.parametrize(
    "window", [(-1, 0), (0, -1), (2**31 - 1, 2**31 - 1), (HUGE, HUGE)], ids=str
)
@pytest.mark.parametrize("lengths", [(HUGE, HUGE), (HUGE, 100), (100, HUGE)], ids=str)
@pytest.mark.parametrize("top_left", [False, True], ids=["bottom-right", "top-left"])
def test_huge_lengths_stay_in_32_bits(lengths, window, top_left):
    """The interpreter raises where an int32 overflows; the ends of the walk are compared with exact
    integers.
    """
    left, right = window
    tile, block = tile_of(64, 64), 64
    seq = sequence(*lengths, 0 if top_left else None, left, right)
    on = features(LEFT=left >= 0, RIGHT=right >= 0, TOP_LEFT=top_left)
    seqlen_q, seqlen_k, diagonal = seq.lengths
    sides = (left if on.LEFT else 2**40, right if on.RIGHT else 2**40)
    walks = [
        (key_blocks_kernel, seqlen_q, seqlen_k, diagonal, *sides),
        (query_blocks_kernel, seqlen_k, seqlen_q, -diagonal, *sides[::-1]),
    ]
    for kernel, mine, other, shift, before, after in walks:
        for at in {0, triton.cdiv(mine, block) // 2, triton.cdiv(mine, block) - 1}:
            ((first, _, _, stop),), _ = ranges_of(kernel, 1, seq, on, tile, at, most=1)
            low, high = at * block, min((at + 1) * block, mine) - 1
            start = min(max(0, low + shift - before), other)
            end = max(start, min(other, high + shift + after + 1))
            assert (first, stop) == (
                start // block,
                start // block if start == end else -(-end // block),
            )
