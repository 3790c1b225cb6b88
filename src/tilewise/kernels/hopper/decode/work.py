"""What a program works on: a part of a tile's pieces, or a slice of a tile whose parts are folded.

The load warp fetches numbers from a counter, finds out what they stand for and sends that to the
matmul warpgroup (tile_messages.py).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.split_schedule import (
    SplitSizes,
    divide_equally,
    is_sliced,
    pieces_of_part,
    sequence_at,
    slices_of,
)
from ....tile.splits import keys_seen, piece_keys
from ....tile.types import Lengths, Numbers, Optionals
from ..tile_messages import make_messages, receive
from .scales import Scales

PART = gl.constexpr(0)
FOLD = gl.constexpr(1)
END = gl.constexpr(2)  # there is no more work


class Counters(NamedTuple):
    """What programs count on the device: 0 before and after each launch."""

    counter: Any  # numbers handed out
    tiles: Any  # by tile: its parts that are done, then its slices


class DecodeCall(NamedTuple):
    """What partitions ask, `tile.split_schedule` among them."""

    optionals: Optionals
    sizes: SplitSizes
    numbers: Numbers
    scales: Scales


class Work(NamedTuple):
    """A part of a tile, or a slice of its fold."""

    kind: gl.tensor
    start: gl.tensor  # the tile's first query, in its sequence
    head_k: gl.tensor
    batch: gl.tensor
    first_q: gl.tensor  # where the sequence's queries begin, if they are packed
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    piece: gl.tensor  # pieces [piece, stop) are this part's
    stop: gl.tensor
    first: gl.tensor  # the first piece that the sequence sees
    length: gl.tensor  # pieces of the tile's first part
    parts: gl.tensor  # of the tile
    rows: gl.tensor  # of partial states before those of the sequence
    index: gl.tensor  # of the part, or the slice
    is_sliced: gl.tensor  # whether the tile is folded in slices


FIELDS = gl.constexpr(len(Work._fields))


@gluon.jit
def make_work_messages(READERS: gl.constexpr):
    """Makes messages for the partitions that work on what the load warp found."""
    return make_messages(FIELDS, READERS)


@gluon.jit
def receive_work(messages, state, WARPS: gl.constexpr = 4):
    """The next work, for a partition of WARPS warps."""
    return Work(*receive(messages, state, COUNT=FIELDS, WARPS=WARPS))


@gluon.jit
def no_more():
    """The last message."""
    return Work(END, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


@gluon.jit
def open_part(found, share, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The part of a number. Neighbours are the same keys of all heads, which mostly lie beside each
    other in memory; of two warpgroups the parts of a tile, which read the same queries.
    """
    ROWS: gl.constexpr = TILE.ROWS * TILE.WARPGROUPS
    tokens = ROWS // FEATURES.GROUP
    if TILE.WARPGROUPS == 1:
        first_q, seqlen_q, seqlen_k, first_seen, pieces = found.sequence
        division = found.division
    else:  # whose load warp has no registers for these
        first_q, seqlen_q, seqlen_k, first_seen, pieces = sequence_at(found.batch, call, FEATURES)
        division = divide_equally(pieces, share)
    parts = division.parts
    tiles = gl.maximum(gl.cdiv(seqlen_q, tokens), 1)
    if TILE.WARPGROUPS == 1:
        of_a_part = tiles * call.sizes.nheads
        part, tile = found.within // of_a_part, found.within % of_a_part
    else:
        part, tile = found.within % parts, found.within // parts
    place = tile % tiles
    if TILE.WARPGROUPS > 1 and FEATURES.RIGHT:
        place = tiles - 1 - place  # those that see the most keys first, so that all end together
    start = place * tokens
    of_tile = tile_keys(start, seqlen_q, seqlen_k=seqlen_k, call=call, FEATURES=FEATURES, ROWS=ROWS)
    first, count = pieces_of_part(part, division)
    piece = gl.maximum(first_seen + first, of_tile.piece)
    stop = gl.maximum(gl.minimum(first_seen + first + count, of_tile.stop), piece)
    return Work(
        PART, start, tile // tiles, found.batch, first_q, seqlen_q, seqlen_k,
        piece, stop, first_seen, division.length, parts, found.rows, part,
        is_sliced(pieces, division, seqlen_q=seqlen_q, FEATURES=FEATURES, ROWS=TILE.ROWS),
    )  # fmt: skip


