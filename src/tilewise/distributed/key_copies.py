"""The copies by which a rank gets the keys and values of the whole sequence that its queries see:
its own rows, to where others pull them and to their positions, and pieces of the others' rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from ..kernels.common.row_table import Table
from .copies import Blocks, Extent, Group, Kind, Piece, Place, Strides, rows_between
from .exchange import Pull
from .layout import Layout


class KeyCopies(NamedTuple):
    """K and V are the sources of `rows`; its targets are this rank's half of the arena, and then
    what is found. So many bytes are published, and `pieces` go to what is found.
    """

    nbytes: int
    rows: Table
    pieces: tuple[Piece, ...]
    ends: tuple[int, ...]  # how many of them there are up to the end of each list, in each group
    sizes: tuple[int, ...]  # bytes of what is found

    @property
    def ranks(self) -> tuple[int, ...]:
        """Where pieces come from."""
        return tuple([x.rank for x in self.pieces])


@functools.lru_cache(maxsize=256)
def key_copies(
    layout: Layout,
    pulls: tuple[tuple[Pull, ...], ...],
    kinds: tuple[Kind, ...],
    strides: tuple[Strides, ...],
    batch: int,
    groups: tuple[Group, ...],
    is_beside: bool = False,
) -> KeyCopies:
    """Those of a layout whose pulls are in lists."""
    rooms = [Blocks(kinds, groups, batch, n, is_beside) for n in layout.counts]
    found = Blocks(kinds, groups, batch, layout.seqlen, is_beside)
    rows = []
    for group, kind, b in itertools.product(groups, range(len(kinds)), range(batch)):
        of_batch, of_token, of_head = strides[kind]
        source = Place(kind, b * of_batch, of_token, of_head)
        room = rooms[layout.rank].place(kind, group, b, 0)
        place = found.place(kind, group, b)
        place = place._replace(tensor=1 + place.tensor)
        heads = Extent(group.first, 0, group.count)
        rows.append(rows_between(source, room, Extent(0, 0, layout.tokens), heads))
        row = 0
        for start, stop in layout.runs[layout.rank]:
            rows.append(rows_between(source, place, Extent(row, start, stop - start), heads))
            row += stop - start
    pieces, ends = [], []
    for group, several in itertools.product(groups, pulls):
        pieces += _pieces(layout, rooms, found, group, several)
        ends.append(len(pieces))
    nbytes = max(x.nbytes for x in rooms)
    return KeyCopies(nbytes, Table(rows), tuple(pieces), tuple(ends), found.sizes)


def _pieces(
    layout: Layout, rooms: list[Blocks], found: Blocks, group: Group, pulls: tuple[Pull, ...]
) -> Iterator[Piece]:
    buffers = 1 if found.is_beside else len(found.kinds)
    for rank, row, start, stop in pulls:
        if rank == layout.rank:
            continue
        for kind, b in itertools.product(range(buffers), range(found.batch)):
            source, target = rooms[rank].place(kind, group, b, 0), found.place(kind, group, b)
            nbytes = (stop - start) * target.of_token
            yield Piece(rank, source.at(row, 0), kind, target.at(start, 0), nbytes)
