"""Whose turn it is to add to a block of dQ: the same bits in every run.

Sums of floats depend on their order. So tiles of keys add to a block in the order of their keys,
each when the block's counter says its rank, and then count on.

Nobody waits for ever: tiles of a head are handed out in this same order, and only to programs that
are at work (`draw_from_start`). So a tile waits only for tiles that are at work and were handed out
before it, and of all these the first waits for nobody.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.bounds import key_blocks
from ...tile.seqlen import lengths_of
from ...tile.types import Sequence
from .compat import barrier


@gluon.jit
def rank_of(work, block, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """How many tiles of keys add to the block before this one, and whether this one does at all: a
    tile that nobody sees visits one block all the same.
    """
    lengths = lengths_of(work.batch, call.sizes, call.optionals, FEATURES)
    seq = Sequence(lengths, 0.0, call.numbers)
    visited = key_blocks(block.m_block * TILE.BLOCK_M, seq, FEATURES, TILE)
    n_block = work.start // TILE.BLOCK_N
    return n_block - visited.first, (n_block >= visited.first) & (n_block < visited.stop)


@gluon.jit
def await_turn(counter, rank):
    """Until the tile before has added its part, and its part is there to be seen."""
    turn = gl.atomic_add(counter, 0, sem="acquire")
    while turn != rank:
        turn = gl.atomic_add(counter, 0, sem="acquire")
    barrier()  # one thread has seen it: the others may add, too


@gluon.jit
def pass_turn(counter, rank):
    """The next tile may add; what all threads have added goes before."""
    barrier()
    gl.atomic_xchg(counter, rank + 1, sem="release")
