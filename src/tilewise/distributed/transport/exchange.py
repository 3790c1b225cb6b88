"""Tensors through an arena: a rank publishes its rows of some, and pulls rows of the others'."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from .copies import ALIGN
from .halves import Arena

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


def publish_rows(
    arena: Arena, signature: str, tensors: Sequence[Tensor], counts: Sequence[int]
) -> Published:
    """Publishes this rank's rows, and returns once all ranks have; on GPUs, once what the stream
    does next comes after that. `signature` is that of the call; rank r has `counts[r]` rows.
    """
    published = Published(arena, [x.unsqueeze(0) for x in tensors], counts)
    arena.publish(published.nbytes, signature)
    for number, x in enumerate(tensors):
        published.view(arena.rank, number)[0].copy_(x)
    arena.meet(signature)
    return published
