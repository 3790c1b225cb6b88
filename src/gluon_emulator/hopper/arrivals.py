"""Memory that DMA of another stream fills while the kernel runs, piece by piece, and the word in
which that stream counts the pieces that have arrived.

A piece arrives at a random step, in parts, and the word is written later still. TMA may read it
once the partition that starts the copy has waited for that count: the function that inline assembly
means raises `running().arrived`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .machine import HopperError, Machine

Part = tuple[torch.Tensor, torch.Tensor]  # where it goes, contiguous rows, and what


class Arrivals:
    """The pieces of one launch, in the order in which they arrive."""

    def __init__(self, word: torch.Tensor, pieces: Sequence[Sequence[Part]]) -> None:
        self.word, self.pieces = word, pieces
        self.steps = iter([])

    def begin(self, machine: Machine) -> None:
        """Poisons what has not arrived, and puts the pieces in flight."""
        for piece in self.pieces:
            for target, _ in piece:
                target.fill_(float("nan"))
        self.steps = self._deliver()
        machine.arrivals = self
        machine.launch(lambda: next(self.steps, True))

    def check(self, source: torch.Tensor, partition: Any) -> None:
        """Raises where a partition reads a piece that it has not waited for."""
        if source.numel() == 0:
            return
        low, high = _bounds(source)
        for number, piece in enumerate(self.pieces[partition.arrived :], partition.arrived + 1):
            for target, _ in piece:
                first, last = _bounds(target)
                if low <= last and first <= high:
                    raise HopperError(
                        f"{partition} starts a copy of piece {number} of {len(self.pieces)}, and "
                        f"has waited for {partition.arrived}"
                    )

    def _deliver(self) -> Any:
        for number, piece in enumerate(self.pieces, 1):
            for target, source in piece:
                target.copy_(source)
                yield False
            self.word.fill_(number)
            yield number == len(self.pieces)


def _bounds(x: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first and the last element."""
    steps = sum(step * (size - 1) for step, size in zip(x.stride(), x.shape))
    return x.data_ptr(), x.data_ptr() + steps * x.element_size()
