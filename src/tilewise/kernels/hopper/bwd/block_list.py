"""The blocks of queries that a block mask lists for a tile of keys: of each query head of its group
first the partial ones, then the full ones. Each head may have as many as it likes, or none.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.bounds import blocks_listed, count_full, count_partial, full_block, partial_block
from ....tile.types import Sequence
from ..work import Work


@gluon.jit
def listed_blocks(
    n_start, batch, head, modifiers, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """What one query head lists. The lists know how long they are, and need no lengths: TMA cuts a
    full block at the end, too.
    """
    lists = modifiers.by_keys
    seq = Sequence(0, 0.0, numbers=call.numbers, batch=batch, head=head, modifiers=modifiers)
    row = n_start // FEATURES.MASK_N
    blocks = gl.cdiv(call.sizes.seqlen_q, FEATURES.MASK_M)
    return blocks_listed(lists, seq, row, call.sizes.seqlen_q, blocks, blocks)


@gluon.jit
def listed_work(
    n_block, head, batch, lengths, modifiers, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """A tile of keys. Its message says how many blocks there are, of all query heads."""
    n_start = n_block * TILE.BLOCK_N
    count = n_block * 0
    for member in range(FEATURES.GROUP):
        query_head = head * FEATURES.GROUP + member
        listed = listed_blocks(n_start, batch, query_head, modifiers, call, FEATURES, TILE)
        count += count_listed(listed, FEATURES, TILE=TILE)
    # The lists do not account for `seqused_k`
    count = gl.where(n_start < lengths.seqlen_k, count, 0)
    return Work(n_start, head, batch, count - 1, 0, 0, 0, 0)


@gluon.jit
def count_listed(listed, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """How many blocks a head lists."""
    SPLIT: gl.constexpr = FEATURES.MASK_M // TILE.BLOCK_M
    return count_partial(listed, SPLIT) + count_full(listed, SPLIT)


@gluon.jit
def listed_block(listed, i, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The i-th block of a head, and whether it is partial."""
    SPLIT: gl.constexpr = FEATURES.MASK_M // TILE.BLOCK_M
    partial = count_partial(listed, SPLIT)
    if i < partial:
        m_block = partial_block(listed, i, SPLIT=SPLIT)
    else:
        m_block = full_block(listed, i - partial, SPLIT=SPLIT)
    return m_block, i < partial
