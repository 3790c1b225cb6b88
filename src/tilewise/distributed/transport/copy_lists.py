"""The copies of the exchanges: keys of all ranks to the queries that see them; and, as an
all-to-all, rows of all heads to heads of all rows, and back. Heads come and go in groups, so that
all but the first and last copies are made beside the attention of other groups.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

from ...kernels.common.row_table import Table
from ..layouts.layout import Layout
from ..layouts.pulls import Pull, place_among, pulls_in_turn, rows_seen, shared_rows
from ..layouts.work import Band, keys_of
from .copies import ALIGN, Blocks, CopyList, Kind, Piece, Place, rows_between
from .nodes import Bytes, Nodes, Traffic


@functools.lru_cache(maxsize=256)
def keys_to_queries(
    layout: Layout,
    pulls: tuple[tuple[Pull, ...], ...],
    *,
    tokens: int,
    kinds: tuple[Kind, ...],
    sources: tuple[Place, ...],
    batch: int,
    groups: tuple[range, ...],
    band: Band,
    nodes: Nodes | None,
    side_by_side: bool = False,
) -> CopyList:
    """Lists the copies of lists of pulls into `tokens` rows. Each rank publishes the rows that
    others see under the band, which they pull. There is a list of pieces for each group and each
    list of pulls, and what crosses nodes for each group.
    """
    shared = shared_rows(layout, band)
    blocks = functools.partial(Blocks, kinds, groups, batch=batch, side_by_side=side_by_side)
    counts = [sum(stop - start for start, stop in runs) for runs in shared]
    halves, whole = [blocks(tokens=count) for count in counts], blocks(tokens=tokens)
    me, my_shared = layout.rank, shared[layout.rank]
    rows = []
    for group, kind, b in itertools.product(groups, range(len(kinds)), range(batch)):
        source = sources[kind].moved(head=group.start, row=b)
        half = halves[me].joint_place(kind, group).moved(row=b)
        target = whole.place(kind, group).moved(row=b)
        target = target._replace(tensor=1 + target.tensor)
        copied = functools.partial(rows_between, heads=len(group))
        for start, stop in my_shared:
            published = half.moved(place_among(my_shared, start))
            rows.append(copied(source.moved(start), published, tokens=stop - start))
        for _, row, start, stop in (x for part in pulls for x in part if x.rank == me):
            rows.append(copied(source.moved(row), target.moved(start), tokens=stop - start))
    remote = [
        [x._replace(row=place_among(shared[x.rank], x.row)) for x in part if x.rank != me]
        for part in pulls
    ]
    pieces = []
    for group, part in itertools.product(groups, remote):
        of_list: list[Piece] = []
        for pull, kind, b in itertools.product(part, range(len(whole.sizes)), range(batch)):
            source = halves[pull.rank].joint_place(kind, group).moved(pull.row, row=b)
            target = whole.place(kind, group).moved(pull.start, row=b)
            of_list += _pieces(pull.rank, source, target=target, tokens=pull.stop - pull.start)
        pieces.append(tuple(of_list))
    traffic = () if nodes is None else _keys_across(layout, band, nodes=nodes, halves=halves)
    nbytes = max(x.nbytes for x in halves)
    return CopyList(nbytes, Table(rows), pieces=tuple(pieces), traffic=traffic)


@functools.lru_cache(maxsize=256)
def keys_in_place(
    layout: Layout,
    pulls: tuple[Pull, ...],
    *,
    kinds: tuple[Kind, ...],
    sources: tuple[Place, ...],
    groups: tuple[range, ...],
    band: Band,
    nodes: Nodes | None,
    side_by_side: bool = False,
) -> CopyList:
    """Lists the copies of keys of one sequence that are read where they are published: each half
    has room for the whole sequence, in which a rank copies its rows to their places, and others'
    rows from the same places of theirs, or, where each rank is a node, receives them there. There
    is a list of pieces for each group.
    """
    whole = Blocks(kinds, groups, batch=1, tokens=layout.seqlen, side_by_side=side_by_side)
    rows, pieces = [], []
    for group in groups:
        for kind, (row, start, stop) in itertools.product(range(len(kinds)), layout.placed):
            source = sources[kind].moved(row, head=group.start)
            target = whole.joint_place(kind, group).moved(start)
            rows.append(rows_between(source, target, tokens=stop - start, heads=len(group)))
        of_group: list[Piece] = []
        for pull, kind in itertools.product(pulls, range(len(whole.sizes))):
            if nodes is None and pull.rank != layout.rank:
                place = whole.joint_place(kind, group).moved(pull.start)
                of_group += _pieces(pull.rank, place, target=place, tokens=pull.stop - pull.start)
        pieces.append(tuple(of_group))
    copies = CopyList(whole.nbytes, Table(rows), pieces=tuple(pieces))
    if nodes is None:
        return copies
    nbytes = -(-whole.nbytes // (layout.ranks * ALIGN)) * ALIGN  # of a rank's part of the half
    traffic = _places_across(layout, band, nodes=nodes, whole=whole)
    return copies._replace(nbytes=nbytes, traffic=traffic)


def _places_across(
    layout: Layout, band: Band, *, nodes: Nodes, whole: Blocks
) -> tuple[Traffic, ...]:
    """Lists, for each group, the keys that other nodes see, each at its place in the sequence."""
    traffic = []
    for group in whole.groups:

        def wanted(owner: int, readers: Sequence[int], group: range = group) -> Iterator[Bytes]:
            visible = keys_of([x for reader in readers for x in layout.at(reader).spans], band)
            of_owner = layout.at(owner).placed
            tensors = range(len(whole.sizes))
            for kind, (_, start, stop), keys in itertools.product(tensors, of_owner, visible):
                place, first = whole.joint_place(kind, group), max(start, keys[0])
                begin = place.moved(first).start
                yield begin, begin + (min(stop, keys[1]) - first) * place.of_token

        traffic.append(nodes.traffic(wanted, is_in_place=True))
    return tuple(traffic)


def _keys_across(
    layout: Layout, band: Band, *, nodes: Nodes, halves: Sequence[Blocks]
) -> tuple[Traffic, ...]:
    """Lists, for each group, the published rows that other nodes see."""
    shared, blocks = shared_rows(layout, band), halves[0]
    tensors, traffic = range(len(blocks.sizes)), []
    for group in blocks.groups:

        def wanted(owner: int, readers: Sequence[int], group: range = group) -> Iterator[Bytes]:
            rows = rows_seen(layout, owner, readers, band=band)
            for (start, stop), kind, b in itertools.product(rows, tensors, range(blocks.batch)):
                place = halves[owner].joint_place(kind, group)
                first = place.moved(place_among(shared[owner], start), row=b).start
                yield first, first + (stop - start) * place.of_token

        traffic.append(nodes.traffic(wanted))
    return tuple(traffic)


def _pieces(
    rank: int, source: Place, target: Place, *, tokens: int, heads: int = 1
) -> Iterator[Piece]:
    """Yields the pieces of some rows: one, or where these lie by head one for each head."""
    nbytes = tokens * target.of_token
    for head in range(heads):
        if nbytes:
            start, offset = source.moved(head=head).start, target.moved(head=head).start
            yield Piece(rank, start, target=target.tensor, offset=offset, nbytes=nbytes)


@functools.lru_cache(maxsize=256)
def rows_to_heads(
    layout: Layout,
    kinds: tuple[Kind, ...],
    *,
    sources: tuple[Place, ...],
    batch: int,
    groups: tuple[range, ...],
    nodes: Nodes | None = None,
) -> CopyList:
    """Lists the copies of this rank's rows to the ranks that have their heads. Targets are, for
    each tensor, memory of the whole sequence, as `Blocks` has it; there is a list of pieces for
    each group. `kinds` have the heads of one rank, `sources` have all heads.
    """
    me, ranks = layout.rank, layout.ranks
    whole = Blocks(kinds, groups, batch=batch, tokens=layout.seqlen)
    halves = [Blocks(kinds, groups, batch=batch, tokens=n) for n in layout.counts]
    starts = [_starts([half.nbytes] * ranks, owner) for owner, half in enumerate(halves)]
    rows, pieces, traffic = [], [], []
    for group in groups:

        def wanted(owner: int, readers: Sequence[int], group: range = group) -> Iterator[Bytes]:
            for kind, reader in itertools.product(range(len(kinds)), readers):
                half = halves[owner]
                first = half.joint_place(kind, group, before=starts[owner][reader]).start
                heads = half.width(kind, group)
                yield first, first + batch * half.tokens * heads * kinds[kind].unit

        if nodes is not None:
            traffic.append(nodes.traffic(wanted))
        of_group: list[Piece] = []
        for kind, b in itertools.product(range(len(kinds)), range(batch)):
            by_head, width = kinds[kind].by_head, whole.width(kind, group)
            copied = functools.partial(rows_between, heads=width, by_head=by_head)
            source, target = sources[kind].moved(row=b), whole.place(kind, group).moved(row=b)
            for rank in range(ranks):
                heads = source.moved(head=rank * kinds[kind].heads + whole.first(kind, group))
                if rank != me:
                    half = halves[me].joint_place(kind, group, before=starts[me][rank])
                    rows.append(copied(heads, half.moved(row=b), tokens=layout.tokens))
                    continue
                local = target._replace(tensor=1 + kind)
                for row, start, stop in layout.placed:
                    rows.append(copied(heads.moved(row), local.moved(start), tokens=stop - start))
            for rank, row, start, stop in pulls_in_turn(layout, [(0, layout.seqlen)]):
                if rank != me:
                    half = halves[rank].joint_place(kind, group, before=starts[rank][me])
                    half, place = half.moved(row, row=b), target.moved(start)
                    parts = width if by_head else 1
                    of_group += _pieces(rank, half, target=place, tokens=stop - start, heads=parts)
        pieces.append(tuple(of_group))
    nbytes = (ranks - 1) * max(x.nbytes for x in halves)
    return CopyList(nbytes, Table(rows), pieces=tuple(pieces), traffic=tuple(traffic))


@functools.lru_cache(maxsize=256)
def heads_to_rows(
    layout: Layout,
    kinds: tuple[Kind, ...],
    *,
    batch: int,
    groups: tuple[range, ...],
    group: range,
    nodes: Nodes | None = None,
) -> CopyList:
    """Lists the copies of a group's heads of the whole sequence to the ranks that have their rows.
    Targets are the results, of this rank's rows and all heads. Pieces arrive in memory of their
    own, end to end, and are placed in the results. `kinds` have the heads of one rank.
    """
    me, ranks = layout.rank, layout.ranks
    all_groups = Blocks(kinds, groups, batch=batch, tokens=layout.seqlen)
    of_group = all_groups.of_group(group)
    whole = Blocks(of_group, (group,), batch=batch, tokens=layout.seqlen)
    halves = [Blocks(of_group, (group,), batch=batch, tokens=n) for n in layout.counts]
    starts = [_starts([x.nbytes for x in halves], owner) for owner in range(ranks)]
    # (batch, tokens, all heads, ...), or by head
    all_heads = range(ranks * all_groups.nheads_k)
    wide = tuple(x._replace(heads=ranks * x.heads) for x in kinds)
    result = Blocks(wide, (all_heads,), batch=batch, tokens=layout.tokens)
    part = halves[me].nbytes  # what comes from each of the others
    slots = {rank: slot * part for slot, rank in enumerate(x for x in range(ranks) if x != me)}
    rows, placed = [], []
    for kind, b in itertools.product(range(len(kinds)), range(batch)):
        source = whole.place(kind, group).moved(row=b)
        results = result.place(kind, all_heads).moved(row=b)
        width, by_head = whole.width(kind, group), kinds[kind].by_head
        copied = functools.partial(rows_between, heads=width, by_head=by_head)
        for rank in range(ranks):
            heads = results.moved(head=rank * kinds[kind].heads + all_groups.first(kind, group))
            target = halves[rank].joint_place(kind, group, before=starts[me][rank]).moved(row=b)
            if rank == me:
                target = heads._replace(tensor=1 + kind)
            for row, start, stop in layout.at(rank).placed:
                rows.append(copied(source.moved(start), target.moved(row), tokens=stop - start))
            if rank != me:
                arrived = halves[me].joint_place(kind, group, before=slots[rank]).moved(row=b)
                placed.append(copied(arrived, heads, tokens=layout.tokens))
    turn = [(me - step) % ranks for step in range(1, ranks)]
    pieces = tuple(
        Piece(x, starts[x][me], target=0, offset=slots[x], nbytes=part) for x in turn if part
    )
    nbytes = max(sum(x.nbytes for x in halves) - half.nbytes for half in halves)

    def wanted(owner: int, readers: Sequence[int]) -> Iterator[Bytes]:
        for reader in readers:
            first = starts[owner][reader]
            yield first, first + halves[reader].nbytes

    return CopyList(
        nbytes,
        Table(rows),
        pieces=(pieces,),
        traffic=() if nodes is None else (nodes.traffic(wanted),),
        placed=Table(placed),
        placed_nbytes=part * (ranks - 1),
    )


def _starts(sizes: list[int], owner: int) -> list[int]:
    """Returns where an owner publishes for each of the others, part after part."""
    parts = (0 if rank == owner else size for rank, size in enumerate(sizes))
    return list(itertools.accumulate(parts, initial=0))
