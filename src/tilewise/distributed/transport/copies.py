"""What a call copies, in bytes, computed once for a layout and shapes: rows between tensors of a
rank, many in one launch, and pieces of what other ranks have published, by DMA.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...kernels.common.row_table import UNIT, Rows, Table
from .nodes import Traffic

Tensor = torch.Tensor
ALIGN = 64  # bytes
NO_COPIES = Table(())
MOST_PITCH = (1 << 31) - 1  # bytes from a row to the next, of one copy by DMA


class Piece(NamedTuple):
    """Bytes of a rank's half of the arena, from `start` on, and their offset in a target; and rows
    of as many more, `pitch` apart in the half and `step` in the target.
    """

    rank: int
    start: int
    target: int
    offset: int
    nbytes: int
    rows: int = 1
    pitch: int = 0
    step: int = 0
    arrived: int = 0  # what a kernel that waits is told once it is there, if anything


class CopyList(NamedTuple):
    """The copies of an exchange, of tensors to targets. `rows` has this rank's: into its half of
    the arena, which is target 0, and into the others where it keeps them. `pieces` has those of
    other ranks' halves, in lists that are waited for one by one.
    """

    nbytes: int  # of the half
    rows: Table
    pieces: tuple[tuple[Piece, ...], ...]
    traffic: tuple[Traffic, ...] = ()  # what crosses nodes, each for as many of the lists
    placed: Table = NO_COPIES  # copies of pieces that have arrived in memory of their own
    placed_nbytes: int = 0  # of that memory


class Kind(NamedTuple):
    """A tensor of a call: (batch, tokens, heads, ...), `unit` bytes per head; or by head, as LSE
    is, (batch, heads, tokens). A group has as many of `heads` as of key heads, or a multiple.
    """

    heads: int
    unit: int
    by_head: bool = False


class Place(NamedTuple):
    """Where a tensor lies: bytes from the beginning of the memory with this number, and from a row
    of the batch, a token and a head to the next.
    """

    tensor: int
    start: int
    of_row: int
    of_token: int
    of_head: int

    def moved(self, token: int = 0, head: int = 0, *, row: int = 0) -> Place:
        """Returns the place that begins with this token and head of a row of the batch."""
        start = self.start + row * self.of_row + token * self.of_token + head * self.of_head
        return self._replace(start=start)


def rows_between(
    source: Place, target: Place, *, tokens: int, heads: int, by_head: bool = False
) -> Rows:
    """Copies tokens and heads, of which those of one row lie side by side in both."""
    if by_head:
        pitch, step = source.of_head, target.of_head
        rows, width = heads, tokens * source.of_token
    else:
        pitch, step = source.of_token, target.of_token
        rows, width = tokens, heads * source.of_head
    return Rows(
        source=source.tensor,
        first=source.start,
        pitch=pitch,
        target=target.tensor,
        start=target.start,
        step=step,
        rows=rows,
        width=width,
    )


class Blocks:
    """Where tensors lie whose key heads are dealt in groups, ranges of them: each group of each
    tensor is dense, (batch, tokens, heads of the group, ...). Tensors lie end to end; or, of one
    kind, side by side, as one tensor (batch, tokens, tensors, heads of the group, ...) per group.
    """

    def __init__(
        self,
        kinds: tuple[Kind, ...],
        groups: tuple[range, ...],
        *,
        batch: int,
        tokens: int,
        side_by_side: bool = False,
    ) -> None:
        self.kinds, self.groups, self.side_by_side = kinds, groups, side_by_side
        self.batch, self.tokens = batch, tokens
        self.abreast = len(kinds) if side_by_side else 1  # tensors in one memory
        self.nheads_k = sum(map(len, groups))
        buffers = kinds[:1] if side_by_side else kinds
        self.sizes = tuple(batch * tokens * x.heads * x.unit * self.abreast for x in buffers)
        ends = itertools.accumulate((-(-n // ALIGN) * ALIGN for n in self.sizes), initial=0)
        *self.starts, self.nbytes = ends  # in one memory

    def width(self, kind: int, group: range) -> int:
        """Counts the heads of a group."""
        return len(group) * self.kinds[kind].heads // self.nheads_k

    def first(self, kind: int, group: range) -> int:
        """Counts the heads before those of a group."""
        return (group.start - self.groups[0].start) * self.kinds[kind].heads // self.nheads_k

    def shape(self, kind: int, group: range) -> tuple[int, ...]:
        """Returns the dimensions of a group, without the head dim."""
        width = self.width(kind, group)
        if self.kinds[kind].by_head:
            return self.batch, width, self.tokens
        return self.batch, self.tokens, width

    def place(self, kind: int, group: range) -> Place:
        """Returns where a group lies in the tensor's own memory."""
        unit, width = self.kinds[kind].unit, self.width(kind, group)
        pitch = width * unit * self.abreast  # of a token
        start = self.batch * self.first(kind, group) * self.tokens * unit * self.abreast
        tensor, of_row = kind, self.tokens * pitch
        if self.side_by_side:
            start, tensor = start + kind * width * unit, 0
        if self.kinds[kind].by_head:
            return Place(tensor, start, of_row=of_row, of_token=unit, of_head=self.tokens * unit)
        return Place(tensor, start, of_row=of_row, of_token=pitch, of_head=unit)

    def joint_place(self, kind: int, group: range, *, before: int = 0) -> Place:
        """Returns the place in one memory, tensor 0, that has all tensors from byte `before` on."""
        place = self.place(kind, group)
        start = before + self.starts[place.tensor] + place.start
        return place._replace(tensor=0, start=start)

    def of_group(self, group: range) -> tuple[Kind, ...]:
        """Returns the kinds of a group's heads alone."""
        return tuple(x._replace(heads=self.width(i, group)) for i, x in enumerate(self.kinds))


