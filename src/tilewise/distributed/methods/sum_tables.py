"""Which parts of the gradients of keys a rank adds, and in which slices parts are exchanged."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..layouts.layout import Layout
from ..layouts.pulls import place_among, rows_of, rows_seen, shared_rows, without
from ..layouts.work import Band, KeyRun, Run, keys_of
from ..transport.nodes import Nodes, Traffic

Tensor = torch.Tensor
MOST_BITS = 32


class Slice(NamedTuple):
    """Rows [first, stop) of a rank's shared rows, and their place among those of all owners."""

    first: int
    stop: int
    place: int
    rows: int  # of all owners
    parts: tuple[tuple[Run, ...], ...] = ()  # of each rank those that it sees, from `first` on


class Tables(NamedTuple):
    """Which parts are added, and where; -1 where a run does not see a row's key."""

    slices: tuple[Slice, ...]
    places: tuple[Tensor, ...]  # of the rows of each slice, of all owners, (rows, runs)
    shared: Tensor  # of each row that others see the ranks that do, bit r for rank r, and the row
    private: Tensor  # rows that no other rank sees
    private_places: Tensor
    traffic: tuple[Traffic, ...] = ()  # of each slice the rows that cross nodes


def most_rows(room: int, row_bytes: int, *, ranks: int) -> int:
    """Returns how many rows of every owner a slice may have.

    >>> most_rows(2 * 1024 * 256, 1024, ranks=4)  # K and V of 1024 rows, in 16 bits
    128
    """
    return max(1, room // max(1, row_bytes * ranks))


@functools.lru_cache(maxsize=256)
def slices_of(counts: tuple[int, ...], rank: int, *, slice_rows: int) -> tuple[Slice, ...]:
    """Returns a rank's slices, where each owner has `counts` rows: in each slice the same share of
    all of them, `slice_rows` rows per owner or fewer, in the mean.

    >>> for x in slices_of((5, 10), 1, slice_rows=4):  # 3 and 5 rows, then 2 and 5
    ...     print(x)
    Slice(first=0, stop=5, place=3, rows=8, parts=())
    Slice(first=5, stop=10, place=2, rows=7, parts=())
    """
    slices, first = [], 0
    for shares in _shares(counts, -(-sum(counts) // (slice_rows * len(counts)))):
        stop, place = first + shares[rank], sum(shares[:rank])
        slices.append(Slice(first, stop, place=place, rows=sum(shares)))
        first = stop
    return tuple(slices)


def _shares(counts: tuple[int, ...], number: int) -> Iterator[list[int]]:
    """Yields each owner's rows in each of `number` slices, which differ by one row at most."""
    remaining = list(counts)
    for slices in range(number, 0, -1):
        shares = [n // slices for n in remaining]
        extra = -(-sum(remaining) // slices) - sum(shares)
        by_remainder = sorted(range(len(counts)), key=lambda r: -(remaining[r] % slices))
        for r in by_remainder[:extra]:
            shares[r] += 1
        remaining = [n - share for n, share in zip(remaining, shares)]
        yield shares


@functools.lru_cache(maxsize=8)
def tables_of(
    layout: Layout,
    band: Band,
    *,
    slice_rows: int,
    runs: tuple[KeyRun, ...],
    device: torch.device,
    nodes: Nodes | None = None,
) -> Tables:
    """Returns the tables of a layout under a band, whose parts lie in `runs`."""
    shared = shared_rows(layout, band)
    positions = [_positions(layout.at(rank), rows) for rank, rows in enumerate(shared)]
    counts = tuple(map(len, positions))
    of_ranks = [slices_of(counts, rank, slice_rows=slice_rows) for rank in range(layout.ranks)]
    mine = shared[layout.rank]
    rows = _indices(mine)
    masks = _masks_of(layout, band)[:, rows.long()]
    places_by_position = places_of(runs, layout.seqlen)
    slices = tuple(
        x._replace(parts=tuple(_runs_where(has_part[x.first : x.stop]) for has_part in masks))
        for x in of_ranks[layout.rank]
    )
    places = []
    for pieces in zip(*of_ranks):
        of_owners = [x[piece.first : piece.stop] for x, piece in zip(positions, pieces)]
        places.append(places_by_position[torch.cat(of_owners)].to(device))
    private = _indices(without([(0, layout.tokens)], mine))
    private_positions = _positions(layout, [(0, layout.tokens)])[private.long()]
    return Tables(
        slices,
        tuple(places),
        shared=torch.stack([_bits_of(masks), rows], 1).to(device),
        private=private.to(device),
        private_places=places_by_position[private_positions].to(device),
        traffic=_traffic(layout, band, nodes=nodes, of_ranks=of_ranks),
    )


def _traffic(
    layout: Layout, band: Band, *, nodes: Nodes | None, of_ranks: Sequence[Sequence[Slice]]
) -> tuple[Traffic, ...]:
    """Lists, for each slice, the rows whose parts cross nodes to those that own their keys."""
    if nodes is None:
        return ()
    shared = shared_rows(layout, band)
    traffic = []
    for pieces in zip(*of_ranks):

        def wanted(source: int, owners: Sequence[int], pieces=pieces) -> Iterator[Run]:
            for owner in owners:
                first, end, place = pieces[owner][:3]
                for start, stop in rows_seen(layout, owner, [source], band=band):
                    row = place_among(shared[owner], start)
                    a, b = max(row, first), min(row + stop - start, end)
                    yield place + a - first, place + b - first

        traffic.append(nodes.traffic(wanted))
    return tuple(traffic)


def places_of(runs: Sequence[KeyRun], seqlen: int) -> Tensor:
    """Returns where the runs that see a key have their parts of its gradient, (seqlen, most runs
    that see a key), int32: in the order of the runs, then -1.

    >>> places_of((KeyRun(0, 0, 1), KeyRun(1, 0, 4), KeyRun(5, 2, 4)), 4).tolist()
    [[0, 1], [2, -1], [3, 5], [4, 6]]
    """
    places = torch.full((seqlen, _depth(runs)), -1, dtype=torch.int32)
    depth = torch.zeros(seqlen, 1, dtype=torch.int64)
    for row, start, stop in runs:
        place = torch.arange(row, row + stop - start, dtype=torch.int32)[:, None]
        places[start:stop].scatter_(1, depth[start:stop], place)
        depth[start:stop] += 1
    return places


def _depth(runs: Sequence[KeyRun]) -> int:
    """Returns how many runs at most see a key."""
    ends = sorted([(x.start, 1) for x in runs] + [(x.stop, -1) for x in runs])
    return max([1, *itertools.accumulate(step for _, step in ends)])


def _positions(layout: Layout, rows: Sequence[Run]) -> Tensor:
    """Returns the positions of some of a rank's rows."""
    all_rows = [torch.arange(a, b) for a, b in (*layout.runs[layout.rank], (0, 0))]
    return torch.cat(all_rows)[_indices(rows).long()]


def _indices(rows: Sequence[Run]) -> Tensor:
    return torch.cat([torch.arange(a, b, dtype=torch.int32) for a, b in (*rows, (0, 0))])


def _masks_of(layout: Layout, band: Band) -> Tensor:
    """Tells which ranks see the key of which row of this rank, (ranks, rows)."""
    masks = torch.zeros((layout.ranks, layout.tokens), dtype=torch.bool)
    for rank in range(layout.ranks):
        for start, stop in rows_of(layout, keys_of(layout.at(rank).spans, band)):
            masks[rank, start:stop] = True
    return masks


def _bits_of(masks: Tensor) -> Tensor:
    """Returns, for each row, the ranks that see it, int32: bit r for rank r, up to MOST_BITS.

    >>> _bits_of(torch.tensor([[True, True, False], [False, True, True]])).tolist()
    [1, 3, 2]
    """
    bits = torch.zeros(masks.shape[1], dtype=torch.int32)
    for rank, has_part in enumerate(masks[:MOST_BITS]):
        bits |= has_part * torch.tensor(1 << rank).to(torch.int32)  # of rank 31 the sign
    return bits


def _runs_where(has_part: Tensor) -> tuple[Run, ...]:
    """Returns the runs of rows that have a part.

    >>> _runs_where(torch.tensor([True, True, False, True]))
    ((0, 2), (3, 4))
    """
    edges = torch.nn.functional.pad(has_part.int(), (1, 1)).diff().nonzero().flatten().tolist()
    return tuple(zip(edges[::2], edges[1::2]))
