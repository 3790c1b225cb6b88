"""The gradients of keys by groups of heads: the parts of one group travel beside the kernels of the
next, and so only those of the last are waited for.

A rank publishes its parts of other ranks' keys; their owner pulls them by DMA, which needs no SM,
and adds the parts of all ranks, in their order, once they are there. That takes memory for the
parts of a group once more: where it is much, `sums` exchanges slices.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .call_spec import CallSpec
from .copies import ALIGN, Group, Piece
from .halves import Arena
from .layout import Layout
from .rows import Partial
from .sums import Runs, parts_of, places_in

Tensor = torch.Tensor


class Places(NamedTuple):
    """Where rows lie, (rows, runs), int32, -1 for nowhere: those of other owners' keys and of this
    one's among a rank's parts, and the parts of this one's keys among those of all ranks.
    """

    others: Tensor
    own: Tensor
    pulled: Tensor


class SumsBeside:
    """The gradients of this rank's keys and values, `totals`, (1, tokens, heads, headdim)."""

    def __init__(
        self, arena: Arena, spec: CallSpec, totals: tuple[Tensor, Tensor], signature: str
    ) -> None:
        self.arena, self.spec, self.totals, self.signature = arena, spec, totals, signature
        self.late: tuple[Group, list[Tensor], Places] | None = None  # what is not added yet
        self.begun: list = []

    def send(self, group: Group, partial: Partial) -> None:
        """Gives the parts of a group's heads to the owners of their keys."""
        arena, layout, sides = self.arena, self.spec.layout, self.spec.sides
        parts = [x[0] for x in (partial.dk, partial.dv)]
        runs = partial.runs or ((0, 0, layout.seqlen),)
        places = sum_places(layout, sides, runs, parts[0].device)
        row_bytes = tuple(x[:1].numel() * x.itemsize for x in parts)
        self._arrive()  # before the barrier, which says that all have read what they were to
        room = arena.publish(published_bytes(layout, row_bytes), self.signature)
        pulled, start = [], 0
        for x in parts:
            shape = len(places.others), *x.shape[1:]
            published = room[start:][: x.itemsize * x[0].numel() * shape[0]]
            arena.add_runs(x, places.others, published.view(x.dtype).view(shape))
            found = x.new_empty(layout.ranks * layout.tokens, *x.shape[1:])
            arena.add_runs(x, places.own, found[layout.rank * layout.tokens :][: layout.tokens])
            start += _aligned(published.numel())
            pulled.append(found)
        arena.meet(self.signature)
        self.begun = [arena.pull(pieces_of(layout, sides, row_bytes), pulled)]
        self._add()  # of the group before
        self.late = group, pulled, places

    def finish(self) -> None:
        """All are there, for what the stream does next."""
        self._arrive()
        self._add()

    def _arrive(self) -> None:
        for mark in self.begun:
            self.arena.arrive(mark)

    def _add(self) -> None:
        if self.late is None:
            return
        group, pulled, places = self.late
        for total, x in zip(self.totals, pulled):
            heads = total[0][:, group.first : group.first + group.size]
            self.arena.add_runs(x, places.pulled, heads)


def published_bytes(layout: Layout, row_bytes: tuple[int, ...]) -> int:
    """What the rank with the fewest rows publishes: parts of all others'."""
    rows = layout.seqlen - min(layout.counts)
    return sum(_aligned(rows * n) for n in row_bytes)


@functools.lru_cache(maxsize=64)
def pieces_of(
    layout: Layout, sides: tuple[int, int], row_bytes: tuple[int, ...]
) -> tuple[Piece, ...]:
    """The pulls of parts of this rank's keys that the queries of others see, to where rank r's
    begin at r times the rows of this one.
    """
    me, tokens, found = layout.rank, layout.tokens, []
    parts = parts_of(layout, *sides)
    for step in range(1, layout.ranks):
        rank = (me - step) % layout.ranks
        before = sum(n for r, n in enumerate(layout.counts[:me]) if r != rank)
        start = 0
        for number, n in enumerate(row_bytes):
            for first, stop in parts[rank]:
                at, count = (rank * tokens + first) * n, (stop - first) * n
                found.append(Piece(rank, start + (before + first) * n, number, at, count))
            start += _aligned((layout.seqlen - layout.counts[rank]) * n)
    return tuple(found)


@functools.lru_cache(maxsize=8)
def sum_places(layout: Layout, sides: tuple[int, int], runs: Runs, device: torch.device) -> Places:
    """Those of a rank that has these runs of parts."""
    positions = [_positions(layout, rank) for rank in range(layout.ranks)]
    me, tokens = layout.rank, layout.tokens
    others = torch.cat([x for rank, x in enumerate(positions) if rank != me])
    pulled = torch.full((tokens, layout.ranks), -1, dtype=torch.int32)
    rows = torch.arange(tokens, dtype=torch.int32)
    for rank, ranges in enumerate(parts_of(layout, *sides)):
        for first, stop in ranges:
            pulled[first:stop, rank] = rank * tokens + rows[first:stop]
    found = places_in(runs, others), places_in(runs, positions[me]), pulled
    return Places(*(x.to(device) for x in found))


def _positions(layout: Layout, rank: int) -> Tensor:
    runs = (*layout.runs[rank], (0, 0))
    return torch.cat([torch.arange(a, b, dtype=torch.int32) for a, b in runs])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