def in_rows(x: Tensor) -> Tensor:
    """Returns x with dense heads, (..., heads, headdim), or (batch, heads, tokens)."""
    if x.dim() == 3:
        return x.contiguous()
    heads, headdim = x.shape[-2:]
    is_dense = (headdim == 1 or x.stride(-1) == 1) and (heads == 1 or x.stride(-2) == headdim)
    return x if is_dense else x.contiguous()


def are_aligned(*tensors: Tensor) -> bool:
    """Tells whether the heads of all are multiples of 16 bytes."""
    return not any(x.shape[3] * x.itemsize % UNIT for x in tensors)


def kind_of(x: Tensor) -> Kind:
    """Returns the kind of a tensor (batch, tokens, heads, headdim) or (batch, heads, tokens)."""
    if x.dim() == 3:
        return Kind(x.shape[1], x.itemsize, by_head=True)
    return Kind(x.shape[2], x.shape[3] * x.itemsize)


def places_of(tensors: Sequence[Tensor]) -> tuple[Place, ...]:
    """Returns where tensors (batch, tokens, heads, headdim) or (batch, heads, tokens) lie, whose
    heads are dense, in bytes.
    """
    places = []
    for number, x in enumerate(tensors):
        by_head, size = x.dim() == 3, x.itemsize
        of_token = size if by_head else x.stride(1) * size
        of_head = size * (x.stride(1) if by_head else x.shape[3])
        places.append(
            Place(number, 0, of_row=x.stride(0) * size, of_token=of_token, of_head=of_head)
        )
    return tuple(places)


def copy_one_by_one(table: Table, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Makes the copies of a table by torch."""
    for x in table.copies:
        rows = bytes_at(sources[x.source], x.first, pitch=x.pitch, rows=x.rows, width=x.width)
        target = bytes_at(targets[x.target], x.start, pitch=x.step, rows=x.rows, width=x.width)
        target.copy_(rows)


def bytes_at(x: Tensor, first: int, *, pitch: int, rows: int, width: int) -> Tensor:
    """Views rows of bytes of a tensor, counted from its first element."""
    flat = x.as_strided((1,), (1,)).view(torch.uint8)
    return flat.as_strided((rows, width), (pitch, 1), flat.storage_offset() + first)
