"""Tensors through an arena: a rank publishes its rows of some, and pulls rows of the others'."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from .copies import ALIGN
from .halves import Arena
from .layout import Layout, Run
from .work import keys_of

Tensor = torch.Tensor


Kind = tuple[torch.dtype, int, torch.Size]  # parts, and the shape of a row


class Published:
    """What all ranks have published for one call: tensors of the same dtypes and shapes (parts,
    rows, ...), where rank r has `counts[r]` rows.

    Views of the arena's memory are kept there, by what they are of, as each costs the host several
    calls of torch.
    """

    def __init__(self, arena: Arena, tensors: Sequence[Tensor], counts: Sequence[int]) -> None:
        self.arena = arena
        self.kinds: tuple[Kind, ...] = tuple((x.dtype, x.shape[0], x.shape[2:]) for x in tensors)
        self.counts = tuple(counts)
        self.nbytes = max(place_of(self.kinds, n, len(self.kinds)) for n in self.counts)

    def pull(
        self, rank: int, number: int, start: int = 0, stop: int | None = None, part: int = 0
    ) -> Tensor:
        """Rows [start, stop) of one of a rank's tensors, to be copied before the call after the
        next. They are contiguous.
        """
        key = self.arena.half, self.kinds, self.counts, rank, number, start, stop, part
        rows = self.arena.views.get(key)
        if rows is None:
            rows = self.arena.keep(key, self.view(rank, number)[part, start:stop])
        if rank != self.arena.rank:
            self.arena.pulled += rows.numel() * rows.itemsize
        return rows

    def view(self, rank: int, number: int) -> Tensor:
        """All of one of a rank's tensors where it lies, once the arena has room for it."""
        key = self.arena.half, self.kinds, self.counts, rank, number
        if (known := self.arena.views.get(key)) is not None:
            return known
        dtype, parts, shape = self.kinds[number]
        rows = self.counts[rank]
        start, shape = place_of(self.kinds, rows, number), (parts, rows, *shape)
        nbytes = math.prod(shape) * dtype.itemsize
        block = self.arena.of(rank, self.nbytes)
        return self.arena.keep(key, block[start : start + nbytes].view(dtype).view(shape))


@functools.lru_cache(maxsize=1024)
def place_of(kinds: tuple[Kind, ...], rows: int, number: int) -> int:
    """Where a tensor begins of a rank that has so many rows of each."""
    sizes = (n * rows * math.prod(s) * d.itemsize for d, n, s in kinds[:number])
    return sum(-(-size // ALIGN) * ALIGN for size in sizes)


def publish(arena: Arena, signature: str, tensors: Sequence[Tensor], layout: Layout) -> Published:
    """Publishes this rank's rows, and returns once all ranks have; on GPUs, once what the stream
    does next comes after that. `signature` is that of the call.
    """
    return publish_rows(arena, signature, tensors, layout.counts)


def publish_rows(
    arena: Arena, signature: str, tensors: Sequence[Tensor], counts: Sequence[int]
) -> Published:
    """Does as `publish`, for any numbers of rows."""
    published = Published(arena, [x.unsqueeze(0) for x in tensors], counts)
    arena.publish(published.nbytes, signature)
    for number, x in enumerate(tensors):
        published.view(arena.rank, number)[0].copy_(x)
    arena.meet(signature)
    return published


Pull = tuple[int, int, int, int]  # rank, its row, and the positions [start, stop) of its rows


def runs_in_turn(layout: Layout, wanted: Sequence[Run]) -> Iterator[Pull]:
    """(rank, row, start, stop) of each run of positions that is wanted and that a rank has from its
    row `row` on: of this rank first and then of the ones before it, so that no two ranks read the
    same one at a time.
    """
    for step in range(layout.ranks):
        rank = (layout.rank - step) % layout.ranks
        row = 0
        for start, stop in layout.runs[rank]:
            for first, last in wanted:
                a, b = max(start, first), min(stop, last)
                if a < b:
                    yield rank, row + a - start, a, b
            row += stop - start


class Pulls(NamedTuple):
    """What a rank pulls: for each of its spans the rows that it is the first to need, and whether
    all rows of the sequence are among them.
    """

    by_span: tuple[tuple[Pull, ...], ...]
    is_whole: bool


@functools.lru_cache(maxsize=256)
def pulls_of(layout: Layout, left: int, right: int) -> Pulls:
    """The pulls of a layout under a band.

    >>> import tilewise.distributed as td
    >>> pulls_of(td.zigzag(8, 2), -1, 0).by_span  # rows 0 and 1, then 6 and 7; all before them
    (((0, 0, 0, 2),), ((0, 2, 6, 8), (1, 0, 2, 6)))
    """
    found, held = [], []
    for i, _ in enumerate(layout.spans):
        wanted = keys_of(layout.spans[: i + 1], left, right)
        found.append(tuple(runs_in_turn(layout, without(wanted, held))))
        held = wanted
    return Pulls(tuple(found), held == [(0, layout.seqlen)])


@functools.lru_cache(maxsize=256)
def shared_rows(layout: Layout, left: int, right: int) -> tuple[tuple[Run, ...], ...]:
    """The rows of every rank whose keys queries of another one see.

    >>> import tilewise.distributed as td
    >>> shared_rows(td.zigzag(8, 2), -1, 0)  # the last two keys are seen by rank 0 alone
    (((0, 2),), ((0, 4),))
    """
    spans = []
    for rank in range(layout.ranks):
        of = layout.at(rank)
        others = (x for r in range(layout.ranks) if r != rank for x in layout.at(r).spans)
        spans.append(tuple(rows_of(of, keys_of(list(others), left, right))))
    return tuple(spans)


def rows_of(layout: Layout, keys: Sequence[Run]) -> list[Run]:
    """The rows of this rank at these positions, runs that continue each other as one."""
    found: list[Run] = []
    row = 0
    for start, stop in layout.runs[layout.rank]:
        for first, last in keys:
            a, b = max(start, first), min(stop, last)
            if a < b:
                run = row + a - start, row + b - start
                if found and found[-1][1] == run[0]:
                    run = found.pop()[0], run[1]
                found.append(run)
        row += stop - start
    return found


def without(runs: Sequence[Run], held: Sequence[Run]) -> list[Run]:
    """The parts of some runs that lie in none of others; both in order."""
    found = []
    for start, stop in runs:
        for a, b in held:
            if a < stop and b > start:
                if start < a:
                    found.append((start, a))
                start = b
        if start < stop:
            found.append((start, stop))
    return found
