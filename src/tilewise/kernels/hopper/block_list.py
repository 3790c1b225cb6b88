"""The blocks of keys that a tile visits, where a block mask lists them: partial ones first, then
full ones.

A tile's blocks are then numbered by their place on the two lists, concatenated: `first` is 0,
`full_first` how many are partial, `full_stop` how many there are. The load warp counts them, and
every partition reads the block indices from the lists, which stay in the L1 cache.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.bounds import clamp, count_full, count_partial, key_blocks, list_row
from ...tile.types import BlockRange


@gluon.jit
def visited(m_start, seq, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The key blocks that queries from m_start on visit, or their places on the lists."""
    blocks = key_blocks(m_start, seq, FEATURES=FEATURES, TILE=TILE)
    if FEATURES.MASK_M > 0:
        SPLIT: gl.constexpr = FEATURES.MASK_N // TILE.BLOCK_N
        partial = count_partial(blocks, SPLIT)
        listed = partial + count_full(blocks, SPLIT)
        return BlockRange(0, partial, full_stop=listed, stop=listed)
    else:
        return blocks


@gluon.jit
def listed_block(work, i, lists, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The key block at place i; 0 past the last place, where a fully masked tile is."""
    SPLIT: gl.constexpr = FEATURES.MASK_N // TILE.BLOCK_N
    row = list_row(lists, work.batch, head=work.head, row=work.start // FEATURES.MASK_M)
    place = i // SPLIT
    full_place = place - work.full_first // SPLIT
    is_partial = i < work.full_first
    is_full = (i >= work.full_first) & (i < work.full_stop)
    partial = gl.load(lists.partial + row * lists.partial_width + place, is_partial, other=0)
    full = gl.load(lists.full + row * lists.full_width + full_place, is_full, other=0)
    listed = clamp(gl.where(is_partial, partial, full), 0, lists.blocks - 1)
    return listed * SPLIT + i % SPLIT
