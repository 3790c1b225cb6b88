"""Which blocks a tile visits, and which of them need no mask.

Query i attends to keys i + diagonal - left .. i + diagonal + right. A tile of queries therefore
visits one interval of key blocks, and its full blocks, unmasked for all rows, form an interval
inside it: only the partial blocks around that are masked. The backward does the same for a tile of
keys. FlashAttention-2 (arXiv 2307.08691), section 3.1. A block mask has lists of both kinds
instead: its blocks may be larger than a tile, but not smaller. The lists are not validated on the
device: counts and indices are clamped to the existing blocks.
"""

import triton
import triton.language as tl

from .types import BlockRange, ListedBlocks


@triton.jit
def clamp(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def _block_range(first_row, stop_row, full_first_row, full_stop_row, limit, BLOCK: tl.constexpr):
    """Row intervals (seen by any, seen by all) in units of blocks; only blocks whole inside the
    second are full.
    """
    first_row = clamp(first_row, 0, high=limit)
    first = first_row // BLOCK
    stop_row = clamp(stop_row, first_row, high=limit)
    stop = tl.where(stop_row > first_row, tl.cdiv(stop_row, BLOCK), first)
    full_first = clamp(tl.cdiv(tl.maximum(full_first_row, 0), BLOCK), first, high=stop)
    full_stop = clamp(clamp(full_stop_row, 0, high=limit) // BLOCK, full_first, high=stop)
    return BlockRange(first, full_first, full_stop=full_stop, stop=stop)


@triton.jit
def key_blocks(m_start, seq, FEATURES: tl.constexpr, TILE: tl.constexpr):
    """The key blocks that queries m_start .. m_start + BLOCK_M visit."""
    if FEATURES.MASK_M > 0:
        lists = seq.modifiers.by_queries
        whole = lists.blocks  # where keys are not all used, full blocks are masked, too
        if not FEATURES.SEQUSED_K:
            whole = seq.lengths.seqlen_k // FEATURES.MASK_N
        row = m_start // FEATURES.MASK_M
        return blocks_listed(lists, seq, row, seq.lengths.seqlen_k, lists.blocks, whole)
    else:
        m_last = tl.minimum(m_start + TILE.BLOCK_M, seq.lengths.seqlen_q) - 1
        first = 0
        full_first = 0
        stop = seq.lengths.seqlen_k
        full_stop = seq.lengths.seqlen_k
        if FEATURES.LEFT:
            first = m_start + seq.lengths.diagonal - seq.numbers.left
            full_first = m_last + seq.lengths.diagonal - seq.numbers.left
        if FEATURES.RIGHT:
            stop = m_last + seq.lengths.diagonal + seq.numbers.right + 1
            full_stop = m_start + seq.lengths.diagonal + seq.numbers.right + 1
        if FEATURES.MASK_MOD is not None:  # it is evaluated for every pair
            full_stop = 0
        limit = seq.lengths.seqlen_k
        if FEATURES.PACKED:  # rows that are not used see no keys
            limit = tl.where(m_start < seq.lengths.seqlen_q, limit, 0)
        return _block_range(first, stop, full_first, full_stop, limit, TILE.BLOCK_N)


@triton.jit
def query_blocks(n_start, seq, FEATURES: tl.constexpr, TILE: tl.constexpr):
    """The query blocks that see keys n_start .. n_start + BLOCK_N: none where all these keys are
    past the end.
    """
    if FEATURES.MASK_M > 0:
        lists = seq.modifiers.by_keys
        whole = seq.lengths.seqlen_q // FEATURES.MASK_M
        row = n_start // FEATURES.MASK_N
        return blocks_listed(lists, seq, row, seq.lengths.seqlen_q, lists.blocks, whole)
    else:
        n_last = tl.minimum(n_start + TILE.BLOCK_N, seq.lengths.seqlen_k) - 1
        first = 0
        full_first = 0
        stop = seq.lengths.seqlen_q
        full_stop = seq.lengths.seqlen_q
        if FEATURES.RIGHT:
            first = n_start - seq.lengths.diagonal - seq.numbers.right
            full_first = n_last - seq.lengths.diagonal - seq.numbers.right
        if FEATURES.LEFT:
            stop = n_last - seq.lengths.diagonal + seq.numbers.left + 1
            full_stop = n_start - seq.lengths.diagonal + seq.numbers.left + 1
        if FEATURES.MASK_MOD is not None:
            full_stop = 0
        if n_start >= seq.lengths.seqlen_k:
            stop = first
            full_stop = first
        limit = seq.lengths.seqlen_q
        return _block_range(first, stop, full_first, full_stop, limit, TILE.BLOCK_M)


@triton.jit
def blocks_listed(lists, seq, row, limit, blocks, whole):
    """The lists of a block, which number `blocks` blocks, and among the first `whole` full ones:
    none where the other side has no rows, as a descriptor of no rows would read one.
    """
    n = list_row(lists, seq.batch, head=seq.head, row=row)
    most_partial = tl.where(limit > 0, lists.partial_width, 0)
    most_full = tl.where((limit > 0) & (whole > 0), lists.full_width, 0)
    return ListedBlocks(
        clamp(tl.load(lists.partial_counts + n), 0, high=most_partial),
        lists.partial + n * lists.partial_width,
        blocks,
        clamp(tl.load(lists.full_counts + n), 0, high=most_full),
        lists.full + n * lists.full_width,
        whole,
    )


@triton.jit
def list_row(lists, batch, head, row):
    """The number of a block's row among all lists."""
    return tl.cast(batch * lists.batch_rows + head * lists.head_rows + row, tl.int64)


@triton.jit
def count_partial(blocks, SPLIT: tl.constexpr = 0):
    """How many blocks need a mask. SPLIT: how many make up one of the block mask, 0 without one."""
    if SPLIT > 0:
        return blocks.partial_count * SPLIT
    else:
        return blocks.stop - blocks.first - (blocks.full_stop - blocks.full_first)


@triton.jit
def partial_block(blocks, i, SPLIT: tl.constexpr = 0):
    """The i-th block that needs a mask: those before the full run, then those after it."""
    if SPLIT > 0:
        block = clamp(tl.load(blocks.partial + i // SPLIT), 0, blocks.blocks - 1)
        return block * SPLIT + i % SPLIT
    else:
        before = blocks.full_first - blocks.first
        return tl.where(i < before, blocks.first + i, blocks.full_stop + i - before)


@triton.jit
def count_full(blocks, SPLIT: tl.constexpr = 0):
    """How many blocks need none."""
    if SPLIT > 0:
        return blocks.full_count * SPLIT
    else:
        return blocks.full_stop - blocks.full_first


@triton.jit
def full_block(blocks, i, SPLIT: tl.constexpr = 0):
    """The i-th block that needs none."""
    if SPLIT > 0:
        block = clamp(tl.load(blocks.full + i // SPLIT), 0, blocks.whole - 1)
        return block * SPLIT + i % SPLIT
    else:
        return blocks.full_first + i
