"""The blocks of queries that a tile of keys visits, one after the other: all of one head, then
those of the next head of its group.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.seqlen import padded_row
from .work_tile import ROWS


class QueryBlock(NamedTuple):
    """A block of queries."""

    head: gl.tensor
    m_block: gl.tensor


@gluon.jit
def count_blocks(work, FEATURES: gl.constexpr):
    """How many blocks a tile visits; the message has the sum over heads where a mask lists them."""
    if FEATURES.MASK_M > 0:
        return work.last + 1 - work.first
    else:
        return (work.last + 1 - work.first) * FEATURES.GROUP


@gluon.jit
def counts_heads(FEATURES: gl.constexpr, TILE: gl.constexpr):
    """Whether the loop counts heads, also of one: what follows from a constant would be computed
    before the loop, and wide tiles and random numbers would spill it, but for packed sequences.
    """
    is_wide = TILE.BLOCK_N == 64 and (FEATURES.NATURAL or FEATURES.MASK_MOD is not None)
    return FEATURES.GROUP > 1 or ((is_wide or FEATURES.DROPOUT) and not FEATURES.PACKED)


@gluon.jit
def first_block(work, FEATURES: gl.constexpr):
    """The block that it begins with."""
    return QueryBlock(work.head * FEATURES.GROUP, work.begin)


@gluon.jit
def block_after(block, work, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The next block. In a band a tile of one head begins with the first, unless it is spread."""
    head, m_block = block.head, block.m_block + 1
    if FEATURES.GROUP > 1 or TILE.SPREAD > 0 or not (FEATURES.LEFT or FEATURES.RIGHT):
        m_block = gl.where(m_block > work.last, work.first, m_block)
    if counts_heads(FEATURES, TILE):
        head += (m_block == work.begin).to(gl.int32)
    return QueryBlock(head, m_block)


@gluon.jit
def block_index(block, work, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """Which of all blocks it is, of all heads and sequences. The kernel that makes dQ of their sums
    takes 128 rows at a time.
    """
    if FEATURES.PACKED:
        rows = padded_row(call.sizes.seqlen_q, call.sizes.packed, ROWS=ROWS)
        before = block.head.to(gl.int64) * (rows // TILE.BLOCK_M)
        return before + work.padded_q // TILE.BLOCK_M + block.m_block
    else:
        heads = work.batch.to(gl.int64) * call.sizes.nheads + block.head
        blocks = gl.cdiv(call.sizes.seqlen_q, ROWS) * (ROWS // TILE.BLOCK_M)
        return heads * blocks + block.m_block
