"""Tensors through an arena: a rank publishes rows of some, and pulls rows of the others'."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from .copies import ALIGN, CopyList
from .halves import Arena
from .nodes import Message, Nodes, Traffic

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


def publish_copies(
    arena: Arena, copies: CopyList, *, signature: str, sources: Tensors, targets: Tensors = ()
) -> Tensor:
    """Makes this rank's copies and meets the others; then pieces may be pulled. Returns the half
    that they are published in, uint8.
    """
    half = arena.publish(copies.nbytes, signature)
    arena.copy(copies.rows, sources, targets=[half, *targets], meets=signature)
    return half


class Published:
    """What all ranks have published for one call: tensors of the same dtypes and shapes (rows,
    ...), where rank r has `counts[r]` rows.

    Views of the arena's memory are kept there, by what they are of, as each costs the host several
    calls of torch.
    """

    def __init__(self, arena: Arena, tensors: Tensors, counts: Sequence[int]) -> None:
        self.arena = arena
        self.dtypes = tuple(x.dtype for x in tensors)
        self.shapes = tuple(x.shape[1:] for x in tensors)  # of a row
        self.row_bytes = tuple(x.itemsize * math.prod(x.shape[1:]) for x in tensors)
        self.counts = tuple(counts)
        self.nbytes = max(starts_of(self.row_bytes, n)[-1] for n in self.counts)

    def pull(self, rank: int, number: int, *, start: int = 0, stop: int | None = None) -> Tensor:
        """Views rows [start, stop) of a tensor of a rank, until the call after the next."""
        key = self.arena.half, self.dtypes, self.shapes, self.counts, rank, number, start, stop
        rows = self.arena.views.get(key)
        if rows is None:
            rows = self.arena.keep(key, self.view(rank, number)[start:stop])
        if rank != self.arena.rank:
            self.arena.pulled += rows.numel() * rows.itemsize
        return rows

    def fetch(self, rows: Traffic) -> None:
        """Exchanges rows of each tensor with other nodes, inside of `arena.copying`."""
        arena = self.arena
        key = self.dtypes, self.shapes, self.counts, rows
        traffic = arena.views.get(key)
        if traffic is None:
            sends = [y for x in rows.sends for y in self._in_bytes(x, arena.rank)]
            receives = [y for x in rows.receives for y in self._in_bytes(x, x.peer)]
            traffic = arena.keep(key, Traffic(sends, receives))
        arena.finish(arena.begin(traffic))

    def _in_bytes(self, rows: Message, owner: int) -> Iterator[Message]:
        starts = starts_of(self.row_bytes, self.counts[owner])
        for first, size in zip(starts, self.row_bytes):
            yield Message(rows.peer, first + rows.start * size, stop=first + rows.stop * size)

    def view(self, rank: int, number: int) -> Tensor:
        """Views one of a rank's tensors where it lies, once the arena has room for it."""
        key = self.arena.half, self.dtypes, self.shapes, self.counts, rank, number
        view = self.arena.views.get(key)
        if view is not None:
            return view
        rows = self.counts[rank]
        start = starts_of(self.row_bytes, rows)[number]
        stop = start + rows * self.row_bytes[number]
        memory = self.arena.of(rank, self.nbytes)[start:stop].view(self.dtypes[number])
        return self.arena.keep(key, memory.view((rows, *self.shapes[number])))


@functools.lru_cache(maxsize=1024)
def starts_of(row_bytes: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Returns where each tensor of a rank begins that has so many rows of each, and the end."""
    sizes = (-(-rows * n // ALIGN) * ALIGN for n in row_bytes)
    return tuple(itertools.accumulate(sizes, initial=0))


def publish_rows(
    arena: Arena, signature: str, tensors: Tensors, counts: Sequence[int]
) -> Published:
    """Publishes this rank's rows, `counts[r]` of rank r, and returns once all ranks have."""
    published = Published(arena, tensors, counts=counts)
    arena.publish(published.nbytes, signature)
    for number, x in enumerate(tensors):
        published.view(arena.rank, number).copy_(x)
    arena.meet(signature)
    if arena.nodes is not None:
        with arena.copying():
            published.fetch(_whole_shards(arena.nodes, published.counts))
            mark = arena.mark()
        arena.arrive(mark)
    return published


@functools.lru_cache(maxsize=256)
def _whole_shards(nodes: Nodes, counts: tuple[int, ...]) -> Traffic:
    """Returns the traffic of all rows to all nodes."""
    return nodes.traffic(lambda owner, readers: [(0, counts[owner])])
