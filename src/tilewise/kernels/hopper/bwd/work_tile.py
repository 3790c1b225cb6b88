"""Work tiles of the backward: a tile of keys, and the blocks of queries that attend to it.

As in the forward (work.py) one warp fetches tile numbers and sends work-tile messages. Where
lengths are ragged, which is where sequences are packed or `seqused_k` says how many keys there are,
the message says more: how long the sequence is, and where its rows lie.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.bounds import query_blocks
from ....tile.schedule import key_tile_in_group
from ....tile.seqlen import lengths_in, lengths_of, offsets_of, padded_row
from ....tile.types import Lengths, Sequence
from ....tile.varlen import blocks_of, most_tiles, varlen_tile
from ..pipeline import state_of
from ..tile_messages import receive
from ..work import WORK_FIELDS, Work, reset_counter
from .block_list import listed_work

ROWS = gl.constexpr(128)  # queries that one program of the kernels before and after takes


class RaggedWork(NamedTuple):
    """A tile where lengths are ragged: the fields of `Work`, and the tile's sequence."""

    start: gl.tensor
    head: gl.tensor
    batch: gl.tensor  # which sequence
    last: gl.tensor  # before `first` where these keys are masked for all queries
    first: gl.tensor
    full_first: gl.tensor
    full_stop: gl.tensor
    begin: gl.tensor
    seqlen_q: gl.tensor  # that are used
    seqlen_k: gl.tensor
    padded_q: gl.tensor  # the first row of its queries where blocks are whole (`padded_row`)
    stop_q: gl.tensor  # the end of its queries in packed tensors, of those that are used
    stop_k: gl.tensor  # the end of its keys in packed tensors
    rows_k: gl.tensor  # how many rows are before that, used or not


RAGGED_FIELDS = gl.constexpr(len(RaggedWork._fields))


class FoundTile(NamedTuple):
    """A tile number, and its work tile."""

    tile: gl.tensor
    n_block: gl.tensor
    head: gl.tensor
    batch: gl.tensor  # `sizes.packed` past the last tile of packed sequences
    hint: tuple  # where to look for the next one of packed sequences


