"""The varlen tile scheduler: the work tile of a tile number, when only the device knows the
lengths.

Tiles are numbered by batch, then head, then block inside a head, then split. Sequences of 160 and
300 queries have 2 and 3 blocks of 128: with one head, tiles 0 and 1 lie in sequence 0, tiles 2, 3
and 4 in sequence 1. A tile's number is

    block + head * blocks(batch) + nheads * (blocks of all sequences before it)

and this module solves it for (batch, head, block), as FlashAttention-3's
VarlenDynamicPersistentTileScheduler does: the lanes of a warp hold the block counts of 32
sequences, their sum says whether the tile lies in this group of 32, and their prefix sums say in
which of them. `tilewise.testing.schedule` says the same in plain Python.

Starts are not validated, and wrong ones may ask for more tiles than sequences of these rows can
have. Numbers from that bound on are no tile, in every program.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .seqlen import rows_of, with_tail

WARP_LANES = tl.constexpr(32)  # sequences per group: the lanes of a warp
# Blocks: interleaved heads of 4-block sequences were 6 % slower (H200, headdim 64, backward), of 32
# blocks 1 % faster
INTERLEAVE_FROM = tl.constexpr(16)


class Hint(NamedTuple):
    """Where to begin the search: the first sequence of a group, and the tiles before it. It is
    valid for every tile from that number on; Hint(0, 0) for all.
    """

    batch: tl.tensor
    tiles: tl.tensor


class VarlenTile(NamedTuple):
    """The work tile of a tile number. Without `is_tile`, `batch` is batch_size and the rest 0."""

    m_block: tl.tensor
    head: tl.tensor
    batch: tl.tensor
    split_idx: tl.tensor
    is_tile: tl.tensor
    hint: Hint
    tiles: tl.tensor  # before it and in its group of sequences; all there are where it is none


@triton.jit
def varlen_tile(
    tile,
    hint,
    lane,
    cu_seqlens,
    total,
    batch_size,
    nheads,
    BLOCK: tl.constexpr,
    NUM_SPLITS: tl.constexpr = 1,
    LONGEST_FIRST: tl.constexpr = False,
    l2_group=None,
    LEAST: tl.constexpr = 0,
):
    """Tile number -> VarlenTile, of sequences that have `total` rows together; `lane` is 0 .. 31 in
    the caller's layout.

    A program that takes tile after tile, each later than the one before, passes the hint on and
    reads no group twice that it has left behind. The grid may be an upper bound, `most_tiles`:
    tiles past the last are none.

    LONGEST_FIRST reverses the blocks of a head, of which the last see the most keys under a causal
    mask. An empty sequence has no tile.

    Heads of a long sequence whose blocks are at most `l2_group` are interleaved, so that equal
    blocks of several heads are neighbours. With LEAST, sequences of fewer rows have no tile, and
    none has rows behind the last one's.
    """
    times = nheads * NUM_SPLITS
    first = hint.batch - WARP_LANES
    after = hint.tiles  # the tiles up to and with the group
    blocks = lane * 0
    # Entered at least once: Triton 3.6 crashes on a load that it can prove to be never reached, as
    # it could here for a batch of one. The tiles before the group are no variable of the loop: they
    # would enter it as the same value as `after`, and Triton would take both for one.
    while (after <= tile) & (first + WARP_LANES < batch_size):
        first += WARP_LANES
        blocks = blocks_of(first + lane, cu_seqlens, total, batch_size, BLOCK, LEAST)
        after += tl.sum(blocks, 0) * times
    before = after - tl.sum(blocks, 0) * times

    ends = before + tl.cumsum(blocks, 0) * times  # the tiles up to and with each sequence
    after = tl.minimum(after, most_tiles(total, batch_size, times=times, BLOCK=BLOCK))
    is_tile = tile < after
    is_passed = ends <= tile
    place = tl.sum(is_passed.to(tl.int32), 0)
    start = tl.max(tl.where(is_passed, ends, before), 0)
    m_blocks = tl.sum(tl.where(lane == place, blocks, 0), 0)

    within = tl.where(is_tile, tile - start, 0)
    m_blocks = tl.maximum(m_blocks, 1)  # 0 where there is no tile
    split_idx = within % NUM_SPLITS
    if l2_group is None:
        m_block = within // NUM_SPLITS % m_blocks
        head = within // NUM_SPLITS // m_blocks
    else:
        width = tl.where(m_blocks >= INTERLEAVE_FROM, tl.maximum(l2_group // m_blocks, 1), 1)
        m_block, head = interleave_heads(within // NUM_SPLITS, m_blocks, heads=nheads, width=width)
    if LONGEST_FIRST:
        m_block = m_blocks - 1 - m_block
    batch = tl.where(is_tile, first + place, batch_size)
    return VarlenTile(m_block, head, batch, split_idx, is_tile, Hint(first, before), after)


@triton.jit
def interleave_heads(tile, blocks, heads, width):
    """Tile number -> (block, head), where the heads of each group of `width` are interleaved."""
    group = tile // (width * blocks)
    index = tile - group * (width * blocks)
    first = group * width
    width = tl.minimum(width, heads - first)
    return index // width, first + index % width


@triton.jit
def blocks_of(batch, cu_seqlens, total, batch_size, BLOCK: tl.constexpr, LEAST: tl.constexpr = 0):
    """How many blocks each of these sequences has; 0 past the last sequence."""
    this, following = tl.minimum(batch, batch_size), tl.minimum(batch + 1, batch_size)
    first, rows = rows_of(cu_seqlens, this, following=following, total=total)
    if LEAST > 0:
        rows = tl.where(rows >= LEAST, rows, 0)
    else:
        rows = with_tail(rows, first, batch=batch, sequences=batch_size, total=total)
    return tl.where(batch < batch_size, tl.cdiv(rows, BLOCK), 0)


@triton.jit
def most_tiles(total, batch_size, times, BLOCK: tl.constexpr):
    """How many tiles such sequences can have: each one that is not full. `times` is how often a
    block comes: heads, and splits.
    """
    return (total // BLOCK + batch_size) * times