@gluon.jit
def open_slice(
    found, share, call, FEATURES: gl.constexpr, ROWS: gl.constexpr, BLOCK_DV: gl.constexpr
):
    """The slice of a number."""
    tokens = ROWS // FEATURES.GROUP
    first_q, seqlen_q, seqlen_k, first_seen, _ = found.sequence
    length, _, parts = found.division
    slices = gl.maximum(slices_of(seqlen_q, FEATURES, ROWS=ROWS, BLOCK_DV=BLOCK_DV), 1)
    tile = found.within // slices
    tiles = gl.maximum(gl.cdiv(seqlen_q, tokens), 1)
    return Work(
        FOLD, tile % tiles * tokens, tile // tiles, found.batch, first_q, seqlen_q, seqlen_k,
        0, 0, first_seen, length, parts, found.rows, found.within % slices,
        True,
    )  # fmt: skip


@gluon.jit
def half_of(work, WG: gl.constexpr, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """A warpgroup's rows of a part."""
    if TILE.WARPGROUPS == 1:
        return work
    else:
        start = work.start + WG * (TILE.ROWS // FEATURES.GROUP)
        return narrowed(work, start, piece=work.piece, stop=work.stop)


@gluon.jit
def seen_of(work, call, FEATURES: gl.constexpr, ROWS: gl.constexpr):
    """A part without the pieces that its rows do not see."""
    keys = keys_of(work, call, FEATURES=FEATURES, ROWS=ROWS)
    piece = gl.maximum(work.piece, keys.piece)
    return narrowed(work, work.start, piece, gl.maximum(gl.minimum(work.stop, keys.stop), piece))


@gluon.jit
def narrowed(work, start, piece, stop):
    """Fewer rows or pieces of a part."""
    return Work(
        work.kind, start, work.head_k, work.batch, work.first_q, work.seqlen_q, work.seqlen_k,
        piece, stop, work.first, work.length, work.parts, work.rows, work.index, work.is_sliced,
    )  # fmt: skip


@gluon.jit
def blocks_of(work, call, FEATURES: gl.constexpr, ROWS: gl.constexpr, N: gl.constexpr):
    """The blocks, counted from key 0, that a part of a tile of ROWS has."""
    split_size = call.sizes.split_size
    keys = keys_of(work, call, FEATURES=FEATURES, ROWS=ROWS)
    first, _ = piece_keys(work.piece * split_size, split_size, keys=keys, BLOCK_N=N)
    stop = gl.minimum(work.stop * split_size, keys.last)
    return first // N, gl.maximum(gl.cdiv(stop, N), first // N)


@gluon.jit
def tile_keys(start, seqlen_q, seqlen_k, call, FEATURES: gl.constexpr, ROWS: gl.constexpr):
    """The keys that a tile's queries see, and their pieces."""
    diagonal = seqlen_k - seqlen_q
    last = diagonal + gl.minimum(start + ROWS // FEATURES.GROUP, seqlen_q) - 1
    numbers, split_size = call.numbers, call.sizes.split_size
    return keys_seen(diagonal + start, last, seqlen_k, numbers, split_size, FEATURES)


@gluon.jit
def keys_of(work, call, FEATURES: gl.constexpr, ROWS: gl.constexpr):
    """The keys of `tile_keys` for the tile of a message."""
    return tile_keys(work.start, work.seqlen_q, work.seqlen_k, call, FEATURES, ROWS)


@gluon.jit
def lengths_in(work):
    """Positions are the diagonal's: query i stands on key seqlen_k - seqlen_q + i."""
    return Lengths(work.seqlen_q, work.seqlen_k, diagonal=0)


@gluon.jit
def tile_counter(work, counters, call, FEATURES: gl.constexpr):
    """The counter of a tile, by its first query, which no other tile has, and its key head."""
    query = work.first_q + work.start
    if not FEATURES.PACKED:
        query += work.batch * call.sizes.seqlen_q
    return counters.tiles + (query * call.sizes.nheads + work.head_k)


@gluon.jit
def slices_in(work, FEATURES: gl.constexpr, ROWS: gl.constexpr, BLOCK_DV: gl.constexpr):
    """The number of slices in which a tile is folded."""
    return slices_of(work.seqlen_q, FEATURES, ROWS=ROWS, BLOCK_DV=BLOCK_DV)


@gluon.jit
def partial_row(
    work, piece, token, head, call, FEATURES: gl.constexpr, BY_PIECE: gl.constexpr = False
):
    """The row of a piece's state among partial states: by sequence, piece, query, head; or of all
    sequences, piece by piece.
    """
    nheads = call.sizes.nheads * FEATURES.GROUP
    if BY_PIECE:
        query = (piece * call.sizes.batch + work.batch) * work.seqlen_q + token
        return query.to(gl.int64) * nheads + head
    else:
        row = (piece - work.first) * (work.seqlen_q * nheads) + token * nheads + head
        return (work.rows + row).to(gl.int64)
