"""Ordered accumulation of dQ, for the same bits in every run.

Sums of floats depend on their order. So tiles of keys add to a block of dQ in a fixed order: each
block has a semaphore in global memory, which a tile waits for until it equals the tile's rank, and
increments after its addition (flash-attn's `dQ_semaphore`). One warp waits and another signals,
each a round trip to the L2 cache: the matmul warpgroups only wait for an mbarrier, whose phase has
mostly completed before.

The order is that of keys; but under a causal mask the last keys come first. A tile's first block is
then the diagonal's, and tiles that start at the same time never contend: each adds to a block that
the tile of keys after it has just finished.

There is no deadlock: tiles of a head are handed out in this same order, and only to programs that
run (`fetch_tile`). So a tile waits only for tiles that are running and were handed out before it,
and of all these the first waits for none.

Wrong `cu_seqlens` cause no deadlock either, although two sequences may then share a block and its
semaphore: a semaphore only grows, and a tile waits until it has reached its rank. The previous tile
has then added; the order relative to the other sequence's tiles is unspecified.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....tile.bounds import key_blocks
from ....tile.types import Sequence
from ..pipeline import make_barrier
from ..work import END
from .query_blocks import block_after, block_index, count_blocks, first_block
from .work_tile import receive_tile, tile_lengths


class AddBarriers(NamedTuple):
    """mbarriers of two blocks each, or of four tiles, of which there is only the second."""

    may_add: gl.shared_memory_descriptor  # the semaphore has reached the tile's rank
    added: gl.shared_memory_descriptor  # both warpgroups have added
    signaled: gl.shared_memory_descriptor  # and the semaphore was incremented


class AddOrder(NamedTuple):
    """A tile's place in the order of additions to a block: the semaphore, how many tiles add before
    this one, and whether this one adds at all (a fully masked tile still processes one block).
    """

    semaphore: gl.tensor
    rank: gl.tensor
    is_visited: gl.tensor


@gluon.jit
def make_add_barriers(TILE: gl.constexpr):
    """The barriers, where accumulation is ordered, and else of tiles, which are counted."""
    if TILE.ORDERED:
        return AddBarriers(make_barrier(2, 1), make_barrier(2, 2), make_barrier(2, 1))
    elif not TILE.HAS_DQ:
        return AddBarriers(0, 0, signaled=0)
    else:
        return AddBarriers(0, make_barrier(4, 2), signaled=0)


@gluon.jit
def wait_to_add(barriers, step, TILE: gl.constexpr):
    """Waits until a warpgroup may add to the block, where accumulation is ordered."""
    if TILE.ORDERED:
        mbarrier.wait(barriers.may_add.index(step & 1), (step >> 1) & 1)


@gluon.jit
def arrive_added(barriers, step, TILE: gl.constexpr):
    """Signals that a warpgroup has added its part of the block."""
    if TILE.ORDERED:
        mbarrier.arrive(barriers.added.index(step & 1), count=1)


@gluon.jit
def arrive_tile(barriers, tiles, TILE: gl.constexpr):
    """Signals that a warpgroup has added all that a tile adds, where tiles are counted.

    The barrier has four stages: warpgroups are up to two tiles ahead of the warp that counts, which
    frees a message, for the tile after the next, as soon as it has read it.
    """
    if TILE.HAS_DQ and not TILE.ORDERED:
        mbarrier.arrive(barriers.added.index(tiles & 3), count=1)


@gluon.jit
def order_partition(
    rings, semaphores, call, SIGNALS: gl.constexpr, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """The warp that waits for semaphores, up to two blocks ahead of the warpgroups; or the one that
    SIGNALS: it increments a block's semaphore once both warpgroups have added to the block.
    """
    barriers = rings.add_barriers
    step = gl.to_tensor(0)
    tiles = gl.to_tensor(0)
    work = receive_tile(rings.messages, tiles, TILE=TILE, WARPS=1)
    while work.start != END:
        block = first_block(work, FEATURES)
        for _ in range(count_blocks(work, FEATURES)):
            order = add_order_of(semaphores, work, block, call, FEATURES, TILE)
            if SIGNALS:
                mbarrier.wait(barriers.added.index(step & 1), (step >> 1) & 1)
                if order.is_visited:
                    gl.atomic_max(order.semaphore, order.rank + 1, sem="release")
                mbarrier.arrive(barriers.signaled.index(step & 1), count=1)
            else:
                mbarrier.wait(barriers.signaled.index(step & 1), ((step >> 1) & 1) ^ 1)
                if order.is_visited & (order.rank > 0):
                    wait_semaphore(order)
                mbarrier.arrive(barriers.may_add.index(step & 1), count=1)
            block = block_after(block, work, FEATURES=FEATURES, TILE=TILE)
            step += 1
        tiles += 1
        work = receive_tile(rings.messages, tiles, TILE=TILE, WARPS=1)


@gluon.jit
def wait_semaphore(order):
    """Waits until the previous tile has added its part, and its part is visible."""
    rank = gl.atomic_add(order.semaphore, 0, sem="acquire")
    while rank < order.rank:
        rank = gl.atomic_add(order.semaphore, 0, sem="acquire")


@gluon.jit
def add_order_of(semaphores, work, block, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The tile's place in the order of additions to a block."""
    seq = Sequence(tile_lengths(work, call, FEATURES, TILE), 0.0, numbers=call.numbers)
    visited = key_blocks(block.m_block * TILE.BLOCK_M, seq, FEATURES=FEATURES, TILE=TILE)
    n_block = work.start // TILE.BLOCK_N
    is_visited = (n_block >= visited.first) & (n_block < visited.stop)
    rank = visited.stop - 1 - n_block if FEATURES.RIGHT else n_block - visited.first
    index = block_index(block, work, call=call, FEATURES=FEATURES, TILE=TILE)
    if FEATURES.PACKED:  # two for each 128 queries, and only those of sequences are set to zero
        index *= TILE.BLOCK_M // 64
    return AddOrder(semaphores + index, rank, is_visited=is_visited)
