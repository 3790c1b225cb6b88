"""The copies by which a rank gets the keys and values of the whole sequence that its queries see:
its own rows, to where others pull them and to their places, and pieces of the others' rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ...kernels.common.row_table import Table
from ..layouts.layout import Layout, Run
from ..layouts.pulls import Pull
from .copies import Blocks, Extent, Group, Kind, Piece, Place, Strides, rows_between


class Move(NamedTuple):
    """Rows of a rank, from its row `row` on, and where they go."""

    rank: int
    row: int
    at: int
    size: int


Moves = tuple[Move, ...]


def moves_of(pulls: Iterable[Pull], shift: int = 0) -> Moves:
    """Moves of pulls, `shift` rows behind their positions."""
    return tuple(Move(rank, row, a + shift, b - a) for rank, row, a, b in pulls)


class KeyCopies(NamedTuple):
    """K and V are the sources of `rows`; its targets are this rank's half of the arena, and then
    what is found. So many bytes are published, and `pieces` go to what is found.
    """

    nbytes: int
    rows: Table
    pieces: tuple[Piece, ...]
    ends: tuple[int, ...]  # how many of them there are up to the end of each list, in each group

    @property
    def ranks(self) -> tuple[int, ...]:
        """Where pieces come from."""
        return tuple([x.rank for x in self.pieces])


@functools.lru_cache(maxsize=256)
def key_copies(
    layout: Layout,
    lists: tuple[Moves, ...],
    tokens: int,
    kinds: tuple[Kind, ...],
    strides: tuple[Strides, ...],
    batch: int,
    groups: tuple[Group, ...],
    shared: tuple[tuple[Run, ...], ...],
    is_beside: bool = False,
) -> KeyCopies:
    """The copies of lists of moves into `tokens` rows. Each rank publishes its `shared` rows, which
    the others pull.
    """
    sizes = [sum(b - a for a, b in rows) for rows in shared]
    rooms = [Blocks(kinds, groups, batch, n, is_beside) for n in sizes]
    found = Blocks(kinds, groups, batch, tokens, is_beside)
    own = [Extent(*x[1:]) for moves in lists for x in moves if x.rank == layout.rank]
    mine = shared[layout.rank]
    published = [Extent(a, place_among(mine, a), b - a) for a, b in mine]
    rows = []
    for group, kind, b in itertools.product(groups, range(len(kinds)), range(batch)):
        of_batch, of_token, of_head = strides[kind]
        source = Place(kind, b * of_batch, of_token, of_head)
        room, place = rooms[layout.rank].place(kind, group, b, 0), found.place(kind, group, b)
        place = place._replace(tensor=1 + place.tensor)
        heads = Extent(group.first, 0, group.size)
        rows += [rows_between(source, room, extent, heads) for extent in published]
        rows += [rows_between(source, place, extent, heads) for extent in own]
    others = [
        [x._replace(row=place_among(shared[x.rank], x.row)) for x in moves if x.rank != layout.rank]
        for moves in lists
    ]
    pieces, ends = [], []
    for group, moves in itertools.product(groups, others):
        pieces += _pieces(rooms, found, group, moves)
        ends.append(len(pieces))
    return KeyCopies(max(x.nbytes for x in rooms), Table(rows), tuple(pieces), tuple(ends))


def place_among(rows: Iterable[Run], row: int) -> int:
    """How many of some rows come before one of them.

    >>> place_among([(0, 2), (6, 8)], 7)
    3
    """
    before = 0
    for a, b in rows:
        if a <= row < b:
            return before + row - a
        before += b - a
    raise ValueError(f"row {row} is none of those that are published")


def _pieces(
    rooms: list[Blocks], found: Blocks, group: Group, moves: Iterable[Move]
) -> Iterator[Piece]:
    buffers = 1 if found.is_beside else len(found.kinds)
    for rank, row, at, size in moves:
        for kind, b in itertools.product(range(buffers), range(found.batch)):
            source, target = rooms[rank].place(kind, group, b, 0), found.place(kind, group, b)
            start, nbytes = source.at(row, 0), size * target.of_token
            yield Piece(rank, start, target.tensor, target.at(at, 0), nbytes)
