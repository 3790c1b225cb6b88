"""Copies of rows of bytes between strided tensors, as one launch of `portable.copy_table` takes
them: a table of where rows begin, how far they are apart, and how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor
UNIT = 16  # bytes, which a thread moves at a time
BLOCK_M, BLOCK_N = 16, 128  # rows, and words of 4 bytes: 8 KB a tile


class Rows(NamedTuple):
    """One copy: `rows` rows of `width` bytes of a source, from byte `first` on, `pitch` apart; and
    where they go in a target. Tensors are numbers in the lists that a launch is given.
    """

    source: int
    first: int
    pitch: int
    target: int
    start: int  # the first byte in the target
    step: int  # from a row to the next in the target
    rows: int
    width: int


class Table:
    """The copies of a call, for one launch."""

    def __init__(self, copies: Iterable[Rows]) -> None:
        self.copies = tuple(x for x in copies if x.rows and x.width)
        self.is_aligned = not any(n % UNIT for x in self.copies for n in _bytes_of(x))
        self.tiles = 0
        self.on: dict[Any, Tensor] = {}  # by device

    def serves(self, addresses: Sequence[int]) -> bool:
        """Whether one launch makes them: there are some, and all rows of tensors at these addresses
        begin and end at multiples of 16 bytes.
        """
        return bool(self.copies) and self.is_aligned and not any([x % UNIT for x in addresses])

    def at(self, device: torch.device) -> Tensor:
        """The table on a device, int64."""
        if device not in self.on:
            entries, self.tiles = [], 0
            for x in self.copies:
                columns = -(-x.width // (4 * BLOCK_N))
                self.tiles += -(-x.rows // BLOCK_M) * columns
                first, pitch, start, step, width = (n // UNIT for n in _bytes_of(x))
                entries.append((x.source, first, pitch, x.target, start, step, x.rows, width))
                entries[-1] += (self.tiles,)
            self.on[device] = torch.tensor(entries, dtype=torch.int64, device=device)
        return self.on[device]


def _bytes_of(x: Rows) -> tuple[int, ...]:
    return x.first, x.pitch, x.start, x.step, x.width
