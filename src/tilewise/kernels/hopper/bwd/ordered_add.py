"""Whose turn it is to add to a block of dQ: the same bits in every run.

Sums of floats depend on their order. So tiles of keys add to a block in a fixed order, each when
the block's counter in memory says its rank, and then count on. One warp does the asking and another
the counting, each a trip to the L2 cache and back: the matmul warpgroups only wait for a barrier,
which is mostly there before them.

The order is that of keys; but under a causal mask the last keys come first. A tile's first block is
then the diagonal's, and tiles that start together never meet: each finds a block that the tile of
keys after it has just left.

There is no deadlock: tiles of a head are handed out in this same order, and only to programs that
run (`fetch_tile`). So a tile waits only for tiles that are at work and were handed out before it,
and of all these the first waits for none.

Nor do they where starts of packed sequences are wrong, and two sequences share a block and its
counter: a counter only grows, and a tile waits until it has reached its rank. The tile before has
then added; what the other sequence's tiles add, they add when they may.
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


class Turns(NamedTuple):
    """Barriers of two blocks each."""

    given: gl.shared_memory_descriptor  # the warpgroups may add to the block
    added: gl.shared_memory_descriptor  # both have
    passed: gl.shared_memory_descriptor  # and the next tile may


class Turn(NamedTuple):
    """A tile's turn at a block: its counter, how many tiles add before this one, and whether this
    one does at all, as a fully masked tile still visits one block.
    """

    counter: gl.tensor
    rank: gl.tensor
    is_visited: gl.tensor


@gluon.jit
def make_turns(TILE: gl.constexpr):
    """The barriers, where adding is ordered."""
    if TILE.ORDERED:
        return Turns(make_barrier(2, 1), make_barrier(2, 2), make_barrier(2, 1))
    else:
        return Turns(0, 0, 0)


@gluon.jit
def await_turn(turns, step, TILE: gl.constexpr):
    """Until a warpgroup may add to the block, where that is ordered."""
    if TILE.ORDERED:
        mbarrier.wait(turns.given.index(step & 1), (step >> 1) & 1)


@gluon.jit
def end_turn(turns, step, TILE: gl.constexpr):
    """A warpgroup has added all that it has for the block."""
    if TILE.ORDERED:
        mbarrier.arrive(turns.added.index(step & 1), count=1)


@gluon.jit
def ask_partition(rings, counters, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The warp that asks, up to two blocks ahead of the warpgroups."""
    step = gl.to_tensor(0)
    tiles = gl.to_tensor(0)
    work = receive_tile(rings.mailbox, tiles, TILE, 1)
    while work.start != END:
        block = first_block(work, FEATURES)
        for _ in range(count_blocks(work, FEATURES)):
            turn = turn_at(counters, work, block, call, FEATURES, TILE)
            mbarrier.wait(rings.turns.passed.index(step & 1), ((step >> 1) & 1) ^ 1)
            if turn.is_visited & (turn.rank > 0):
                ask(turn)
            mbarrier.arrive(rings.turns.given.index(step & 1), count=1)
            block = block_after(block, work, FEATURES)
            step += 1
        tiles += 1
        work = receive_tile(rings.mailbox, tiles, TILE, 1)


@gluon.jit
def pass_partition(rings, counters, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The warp that counts: the next tile may add, after what both warpgroups have added."""
    step = gl.to_tensor(0)
    tiles = gl.to_tensor(0)
    work = receive_tile(rings.mailbox, tiles, TILE, 1)
    while work.start != END:
        block = first_block(work, FEATURES)
        for _ in range(count_blocks(work, FEATURES)):
            turn = turn_at(counters, work, block, call, FEATURES, TILE)
            mbarrier.wait(rings.turns.added.index(step & 1), (step >> 1) & 1)
            if turn.is_visited:
                gl.atomic_max(turn.counter, turn.rank + 1, sem="release")
            mbarrier.arrive(rings.turns.passed.index(step & 1), count=1)
            block = block_after(block, work, FEATURES)
            step += 1
        tiles += 1
        work = receive_tile(rings.mailbox, tiles, TILE, 1)


@gluon.jit
def ask(turn):
    """Until the tile before has added its part, and its part is there to be seen."""
    rank = gl.atomic_add(turn.counter, 0, sem="acquire")
    while rank < turn.rank:
        rank = gl.atomic_add(turn.counter, 0, sem="acquire")


@gluon.jit
def turn_at(counters, work, block, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The tile's turn at a block."""
    seq = Sequence(tile_lengths(work, call, FEATURES, TILE), 0.0, call.numbers)
    visited = key_blocks(block.m_block * TILE.BLOCK_M, seq, FEATURES, TILE)
    n_block = work.start // TILE.BLOCK_N
    is_visited = (n_block >= visited.first) & (n_block < visited.stop)
    rank = visited.stop - 1 - n_block if FEATURES.RIGHT else n_block - visited.first
    counter = block_index(block, work, call, FEATURES, TILE)
    if FEATURES.PACKED:  # two for each 128 queries, and only those of sequences are set to zero
        counter *= TILE.BLOCK_M // 64
    return Turn(counters + counter, rank, is_visited)
