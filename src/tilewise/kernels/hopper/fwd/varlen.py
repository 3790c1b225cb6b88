"""Sequences whose lengths only the device knows: packed ones, and those with unused keys.

Their copies stop where the sequence does (`tma`), so that no warp masks a tile of K or V, and the
loops of the matmuls are those of dense tensors. What is left is here: what a tile number stands
for, and messages that say lengths, too.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.schedule import query_tile_in_group
from ....tile.seqlen import lengths_of, offsets_of
from ....tile.types import Lengths
from ..tile_messages import make_messages, receive
from ..work import WORK_FIELDS, Work, open_tile, query_work


class Ragged(NamedTuple):
    """A tile as `Work` has it, and its sequence.

    Masks and rows of O need the lengths. They come in the message: loads of them would stall the
    loop of the matmuls.
    """

    start: gl.tensor
    head: gl.tensor
    batch: gl.tensor
    last: gl.tensor
    first: gl.tensor
    full_first: gl.tensor
    full_stop: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    diagonal: gl.tensor
    first_q: gl.tensor  # where its rows begin; where tiles have parts, of a batch, its state
    first_k: gl.tensor
    rows_q: gl.tensor  # how many it has, used or not; of a batch what becomes of the state


RAGGED_FIELDS = gl.constexpr(len(Ragged._fields))


@gluon.jit
def open_ragged(m_start, head, batch, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The key blocks of a tile."""
    offsets = offsets_of(batch, call.sizes, optionals=call.optionals, FEATURES=FEATURES)
    lengths = lengths_of(batch, call.sizes, optionals=call.optionals, FEATURES=FEATURES)
    work = query_work(m_start, head, batch, lengths, call, FEATURES, TILE)
    return Ragged(
        m_start,
        head,
        batch=batch,
        last=work.last,
        first=work.first,
        full_first=work.full_first,
        full_stop=work.full_stop,
        seqlen_q=lengths.seqlen_q,
        seqlen_k=lengths.seqlen_k,
        diagonal=lengths.diagonal,
        first_q=offsets.first_q,
        first_k=offsets.first_k,
        rows_q=offsets.rows_q,
    )


@gluon.jit
def open_in_batch(tile, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The work tile of a tile number where sequences are rows of a batch."""
    if FEATURES.SEQUSED_K:
        seqlen_q = call.sizes.seqlen_q
        m_block, head, batch = query_tile_in_group(tile, call.queue, seqlen_q, TILE.BLOCK_M)
        return open_ragged(m_block * TILE.BLOCK_M, head, batch, call, FEATURES, TILE)
    else:
        return open_tile(tile, call, FEATURES=FEATURES, TILE=TILE)


@gluon.jit
def place_in(work, FEATURES: gl.constexpr):
    """The row of the batch, and where the tile's sequence begins in it."""
    if FEATURES.PACKED:
        return 0, work.first_q
    else:
        return work.batch, 0


@gluon.jit
def lengths_in(work, call, FEATURES: gl.constexpr):
    """The lengths of a tile's sequence; no keys where a block mask lists none."""
    if FEATURES.PACKED or FEATURES.SEQUSED_K:
        lengths = Lengths(work.seqlen_q, work.seqlen_k, diagonal=work.diagonal)
    else:
        lengths = lengths_of(work.batch, call.sizes, optionals=call.optionals, FEATURES=FEATURES)
    if FEATURES.MASK_M > 0:
        seqlen_k = gl.where(work.full_stop > 0, lengths.seqlen_k, 0)
        lengths = Lengths(lengths.seqlen_q, seqlen_k, diagonal=lengths.diagonal)
    return lengths


@gluon.jit
def rows_in(work, call, FEATURES: gl.constexpr):
    """How many queries it has, used or not."""
    if FEATURES.PACKED:
        return work.rows_q
    else:
        return call.sizes.seqlen_q


@gluon.jit
def no_more(end, FEATURES: gl.constexpr):
    """The last message."""
    if FEATURES.PACKED or FEATURES.SEQUSED_K:
        return Ragged(end, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    else:
        return Work(end, 0, batch=0, last=0, first=0, full_first=0, full_stop=0, begin=0)


@gluon.jit
def receive_tile(messages, state, FEATURES: gl.constexpr, WARPS: gl.constexpr = 4):
    """The next tile, for a partition of WARPS warps."""
    if FEATURES.PACKED or FEATURES.SEQUSED_K:
        return Ragged(*receive(messages, state, COUNT=RAGGED_FIELDS, WARPS=WARPS))
    else:
        return Work(*receive(messages, state, COUNT=WORK_FIELDS, WARPS=WARPS))


@gluon.jit
def make_tile_messages(READERS: gl.constexpr, FEATURES: gl.constexpr):
    """The work-tile messages to the partitions that compute a tile."""
    IS_RAGGED: gl.constexpr = FEATURES.PACKED or FEATURES.SEQUSED_K
    return make_messages(RAGGED_FIELDS if IS_RAGGED else WORK_FIELDS, READERS)