@gluon.jit
def open_tile(found, modifiers, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The work tile of a found tile. The head is a key head."""
    if FEATURES.PACKED:
        n_block, head, batch = found.n_block, found.head, found.batch
    else:
        seqlen_k = call.sizes.seqlen_k
        n_block, head, batch = key_tile_in_group(found.tile, call.queue, seqlen_k, TILE.BLOCK_N)
        if TILE.ORDERED and FEATURES.RIGHT:  # the order of accumulation
            n_block = gl.cdiv(seqlen_k, TILE.BLOCK_N) - 1 - n_block
    offsets = offsets_of(batch, call.sizes, optionals=call.optionals, FEATURES=FEATURES)
    lengths = lengths_in(offsets, batch, optionals=call.optionals, FEATURES=FEATURES)
    if FEATURES.MASK_M > 0:
        work = listed_work(n_block, head, batch, lengths, modifiers, call, FEATURES, TILE)
    else:
        work = work_of(n_block, head, batch, lengths, call, FEATURES, TILE)
    return with_sequence(work, offsets, lengths, FEATURES=FEATURES, TILE=TILE)


@gluon.jit
def work_of(n_block, head, batch, lengths, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """A tile of keys and the blocks of queries that attend to it.

    Where it reaches past the last key all its blocks are partial: keys that are not there may not
    reach dQ, not even as infinity times zero. Without a band each tile of a head begins with
    another block, to avoid contention on the same block of dQ. So do long tiles of a causal head
    where `TILE.SPREAD` says so: a head's last tiles otherwise begin as those before them arrive.

    A tile that is masked for all queries has no blocks where lengths are ragged, as its sequence
    may have no queries at all; else it visits one all the same.
    """
    n_start = n_block * TILE.BLOCK_N
    blocks = query_blocks(n_start, Sequence(lengths, 0.0, numbers=call.numbers), FEATURES, TILE)
    first, last = blocks.first, blocks.stop - 1
    if not TILE.RAGGED:
        # The one that it visits must be there: keys may lie past what the last query sees
        first = gl.minimum(first, gl.cdiv(lengths.seqlen_q, TILE.BLOCK_M) - 1)
        last = gl.maximum(last, first)
    is_whole = n_start + TILE.BLOCK_N <= lengths.seqlen_k
    full_stop = gl.where(is_whole, blocks.full_stop, blocks.full_first)
    begin = first
    count = last + 1 - first
    if not (FEATURES.LEFT or FEATURES.RIGHT or TILE.ORDERED):
        begin += n_block % gl.maximum(count, 1)
    elif TILE.SPREAD > 0:
        begin += gl.where(count > TILE.SPREAD, n_block % TILE.SPREAD, 0)
    return Work(n_start, head, batch, last, first, blocks.full_first, full_stop, begin)


@gluon.jit
def with_sequence(work, offsets, lengths, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The work, with its sequence where lengths are ragged."""
    if TILE.RAGGED:
        seqlen_q, seqlen_k, rows_k = lengths.seqlen_q, lengths.seqlen_k, offsets.rows_k
        padded_q, stop_q, stop_k = 0, 0, rows_k
        if FEATURES.PACKED:
            padded_q = padded_row(offsets.first_q, work.batch, ROWS=ROWS)
            stop_q, stop_k = offsets.first_q + seqlen_q, offsets.first_k + rows_k
        return RaggedWork(*work, seqlen_q, seqlen_k, padded_q, stop_q, stop_k, rows_k)
    else:
        return work


@gluon.jit
def fetch_tile(queue, ORDERED: gl.constexpr):
    """The next tile number, for programs that fetch one only when they need a tile; `queue.tiles`
    or more says: no more. Where tiles are ordered, programs fetch their first tile, too: so no
    program holds a tile before it runs.
    """
    tile = gl.atomic_add(queue.counter, 1, sem="relaxed")
    if ORDERED:
        return tile
    else:
        return tile + gl.num_programs(0)


@gluon.jit
def find_tile(tile, hint, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The tile that a number is, no smaller than the hint's."""
    if FEATURES.PACKED:
        LAST_FIRST: gl.constexpr = TILE.ORDERED and FEATURES.RIGHT  # the order of accumulation
        starts, sizes, nheads_k = call.optionals.cu_seqlens_k, call.sizes, call.queue.nheads
        position = varlen_tile(
            tile, hint, lanes(), starts, sizes.seqlen_k, sizes.packed, nheads_k,
            TILE.BLOCK_N, 1, LAST_FIRST, call.queue.l2_group,
        )  # fmt: skip
        return FoundTile(tile, position.m_block, position.head, position.batch, position.hint)
    else:  # where it lies is found when it is opened: the warp has few registers
        return FoundTile(tile, tile, head=tile, batch=tile, hint=hint)


@gluon.jit
def is_tile(found, call, FEATURES: gl.constexpr):
    """Whether there is such a tile."""
    if FEATURES.PACKED:
        return found.batch < call.sizes.packed
    else:
        return found.tile < call.queue.tiles


@gluon.jit
def reset_packed_counter(found, call, TILE: gl.constexpr):
    """`reset_counter`. `queue.tiles` is a bound there; but a program that fetches a number past the
    last tile has scanned all sequences, and its hint is of their last group.
    """
    starts, total, sequences = call.optionals.cu_seqlens_k, call.sizes.seqlen_k, call.sizes.packed
    blocks = blocks_of(found.hint.batch + lanes(), starts, total, sequences, TILE.BLOCK_N)
    tiles = found.hint.tiles + gl.sum(blocks, 0) * call.queue.nheads
    most = most_tiles(total, sequences, times=call.queue.nheads, BLOCK=TILE.BLOCK_N)
    reset_counter(call.queue, found.tile, tiles=gl.minimum(tiles, most))


@gluon.jit
def lanes():
    """0 .. 31, one a lane of a warp."""
    return gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def receive_tile(messages, tiles, TILE: gl.constexpr, WARPS: gl.constexpr = 4):
    """The tile that comes after so many others, for a partition of WARPS warps."""
    if TILE.RAGGED:
        return RaggedWork(*receive(messages, state_of(tiles), COUNT=RAGGED_FIELDS, WARPS=WARPS))
    else:
        return Work(*receive(messages, state_of(tiles), COUNT=WORK_FIELDS, WARPS=WARPS))


@gluon.jit
def tile_lengths(work, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The lengths of a tile's sequence."""
    if TILE.RAGGED:
        diagonal = work.seqlen_k - work.seqlen_q
        if FEATURES.TOP_LEFT:
            diagonal = 0
        return Lengths(work.seqlen_q, work.seqlen_k, diagonal=diagonal)
    else:
        return lengths_of(work.batch, call.sizes, optionals=call.optionals, FEATURES=FEATURES)
