"""The temporary memory of a program: slices of one buffer, each with a name."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from .operand import Operand

Tensor = torch.Tensor
LINE = 512  # bytes; slices begin at multiples of it, as tensors of their own do


def allocator_of(device: torch.device) -> Any:
    """What makes new memory of a shape, strides and a dtype. Of CUDA memory torch has one for the
    code of its compiler, which asks neither a dispatch mode nor autograd: half the time.
    """
    from torch._C._dynamo import guards

    allocate = getattr(guards, "_empty_strided_cuda", None)
    if device.type != "cuda" or allocate is None:
        return lambda shape, strides, dtype: torch.empty_strided(
            shape, strides, dtype=dtype, device=device
        )
    return allocate


class Workspace:
    """What the launches of one call leave to each other. Planning adds slices; each call allocates
    one buffer, which is given back when the call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slices: list[Operand] = []

    def add(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        is_cleared: bool = False,
    ) -> Operand:
        """A new slice, dense; at the beginning of every call its contents are 0 or undefined."""
        added = Operand(name, shape, dtype, self.device, is_cleared=is_cleared)
        self.slices.append(added)
        return added


def starts_of(slices: Sequence[Operand]) -> list[int]:
    """Where slices begin in a buffer, in bytes, and last where it ends."""
    sizes = [max(1, -(-x.numel() * x.itemsize // LINE)) * LINE for x in slices]
    return list(itertools.accumulate(sizes, initial=0))


def tensors_of(slices: Sequence[Operand], device: torch.device) -> dict[str, Tensor]:
    """The slices of a new buffer, by their names; all are cleared, or none. On the CPU each is a
    tensor of its own, so that the interpreter sees what is written past its end.
    """
    if device.type == "cpu" or not slices:
        return {x.name: x.new() for x in slices}
    starts = starts_of(slices)
    make = torch.zeros if slices[0].is_cleared else torch.empty
    buffer = make(starts[-1], dtype=torch.uint8, device=device)
    return {x.name: tensor_at(buffer, start, x) for start, x in zip(starts, slices)}


def tensor_at(buffer: Tensor, start: int, operand: Operand) -> Tensor:
    """One slice of a buffer."""
    memory = buffer[start : start + operand.numel() * operand.itemsize]
    return memory.view(operand.dtype).view(operand.shape)
