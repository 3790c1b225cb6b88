"""The tile schedule: the work tile of a tile number.

The tiles of one head are neighbours, so that its keys and values stay in the L2 cache. Under a
causal mask the last queries have the most keys to visit: they go first, and the short tiles fill
the tail.
"""

import triton
import triton.language as tl

from .varlen import Hint, interleave_heads, varlen_tile


@triton.jit
def find_query_tile(tile, lane, sizes, optionals, FEATURES: tl.constexpr, BLOCK_M: tl.constexpr):
    """Tile number -> (m_block, head, batch), of packed sequences, too; `lane` is 0 .. 31. Past the
    last tile, batch is `sizes.packed`.
    """
    if FEATURES.PACKED:
        starts, total, last_first = optionals.cu_seqlens_q, sizes.seqlen_q, FEATURES.RIGHT
        packed, nheads = sizes.packed, sizes.nheads
        of = varlen_tile(
            tile, Hint(0, 0), lane, starts, total, packed, nheads, BLOCK_M, 1, last_first
        )
        return of.m_block, of.head, of.batch
    else:
        return query_tile(tile, sizes, FEATURES=FEATURES, BLOCK_M=BLOCK_M)


@triton.jit
def find_key_tile(tile, lane, sizes, optionals, FEATURES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tile number -> (n_block, head_k, batch), of packed sequences, too."""
    if FEATURES.PACKED:
        starts, total = optionals.cu_seqlens_k, sizes.seqlen_k
        packed, nheads_k = sizes.packed, sizes.nheads // FEATURES.GROUP
        of = varlen_tile(tile, Hint(0, 0), lane, starts, total, packed, nheads_k, BLOCK_N)
        return of.m_block, of.head, of.batch
    else:
        return key_tile(tile, sizes, FEATURES=FEATURES, BLOCK_N=BLOCK_N)


@triton.jit
def query_tile(tile, sizes, FEATURES: tl.constexpr, BLOCK_M: tl.constexpr):
    """Tile number -> (m_block, head, batch), longest first."""
    m_blocks = tl.cdiv(sizes.seqlen_q, BLOCK_M)
    m_block = tile % m_blocks
    if FEATURES.RIGHT:
        m_block = m_blocks - 1 - m_block
    batch_head = tile // m_blocks
    return m_block, batch_head % sizes.nheads, batch_head // sizes.nheads


@triton.jit
def query_tile_in_group(tile, queue, seqlen_q, BLOCK_M: tl.constexpr):
    """Tile number -> (m_block, head, batch), for programs that take tile after tile.

    Heads come in groups, so that concurrent programs read few keys and values (L2 reuse); in each
    group the longest tiles come first.
    """
    m_blocks = tl.cdiv(seqlen_q, BLOCK_M)
    rank, head, batch = _in_group(tile, queue, blocks=m_blocks)
    return m_blocks - 1 - rank, head, batch


def even_group(heads: int, most: int) -> int:
    """`Queue.l2_group`: of so many heads those of a group, where at most `most` are mixed.

    A last group of few heads would end with long tiles that nothing levels out (headdim 256,
    16Ki: 8 heads as 6 and 2 take 1.14 times as long as 4 and 4).

    >>> even_group(14, 8)
    7
    """
    return triton.cdiv(heads, triton.cdiv(heads, max(1, most)))


@triton.jit
def key_tile_in_group(tile, queue, seqlen_k, BLOCK_N: tl.constexpr):
    """Tile number -> (n_block, head_k, batch): the same for tiles of keys, of which the first are
    the longest.
    """
    return _in_group(tile, queue, blocks=tl.cdiv(seqlen_k, BLOCK_N))


@triton.jit
def _in_group(tile, queue, blocks):
    """Tile number -> (which of its head's blocks, head, batch), the heads of a group
    interleaved.
    """
    rank, head = interleave_heads(tile, blocks, heads=queue.heads, width=queue.l2_group)
    return rank, head % queue.nheads, head // queue.nheads


@triton.jit
def key_tile(tile, sizes, FEATURES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tile number -> (n_block, head_k, batch). Under a causal mask the first keys are seen by the
    most queries.
    """
    n_blocks = tl.cdiv(sizes.seqlen_k, BLOCK_N)
    nheads_k = sizes.nheads // FEATURES.GROUP
    batch_head = tile // n_blocks
    return tile % n_blocks, batch_head % nheads_k, batch_head // nheads_k
