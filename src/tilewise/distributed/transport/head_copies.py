"""The copies of an all-to-all: rows of all heads to heads of all rows, and back. Heads come and go
in groups, so that all but the first and last copies are made beside the attention of other groups.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from ...kernels.common.row_table import Table
from ..layouts.layout import Layout
from ..layouts.pulls import runs_in_turn
from .copies import Blocks, Extent, Group, Kind, Piece, Place, Strides, rows_between


class ToHeads(NamedTuple):
    """Tensors of this rank's rows are the sources of `rows`. Its targets are the rank's half of the
    arena, of which so many bytes are published, and then, for each tensor, memory of as many bytes
    for the whole sequence, where the others' pieces go.
    """

    nbytes: int
    rows: Table
    pieces: tuple[tuple[Piece, ...], ...]  # of each group
    found: Blocks


class ToRows(NamedTuple):
    """The way back of one group. Its tensors are the sources of `rows`, whose targets are the half
    of the arena and then the results, of this rank's rows and all heads. Pieces go to memory of
    `pulled` bytes, the source of `placed`, whose targets are the results.
    """

    nbytes: int
    rows: Table
    pieces: tuple[Piece, ...]
    pulled: int
    placed: Table


@functools.lru_cache(maxsize=256)
def to_heads(
    layout: Layout,
    kinds: tuple[Kind, ...],
    strides: tuple[Strides, ...],
    batch: int,
    groups: tuple[Group, ...],
) -> ToHeads:
    """`kinds` have the heads of one rank, `strides` are those of tensors of all heads."""
    me, ranks = layout.rank, layout.ranks
    found = Blocks(kinds, groups, batch, layout.seqlen)
    rooms = [Blocks(kinds, groups, batch, n) for n in layout.counts]
    rows, pieces = [], []
    for group in groups:
        of_group = []
        for kind, b in itertools.product(range(len(kinds)), range(batch)):
            (of_batch, of_token, of_head), by_head = strides[kind], kinds[kind].by_head
            source = Place(kind, b * of_batch, of_token, of_head)
            place = found.place(kind, group, b)
            width, before = found.width(kind, group), found.first(kind, group)
            for rank in range(ranks):
                heads = Extent(rank * kinds[kind].heads + before, 0, width)
                if rank != me:
                    room = _part(rooms[me], kind, group, b, me, rank)
                    tokens = Extent(0, 0, layout.tokens)
                    rows.append(rows_between(source, room, tokens, heads, by_head))
                    continue
                target, row = place._replace(tensor=1 + kind), 0
                for start, stop in layout.runs[me]:
                    tokens = Extent(row, start, stop - start)
                    rows.append(rows_between(source, target, tokens, heads, by_head))
                    row += stop - start
            for rank, row, start, stop in runs_in_turn(layout, [(0, layout.seqlen)]):
                if rank != me:
                    room = _part(rooms[rank], kind, group, b, rank, me)
                    tokens = Extent(row, start, stop - start)
                    of_group += _dense(rank, room, place, tokens, width if by_head else 0)
        pieces.append(tuple(of_group))
    nbytes = (ranks - 1) * max(x.nbytes for x in rooms)
    return ToHeads(nbytes, Table(rows), tuple(pieces), found)


def _part(room: Blocks, kind: int, group: Group, row: int, owner: int, reader: int) -> Place:
    """Where an owner publishes for a reader: it has a part for each of the others."""
    place = room.place(kind, group, row, 0)
    part = reader - (reader > owner)
    return place._replace(start=place.start + part * room.nbytes)


def _dense(rank: int, source: Place, target: Place, tokens: Extent, heads: int) -> list[Piece]:
    """The pieces of some rows: one, or of what is by head one of each head."""
    nbytes = tokens.size * target.of_token
    return [
        Piece(rank, source.at(tokens.first, i), target.tensor, target.at(tokens.at, i), nbytes)
        for i in range(max(heads, 1))
        if nbytes
    ]


@functools.lru_cache(maxsize=256)
def to_rows(
    layout: Layout, kinds: tuple[Kind, ...], batch: int, groups: tuple[Group, ...], group: Group
) -> ToRows:
    """`kinds` have the heads of one rank; of these the group's go back."""
    me, ranks = layout.rank, layout.ranks
    all_heads = Blocks(kinds, groups, batch, layout.seqlen)
    rooms = [Blocks(_of_group(all_heads, group), (group,), batch, n) for n in layout.counts]
    starts = [_starts(rooms, owner) for owner in range(ranks)]
    # (batch, tokens, all heads, ...), or by head
    every = (Group(0, ranks * all_heads.of_keys),)
    wide = tuple(x._replace(heads=ranks * x.heads) for x in kinds)
    result = Blocks(wide, every, batch, layout.tokens)
    here = Blocks(_of_group(all_heads, group), (group,), batch, layout.seqlen)
    rows, placed = [], []
    slots = {rank: at for at, rank in enumerate(x for x in range(ranks) if x != me)}
    for kind, b in itertools.product(range(len(kinds)), range(batch)):
        source, into = here.place(kind, group, b), result.place(kind, every[0], b)
        by_head = kinds[kind].by_head
        width, before = all_heads.width(kind, group), all_heads.first(kind, group)
        for rank in range(ranks):
            first = rank * kinds[kind].heads + before
            row = 0
            for start, stop in layout.runs[rank]:
                tokens, heads = Extent(start, row, stop - start), Extent(0, 0, width)
                room = rooms[rank].place(kind, group, b, 0)
                target = room._replace(start=room.start + starts[me][rank])
                if rank == me:
                    target, heads = into._replace(tensor=1 + kind), Extent(0, first, width)
                rows.append(rows_between(source, target, tokens, heads, by_head))
                row += stop - start
            if rank != me:
                pulled = rooms[me].place(kind, group, b, 0)
                pulled = pulled._replace(start=pulled.start + slots[rank] * rooms[me].nbytes)
                tokens = Extent(0, 0, layout.tokens)
                placed.append(rows_between(pulled, into, tokens, Extent(0, first, width), by_head))
    mine = rooms[me].nbytes
    others = [(me - step) % ranks for step in range(1, ranks)]
    pieces = [Piece(x, starts[x][me], 0, slots[x] * mine, mine) for x in others if mine]
    nbytes = max(sum(x.nbytes for x in rooms) - room.nbytes for room in rooms)
    return ToRows(nbytes, Table(rows), tuple(pieces), mine * (ranks - 1), Table(placed))


def _of_group(blocks: Blocks, group: Group) -> tuple[Kind, ...]:
    return tuple(x._replace(heads=blocks.width(kind, group)) for kind, x in enumerate(blocks.kinds))


def _starts(rooms: list[Blocks], owner: int) -> list[int]:
    """Where an owner publishes for each of the others, part after part."""
    sizes = (0 if rank == owner else x.nbytes for rank, x in enumerate(rooms))
    return list(itertools.accumulate(sizes, initial=0))
