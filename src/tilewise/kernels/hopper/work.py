"""What a program works on: a tile of queries, handed out by a counter, and its blocks of keys.

The load warp draws tile numbers and puts them into a mailbox, a ring of one number a slot, from
which all matmul warpgroups read them: so everybody walks the same list of (tile, block of keys).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...tile.bounds import key_blocks
from ...tile.schedule import query_tile_in_group
from ...tile.seqlen import lengths_of
from ...tile.types import BlockRange, Numbers, Optionals, Queue, Sequence, Sizes
from .pipeline import wait_empty, wait_full

END = gl.constexpr(-1)  # the tile number that says: no more


class Call(NamedTuple):
    """What all partitions know of the call."""

    queue: Queue
    optionals: Optionals
    sizes: Sizes
    numbers: Numbers


class Work(NamedTuple):
    """One tile of queries, and the key blocks it visits: from n_block down to blocks.first."""

    tile: gl.tensor
    m_start: gl.tensor
    head: gl.tensor  # a key head, where its query heads share a tile
    batch: gl.tensor
    n_block: gl.tensor
    blocks: BlockRange


@gluon.jit
def open_tile(tile, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The tile at the last of its key blocks. It has one, if only to find everything masked."""
    m_block, head, batch = query_tile_in_group(
        gl.maximum(tile, 0), call.queue, call.sizes.seqlen_q, TILE.BLOCK_M
    )
    m_start = m_block * TILE.BLOCK_M
    lengths = lengths_of(batch, call.sizes, call.optionals, FEATURES)
    seq = Sequence(lengths, 0.0, call.numbers)
    blocks = key_blocks(m_start, seq, FEATURES, TILE)
    return Work(tile, m_start, head, batch, gl.maximum(blocks.stop, blocks.first + 1) - 1, blocks)


@gluon.jit
def is_partial(n_block, blocks):
    """Whether a block of keys needs a mask."""
    return (n_block < blocks.full_first) | (n_block >= blocks.full_stop)


@gluon.jit
def draw(queue):
    """The next tile number; each program starts with its own index and draws from there.

    Every tile but the first of each program is drawn once, and every program draws one number too
    many: `queue.tiles` draws in all. Who draws the last one sets the counter back for the next
    launch.
    """
    drawn = gl.atomic_add(queue.counter, 1, sem="relaxed")
    if drawn == queue.tiles - 1:
        gl.atomic_xchg(queue.counter, 0, sem="relaxed")
    tile = drawn + gl.num_programs(0)
    return gl.where(tile < queue.tiles, tile, END)


@gluon.jit
def send(mailbox, cursor, tile):
    """Puts a tile number into the mailbox."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    wait_empty(mailbox, cursor)
    mailbox.slots.index(cursor.slot).store(gl.full([1], 0, gl.int32, one) + tile)
    mbarrier.arrive(mailbox.full.index(cursor.slot), count=1)


@gluon.jit
def receive(mailbox, cursor):
    """The tile number, for a whole warpgroup."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    wait_full(mailbox, cursor)
    tile = gl.max(mailbox.slots.index(cursor.slot).load(one), 0)
    mbarrier.arrive(mailbox.empty.index(cursor.slot), count=1)
    return tile
