"""Work tiles of the forward: a tile of queries, handed out by a counter, and its blocks of keys.
Those of the backward are in bwd/work_tile.py.

The load warp fetches tile numbers, works out what they stand for and sends that to all matmul
warpgroups (tile_messages.py), which then walk the same list of (tile, block of keys).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.schedule import query_tile_in_group
from ...tile.seqlen import lengths_of
from ...tile.types import Modifiers, Numbers, Optionals, Queue, Sequence, Sizes
from ...tile.varlen import varlen_tile
from .block_list import listed_block, visited

END = gl.constexpr(-1)  # the start that marks the end
# One element per lane
LANE_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


class KernelCall(NamedTuple):
    """The call's arguments, which all partitions have."""

    queue: Queue
    optionals: Optionals
    sizes: Sizes
    numbers: Numbers
    modifiers: Modifiers = 0  # in a partition, which asks `modifiers_of`
    runs: tuple = 0  # in the load warp, where sequences are runs: `fwd.runs.RunTable`


class Work(NamedTuple):
    """One tile, from row `start` of its side, and the blocks of the other side that it visits:
    `first` to `last`, beginning with `begin`. Those in [full_first, full_stop) need no mask. Of
    blocks that a block mask lists, these are their places on its lists.
    """

    start: gl.tensor
    head: gl.tensor  # a key head, where its query heads share a tile
    batch: gl.tensor
    last: gl.tensor
    first: gl.tensor
    full_first: gl.tensor
    full_stop: gl.tensor
    begin: gl.tensor


WORK_FIELDS = gl.constexpr(len(Work._fields))


@gluon.jit
def open_tile(tile, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The work tile of a tile number."""
    m_block, head, batch = query_tile_in_group(tile, call.queue, call.sizes.seqlen_q, TILE.BLOCK_M)
    m_start = m_block * TILE.BLOCK_M
    lengths = lengths_of(batch, call.sizes, optionals=call.optionals, FEATURES=FEATURES)
    return query_work(m_start, head, batch, lengths, call, FEATURES, TILE)


@gluon.jit
def query_work(m_start, head, batch, lengths, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """A tile of queries and the key blocks that it visits: one, of which all is masked, where it
    sees none.
    """
    seq = Sequence(lengths, 0.0, call.numbers, batch, head, call.modifiers)
    blocks = visited(m_start, seq, FEATURES=FEATURES, TILE=TILE)
    last = gl.maximum(blocks.stop - 1, blocks.first)
    full_first, full_stop = blocks.full_first, blocks.full_stop
    return Work(m_start, head, batch, last, blocks.first, full_first, full_stop, blocks.first)


@gluon.jit
def find_tile(tile, hint, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The work tile of a tile number of packed sequences: the warp's lanes search 32 sequences."""
    lane = gl.arange(0, 32, LANE_LAYOUT)
    starts, sizes = call.optionals.cu_seqlens_q, call.sizes
    nheads, last_first = call.queue.nheads, FEATURES.RIGHT
    return varlen_tile(
        tile, hint, lane, starts, sizes.seqlen_q, sizes.packed, nheads,
        TILE.BLOCK_M, 1, last_first, LEAST=FEATURES.CHUNK,
    )  # fmt: skip


@gluon.jit
def key_head(head, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The key head, and which of its query heads this is; 0 where they share a tile."""
    if TILE.PACK > 1:
        return head, 0
    else:
        return head // FEATURES.GROUP, head % FEATURES.GROUP


@gluon.jit
def key_block(work, i, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The i-th key block that a tile visits.

    Under a causal mask upwards: programs that start together on tiles of one head then read the
    same keys at the same time, and the L2 cache answers them once. Else downwards, so that the
    ragged end, the one block that needs a mask, comes first and the loop has none. A block mask's
    lists have an order of their own.

    In FP8 always downwards. A first key often has the largest score of a row (an attention sink):
    seen first, it would leave to all others probabilities below the smallest of e4m3.
    """
    if FEATURES.MASK_M > 0:
        return listed_block(work, i, lists=call.modifiers.by_queries, FEATURES=FEATURES, TILE=TILE)
    elif FEATURES.RIGHT and not TILE.FP8:
        return work.first + i
    else:
        return work.last - i


@gluon.jit
def is_partial(n_block, work):
    """Whether a block of keys needs a mask."""
    return (n_block < work.full_first) | (n_block >= work.full_stop)


@gluon.jit
def needs_mask(work, i, n_block, FEATURES: gl.constexpr):
    """Whether the i-th block that a tile visits needs a mask."""
    if FEATURES.MASK_M == 0:
        return is_partial(n_block, work)
    elif FEATURES.SEQUSED_K:  # of which a block mask does not know
        return True
    else:
        return is_partial(i, work)


@gluon.jit
def fetch_next_tile(queue, pred):
    """Starts to fetch a tile number from the counter, where `pred`; `fetched_tile` waits for it.

    One lane adds to the counter. Triton hands the result of a scalar atomic to all lanes at once,
    and so does ptxas where all lanes have one address: both would wait here. So each lane has an
    address of its own. And no branch: behind one ptxas let the lanes diverge (`copies_apart`).
    """
    lane = gl.arange(0, 32, LANE_LAYOUT)
    mask = (lane == 0) & pred
    return gl.atomic_add(queue.counter + lane, lane * 0 + 1, mask=mask, sem="relaxed")


@gluon.jit
def fetched_tile(fetched, starters=None):
    """The tile's number. Each program starts with its own index, the counter behind all these;
    `starters`: so many do.
    """
    first = gl.arange(0, 32, LANE_LAYOUT) == 0
    number = gl.sum(gl.where(first, fetched, 0), 0)
    return number + (gl.num_programs(0) if starters is None else starters)


@gluon.jit
def reset_counter(queue, tile, tiles, programs=None):
    """After the last tile: the program that fetched the last number of all resets the counter to 0
    for the next launch.

    A program fetches one number for every tile that it works on, and stops at the first that is no
    tile. So n tiles make n fetches, of the numbers from `programs` to `programs + n - 1`. Not in
    the loop: there the compiler (ptxas of CUDA 12.8) did not let the lanes of the warp converge
    again. `programs`: so many fetch, where it is not all.
    """
    if tile == (gl.num_programs(0) if programs is None else programs) + tiles - 1:
        gl.atomic_xchg(queue.counter, 0, sem="relaxed")
