"""Pages of a block of keys, as the load warp looks them up: once for keys and values, and a block
ahead, so that no copy waits for the page table.

A block of several pages has an entry a lane, as many as there are lanes: those of later blocks are
in the L1 cache then. TMA takes numbers that all lanes have, which sums over lanes are (REDUX).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.bounds import clamp
from ..work import LANE_LAYOUT
from .scales import Rows


class Entries(NamedTuple):
    """The page table entries of a block of keys."""

    pages: Any  # as the table has them: an entry a lane, or that of all keys
    place: gl.tensor  # in the table, of the first key's page
    row: gl.tensor  # of the first key, in that page


@gluon.jit
def first_entries(n, work, keys, table, FEATURES: gl.constexpr, BOX: gl.constexpr, N: gl.constexpr):
    """Looks up the entries of a part's first block, from key n on."""
    if table.page_table is None:
        return Entries(work.batch, n, row=n)
    else:
        place = n // (BOX if BOX < N else table.page_size)
        row = n - place * (BOX if BOX < N else table.page_size)
        return look_up(place, row, n, work, keys, table, FEATURES=FEATURES, BOX=BOX, N=N)


@gluon.jit
def next_entries(
    before, n, work, keys, table, FEATURES: gl.constexpr, BOX: gl.constexpr, N: gl.constexpr
):
    """Looks up the entries of the next block, from key n on."""
    if BOX < N or table.page_table is None:
        return first_entries(n, work, keys=keys, table=table, FEATURES=FEATURES, BOX=BOX, N=N)
    else:  # pages are whole blocks
        is_over = before.row + N >= table.page_size
        place = before.place + is_over.to(gl.int32)
        row = gl.where(is_over, 0, before.row + N)
        return look_up(place, row, n, work, keys, table, FEATURES=FEATURES, BOX=BOX, N=N)


@gluon.jit
def look_up(
    place, row, n, work, keys, table, FEATURES: gl.constexpr, BOX: gl.constexpr, N: gl.constexpr
):
    """Entries from a place on; none is read behind the last key's, or that a window has left."""
    first = table.page_table + work.batch.to(gl.int64) * table.stride + place
    if BOX < N:
        lane = gl.arange(0, 32, LANE_LAYOUT)
        is_used = n + lane * BOX < keys.last
        if FEATURES.LEFT:
            is_used = is_used & is_seen(place, keys, BOX=BOX)
        pages = gl.load(first + lane, mask=is_used, other=0)
    else:
        pages = gl.load(first, mask=n < keys.last, other=0)
    return Entries(pages, place, row=row)


@gluon.jit
def is_seen(place, keys, BOX: gl.constexpr):
    """Whether pages, one a lane, hold the first key that is seen, or keys behind it."""
    return place + gl.arange(0, 32, LANE_LAYOUT) >= keys.first // BOX


@gluon.jit
def pages_of(entries, keys, table, FEATURES: gl.constexpr, BOX: gl.constexpr, N: gl.constexpr):
    """The pages of a block's boxes, which are there whatever the table says; behind all, where TMA
    finds zeros, of those that a window has left: they may hold NaN, and 0 times NaN is NaN.
    """
    if table.page_table is None:
        return entries.pages
    else:
        # num_pages - 1 would be computed before all loops, and spilled
        pages = clamp(entries.pages + 1, 1, high=table.num_pages) - 1
        if FEATURES.LEFT and BOX < N:
            pages = gl.where(is_seen(entries.place, keys, BOX=BOX), pages, table.num_pages)
        return pages


@gluon.jit
def page_of(pages, i, BOX: gl.constexpr, N: gl.constexpr):
    """The page of a box."""
    if BOX < N:
        return gl.sum(gl.where(gl.arange(0, 32, LANE_LAYOUT) == i, pages, 0), 0)
    else:
        return pages


@gluon.jit
def look_up_rows(key, page_size, work, keys, table):
    """Looks up keys one by one: their pages in the table, and their rows in these pages."""
    if table.page_table is None:
        return work.batch, key
    else:
        is_used = (key >= keys.first) & (key < keys.last)
        place = key // page_size
        entry = work.batch.to(gl.int64) * table.stride + place
        page = gl.load(table.page_table + entry, mask=is_used, other=0)
        return page, key - place * page_size


@gluon.jit
def rows_of(found, key, keys, table):
    """What was looked up, as rows of memory."""
    page, row = found
    if table.page_table is not None:
        page = clamp(page + 1, 1, high=table.num_pages) - 1  # as in `pages_of`
    return Rows(page.to(gl.int64), row.to(gl.int64), (key >= keys.first) & (key < keys.last))
