"""What a call copies, in bytes, computed once for a layout and shapes: rows between tensors of a
rank, many in one launch, and pieces of what other ranks have published, by DMA.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...kernels.common.row_table import UNIT, Rows, Table

Tensor = torch.Tensor
ALIGN = 64  # bytes


class Piece(NamedTuple):
    """Bytes of a rank's half of the arena, from `start` on, that go to byte `at` of a target."""

    rank: int
    start: int
    target: int
    at: int
    nbytes: int


class Kind(NamedTuple):
    """A tensor of a call: (batch, tokens, heads, ...), `unit` bytes of each head; or by head, as
    LSE is, (batch, heads, tokens). Of `heads` there are as many a group as of key heads, or a
    multiple.
    """

    heads: int
    unit: int
    by_head: bool = False


class Group(NamedTuple):
    """Key heads that are exchanged together, and their query heads."""

    first: int
    size: int


class Place(NamedTuple):
    """Where tokens and heads of a tensor lie: bytes from its beginning, from a token to the next
    and from a head to the next. Tensors are numbers in a list.
    """

    tensor: int
    start: int
    of_token: int
    of_head: int

    def at(self, token: int, head: int) -> int:
        """Where a token of a head begins."""
        return self.start + token * self.of_token + head * self.of_head


class Extent(NamedTuple):
    """Tokens, or heads, of a copy: the first in the source, that in the target, and how many."""

    first: int
    at: int
    size: int


def rows_between(
    source: Place, target: Place, tokens: Extent, heads: Extent, by_head: bool = False
) -> Rows:
    """The copy of some tokens and heads, of which those of one row lie side by side in both."""
    first, at = source.at(tokens.first, heads.first), target.at(tokens.at, heads.at)
    if by_head:
        pitch, step = source.of_head, target.of_head
        rows, width = heads.size, tokens.size * source.of_token
    else:
        pitch, step = source.of_token, target.of_token
        rows, width = tokens.size, heads.size * source.of_head
    return Rows(source.tensor, first, pitch, target.tensor, at, step, rows, width)


class Blocks:
    """Where tensors lie whose heads are dealt in groups: each group of each tensor is dense,
    (batch, tokens, heads of the group, ...). Tensors lie end to end; or, of one kind,
    side by side, as one tensor (batch, tokens, tensors, heads of the group, ...) a group.
    """

    def __init__(
        self,
        kinds: tuple[Kind, ...],
        groups: tuple[Group, ...],
        batch: int,
        tokens: int,
        is_beside: bool = False,
    ) -> None:
        self.kinds, self.groups, self.tokens, self.is_beside = kinds, groups, tokens, is_beside
        self.beside = len(kinds) if is_beside else 1
        self.of_keys = sum(x.size for x in groups)
        buffers = kinds[:1] if is_beside else kinds
        self.sizes = tuple(batch * tokens * x.heads * x.unit * self.beside for x in buffers)
        ends = itertools.accumulate((-(-n // ALIGN) * ALIGN for n in self.sizes), initial=0)
        *self.starts, self.nbytes = ends  # in one memory
        self.batch = batch

    def width(self, kind: int, group: Group) -> int:
        """Heads of a group."""
        return group.size * self.kinds[kind].heads // self.of_keys

    def first(self, kind: int, group: Group) -> int:
        """Where these begin among the heads of all groups."""
        return (group.first - self.groups[0].first) * self.kinds[kind].heads // self.of_keys

    def place(self, kind: int, group: Group, row: int, tensor: int | None = None) -> Place:
        """Where a row of the batch of a group lies: in the tensor's own memory, or, as one of that
        number, in one that has all.
        """
        unit, width = self.kinds[kind].unit, self.width(kind, group)
        before = self.batch * self.first(kind, group) + row * width
        start = before * self.tokens * unit * self.beside
        if self.is_beside:
            start, number = start + kind * width * unit, 0
        else:
            number = kind
        if tensor is not None:
            start += self.starts[number]
            number = tensor
        if self.kinds[kind].by_head:
            return Place(number, start, unit, self.tokens * unit)
        return Place(number, start, width * unit * self.beside, unit)


def in_rows(x: Tensor) -> Tensor:
    """x (..., heads, headdim), a copy where a token's heads do not lie side by side."""
    heads, headdim = x.shape[-2:]
    is_dense = (headdim == 1 or x.stride(-1) == 1) and (heads == 1 or x.stride(-2) == headdim)
    return x if is_dense else x.contiguous()


def are_aligned(*tensors: Tensor) -> bool:
    """Whether the heads of all are multiples of 16 bytes."""
    return not any(x.shape[3] * x.itemsize % UNIT for x in tensors)


def kind_of(x: Tensor) -> Kind:
    """The kind of a tensor (batch, tokens, heads, headdim)."""
    return Kind(x.shape[2], x.shape[3] * x.itemsize)


Strides = tuple[int, int, int]  # bytes from a row of the batch, a token and a head to the next


def strides_of(x: Tensor) -> Strides:
    """Strides of (batch, tokens, heads, headdim), dense in the last two."""
    size = x.itemsize
    return x.stride(0) * size, x.stride(1) * size, x.shape[3] * size


def copy_one_by_one(table: Table, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """The copies of a table by torch."""
    for x in table.copies:
        rows = bytes_at(sources[x.source], x.first, x.pitch, x.rows, x.width)
        bytes_at(targets[x.target], x.at, x.step, x.rows, x.width).copy_(rows)


def bytes_at(x: Tensor, first: int, pitch: int, rows: int, width: int) -> Tensor:
    """Rows of bytes of a tensor, counted from its first element."""
    flat = x.as_strided((1,), (1,)).view(torch.uint8)
    return flat.as_strided((rows, width), (pitch, 1), flat.storage_offset() + first)
