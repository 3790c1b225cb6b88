"""Sequences whose lengths only the device knows: packed ones, and those with unused keys.

Their copies stop where the sequence does (`tma`), so that no warp masks a tile of K or V, and
the loops of the matmuls are those of dense tensors. What is left is here: what a tile number stands
for, and a letter that says lengths, too.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....tile.schedule import query_tile_in_group
from ....tile.seqlen import lengths_of, place_of
from ....tile.types import Lengths, Sequence
from ....tile.varlen import varlen_tile
from ..block_list import visited
from ..pipeline import wait_empty, wait_full
from ..work import LANES, Work, open_tile, receive, send

LONG = gl.constexpr(16)  # words of a letter that says lengths, too


class Ragged(NamedTuple):
    """A tile as `Work` has it, and its sequence.

    Masks and rows of O want the lengths. They come in the letter: asked of memory, they would be
    waited for in the loop of the matmuls.
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
    first_q: gl.tensor  # where its rows begin
    first_k: gl.tensor
    rows_q: gl.tensor  # how many it has, used or not


@gluon.jit
def find_tile(tile, hint, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """What a tile number of packed sequences stands for: the warp's lanes look at 32 sequences."""
    lane = gl.arange(0, 32, LANES)
    starts, sizes = call.optionals.cu_seqlens_q, call.sizes
    nheads, last_first = call.queue.nheads, FEATURES.RIGHT
    return varlen_tile(
        *(tile, hint, lane, starts, sizes.seqlen_q, sizes.packed, nheads),
        *(TILE.BLOCK_M, 1, last_first),
    )


@gluon.jit
def open_ragged(m_start, head, batch, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The key blocks of a tile: one, if only to find everything masked, where its queries are not
    used.
    """
    place = place_of(batch, call.sizes, call.optionals, FEATURES)
    lengths = lengths_of(batch, call.sizes, call.optionals, FEATURES)
    seq = Sequence(lengths, 0.0, call.numbers, batch, head, call.modifiers)
    blocks = visited(m_start, seq, FEATURES, TILE)
    last = gl.maximum(blocks.stop - 1, blocks.first)
    if FEATURES.SEQUSED_Q:
        last = gl.where(m_start < lengths.seqlen_q, last, blocks.first)
    return Ragged(
        m_start,
        head,
        batch,
        last,
        blocks.first,
        blocks.full_first,
        blocks.full_stop,
        lengths.seqlen_q,
        lengths.seqlen_k,
        lengths.diagonal,
        place.first_q,
        place.first_k,
        place.rows_q,
    )


@gluon.jit
def open_in_batch(tile, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """What a tile number stands for where sequences are rows of a batch."""
    if FEATURES.SEQUSED_K:
        seqlen_q = call.sizes.seqlen_q
        m_block, head, batch = query_tile_in_group(tile, call.queue, seqlen_q, TILE.BLOCK_M)
        return open_ragged(m_block * TILE.BLOCK_M, head, batch, call, FEATURES, TILE)
    else:
        return open_tile(tile, call, FEATURES, TILE)


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
        lengths = Lengths(work.seqlen_q, work.seqlen_k, work.diagonal)
    else:
        lengths = lengths_of(work.batch, call.sizes, call.optionals, FEATURES)
    if FEATURES.MASK_M > 0:
        seqlen_k = gl.where(work.full_stop > 0, lengths.seqlen_k, 0)
        lengths = Lengths(lengths.seqlen_q, seqlen_k, lengths.diagonal)
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
    """The last letter."""
    if FEATURES.PACKED or FEATURES.SEQUSED_K:
        return Ragged(end, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    else:
        return Work(end, 0, 0, 0, 0, 0, 0, 0)


@gluon.jit
def send_tile(mailbox, cursor, work, FEATURES: gl.constexpr):
    """Puts a tile into the mailbox."""
    if FEATURES.PACKED or FEATURES.SEQUSED_K:
        word = gl.arange(0, LONG, gl.BlockedLayout([LONG], [32], [1], [0]))
        letter = gl.where(word == 0, work.start, work.rows_q)
        letter = gl.where(word == 1, work.head, letter)
        letter = gl.where(word == 2, work.batch, letter)
        letter = gl.where(word == 3, work.last, letter)
        letter = gl.where(word == 4, work.first, letter)
        letter = gl.where(word == 5, work.full_first, letter)
        letter = gl.where(word == 6, work.full_stop, letter)
        letter = gl.where(word == 7, work.seqlen_q, letter)
        letter = gl.where(word == 8, work.seqlen_k, letter)
        letter = gl.where(word == 9, work.diagonal, letter)
        letter = gl.where(word == 10, work.first_q, letter)
        letter = gl.where(word == 11, work.first_k, letter)
        wait_empty(mailbox, cursor)
        mailbox.slots.index(cursor.slot).store(letter)
        mbarrier.arrive(mailbox.full.index(cursor.slot), count=1)
    else:
        send(mailbox, cursor, work)


@gluon.jit
def receive_tile(mailbox, cursor, FEATURES: gl.constexpr):
    """The tile, for a warpgroup. Each thread reads all words, and keeps what it will use."""
    if FEATURES.PACKED or FEATURES.SEQUSED_K:
        layout: gl.constexpr = gl.BlockedLayout([LONG], [32], [4], [0])
        wait_full(mailbox, cursor)
        letter = mailbox.slots.index(cursor.slot).load(layout)
        mbarrier.arrive(mailbox.empty.index(cursor.slot), count=1)
        return Ragged(
            word_of(letter, 0),
            word_of(letter, 1),
            word_of(letter, 2),
            word_of(letter, 3),
            word_of(letter, 4),
            word_of(letter, 5),
            word_of(letter, 6),
            word_of(letter, 7),
            word_of(letter, 8),
            word_of(letter, 9),
            word_of(letter, 10),
            word_of(letter, 11),
            word_of(letter, 12),
        )
    else:
        return receive(mailbox, cursor)


@gluon.jit
def word_of(letter, i: gl.constexpr):
    word = gl.arange(0, LONG, letter.type.layout)
    return gl.sum(gl.where(word == i, letter, 0), 0)
