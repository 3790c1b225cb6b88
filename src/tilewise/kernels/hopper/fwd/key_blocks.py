"""Blocks of keys as the load warp copies them, in the coordinates of a descriptor: of rows of a
batch, of packed sequences, of pages of a cache, and FP8's V^T.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.bounds import clamp
from ....tile.splits import SeenKeys
from ...common.quantized import COLUMNS
from ..compat import tma_load
from ..decode.entries import first_entries, page_of, pages_of
from ..pieces import TMA_UNIT
from ..tma import BILLION, load_ragged
from ..work import LANE_LAYOUT
from .runs import no_block
from .varlen import lengths_in

V_COLUMNS = gl.constexpr(COLUMNS)  # of V^T, of which each packed sequence has a multiple


class KeyBlock(NamedTuple):
    """The coordinates of a block of keys."""

    batch: gl.tensor
    head: gl.tensor
    n_start: gl.tensor


class RaggedKeyBlock(NamedTuple):
    """The coordinates of a block of keys where a sequence may end inside the tensor: see `tma`."""

    head: tuple  # of K, and of V
    stop: gl.tensor
    size: gl.tensor
    n_start: gl.tensor


class PagedKeyBlock(NamedTuple):
    """The coordinates of a block of keys in pages."""

    pages: gl.tensor  # of short ones an entry a lane, else one
    row: gl.tensor  # of the first key, in its page
    head: gl.tensor
    n_start: gl.tensor
    seqlen_k: gl.tensor


class TransposedBlock(NamedTuple):
    """The coordinates of a block of keys in FP8: a row of K, and a column of V^T."""

    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor
    column: gl.tensor


@gluon.jit
def nowhere(FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The place before the first block."""
    if TILE.FP8:
        return TransposedBlock(0, 0, row=0, column=0)
    elif FEATURES.RUNS:
        return no_block()
    elif TILE.PAGE > 0:
        pages = gl.zeros([32], gl.int32, LANE_LAYOUT) if TILE.PAGE < TILE.BLOCK_N else 0
        return PagedKeyBlock(pages, 0, head=0, n_start=0, seqlen_k=0)
    elif FEATURES.PACKED or FEATURES.SEQUSED_K:
        return RaggedKeyBlock((0, 0), 0, size=0, n_start=0)
    else:
        return KeyBlock(0, 0, n_start=0)


@gluon.jit
def block_of(
    work, batch, head_k, n_start, sources, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """The coordinates of a block of keys."""
    if TILE.FP8:
        # Columns of V^T past a sequence's end are 0, and what K has there is masked
        first_k, first = 0, 0
        if FEATURES.PACKED:
            first_k = work.first_k
            first = (first_k // V_COLUMNS + work.batch) * V_COLUMNS
        return TransposedBlock(batch, head_k, row=first_k + n_start, column=first + n_start)
    elif TILE.PAGE > 0:
        keys, table = seen_keys(work, call, FEATURES=FEATURES), sources.table
        entries = first_entries(n_start, work, keys, table, FEATURES, TILE.PAGE, TILE.BLOCK_N)
        pages = pages_of(entries, keys, table, FEATURES, BOX=TILE.PAGE, N=TILE.BLOCK_N)
        return PagedKeyBlock(pages, entries.row, head_k, n_start, work.seqlen_k)
    elif FEATURES.PACKED or FEATURES.SEQUSED_K:
        heads_k, heads_v = sources.heads_per_batch
        row = work.batch if FEATURES.CHUNK > 0 else batch
        heads = head_k + row * heads_k, head_k + row * heads_v
        return RaggedKeyBlock(heads, work.first_k + work.seqlen_k, work.seqlen_k, n_start)
    else:
        return KeyBlock(batch, head_k, n_start=n_start)


@gluon.jit
def seen_keys(work, call, FEATURES: gl.constexpr):
    """Keys from the first that some row of a tile sees on: no others' pages or scales are read."""
    lengths = lengths_in(work, call, FEATURES=FEATURES)
    first = 0
    if FEATURES.LEFT:
        first = gl.maximum(work.start + lengths.diagonal - call.numbers.left, 0)
    return SeenKeys(first, lengths.seqlen_k, piece=0, stop=0)


@gluon.jit
def load_rows(
    sources, block, WHICH: gl.constexpr, full, buffer, pred, step, TILE: gl.constexpr, first=0
):
    """Loads K (WHICH is 0), columns from `first` on, or V. V_FLAT rows hold all heads, `step`
    elements apart; a copy begins at a multiple of 16 bytes, and so with up to 7 elements of the
    head before.
    """
    desc = sources.k if WHICH == 0 else sources.v
    shape: gl.constexpr = desc.block_type.shape
    FLAT: gl.constexpr = TILE.V_FLAT and WHICH == 1
    if TILE.FP8:
        coordinates = [block.batch, block.head, block.row, 0]
        if WHICH == 1:
            coordinates = [block.batch, block.head, 0, block.column]
        tma_load(desc, coordinates, full, buffer.reshape(shape), pred=pred)
    elif TILE.PAGE > 0:
        heads, page_size = sources.heads_per_batch[WHICH], sources.table.page_size
        load_pages(desc, block, heads, page_size, full, buffer, pred, first, TILE)
    elif len(shape) == 5:
        head, column = place_of_head(block.head[WHICH], step, first=first, FLAT=FLAT)
        load_ragged(desc, block.stop, block.size, head, block.n_start, full, buffer, pred, column)
    else:
        head, column = place_of_head(block.head, step, first=first, FLAT=FLAT)
        coordinates = [block.batch, head, block.n_start, column]
        tma_load(desc, coordinates, full, buffer.reshape(shape), pred=pred)


@gluon.jit
def load_pages(
    desc, block, heads_per_page, page_size, full, buffer, pred, column, TILE: gl.constexpr
):
    """A block of keys as copies of a page each, or as one of a part of a page. Each page ends where
    its sequence does: see `tma`. Of one past the last key nothing is read, and zeros are written.

    The warp issues an instruction every six clocks, so those of short pages are the limit of a
    chunk. `used` is not clamped for each: more than a page's rows are as good as all, and fewer
    than none as none.
    """
    BOX: gl.constexpr = TILE.PAGE
    N: gl.constexpr = TILE.BLOCK_N
    rows = buffer.reshape([1, 1, 1, N, desc.block_type.shape[4]])
    row, used = 0, gl.minimum(block.seqlen_k - block.n_start, N)
    if BOX == N:
        row, used = block.row, clamp(block.seqlen_k - block.n_start + block.row, 0, high=page_size)
    for i in gl.static_range(N // BOX):
        head = block.head + page_of(block.pages, i, BOX=BOX, N=N) * heads_per_page
        coordinates = [BILLION, used - i * BOX, head, BILLION - used + i * BOX + row, column]
        tma_load(desc, coordinates, full, rows.slice(i * BOX, BOX, 3), pred=pred)


@gluon.jit
def place_of_head(head, step, first, FLAT: gl.constexpr):
    """A head, and the column that its rows are copied from, in the coordinates of a descriptor."""
    if FLAT:
        return 0, head * step // TMA_UNIT * TMA_UNIT
    else:
        return head, first
