"""Tensors through an arena: a rank publishes its rows of some, and pulls rows of the others'."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from .arena import Arena
from .layout import Layout, Run

Tensor = torch.Tensor
ALIGN = 64  # bytes


class Published:
    """What all ranks have published for one call: tensors of the same dtypes and shapes, but for
    their first dimension, of which rank r has `counts[r]` rows.
    """

    def __init__(self, arena: Arena, tensors: Sequence[Tensor], counts: Sequence[int]) -> None:
        self.arena = arena
        self.kinds = [(x.dtype, x.shape[1:]) for x in tensors]
        self.counts = counts
        self.nbytes = max(self._place(rank, len(self.kinds)) for rank in range(arena.ranks))

    def pull(self, rank: int, number: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of one of a rank's tensors, to be copied before the call after the
        next.
        """
        rows = self.view(rank, number)[start:stop]
        return self.counted(rank, rows)

    def counted(self, rank: int, x: Tensor) -> Tensor:
        """A part of a rank's tensors, as it is, and its bytes among those that were pulled."""
        if rank != self.arena.rank:
            self.arena.pulled += x.numel() * x.itemsize
        return x

    def view(self, rank: int, number: int) -> Tensor:
        """All of one of a rank's tensors where it lies."""
        dtype, shape = self.kinds[number]
        start, shape = self._place(rank, number), (self.counts[rank], *shape)
        nbytes = math.prod(shape) * dtype.itemsize
        block = self.arena.of(rank, self.nbytes)
        return block[start : start + nbytes].view(dtype).view(shape)

    def _place(self, rank: int, number: int) -> int:
        """Where a rank's tensor begins."""
        sizes = (self.counts[rank] * math.prod(s) * d.itemsize for d, s in self.kinds[:number])
        return sum(-(-size // ALIGN) * ALIGN for size in sizes)


def publish(arena: Arena, asked: str, tensors: Sequence[Tensor], layout: Layout) -> Published:
    """Publishes this rank's rows, and returns once all ranks have. `asked` names the call."""
    return publish_rows(arena, asked, tensors, layout.counts)


def publish_rows(
    arena: Arena, asked: str, tensors: Sequence[Tensor], counts: Sequence[int]
) -> Published:
    """The same of any numbers of rows."""
    published = Published(arena, tensors, counts)
    arena.publish(published.nbytes, asked)
    for number, x in enumerate(tensors):
        published.view(arena.rank, number).copy_(x)
    arena.meet(asked)
    return published


def runs_in_turn(layout: Layout, wanted: Sequence[Run]) -> Iterator[tuple[int, int, int, int]]:
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
