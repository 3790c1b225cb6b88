"""Where a tensor lies: at an address and with strides that are multiples of so many bytes and of no
more, and with values that torch has yet to negate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor
UNITS = (2, 4, 8, 16)  # bytes


def lying(x: Tensor, address: int, steps: Sequence[int]) -> Tensor:
    """x at an address and with strides of all dimensions but the last that are multiples of these
    bytes, and, below 16, of no larger power of two; NaN, or any bits, around it.
    """
    size = x.itemsize
    strides, extent = [1], x.shape[-1] if x.dim() else 1
    for n, step in zip(x.shape[-2::-1], steps[::-1]):
        unit = max(step // size, 1)
        stride = -(-extent // unit) * unit
        if unit * size < UNITS[-1] and stride % (2 * unit) == 0:
            stride += unit
        strides.insert(0, stride)
        extent = stride * n
    first = max(address // size, 1) if address < UNITS[-1] else 0
    count = (first + extent) * size + 64
    memory = torch.full((count,), 0xFF, dtype=torch.uint8, device=x.device).view(x.dtype)
    found = memory.as_strided(x.shape, strides[: x.dim()], first)
    _bits(found).copy_(_bits(x))
    return found


def negated(x: Tensor, address: int = 0) -> Tensor:
    """x by its opposites in memory, where torch knows that they are."""
    opposite = -x
    if address:
        opposite = lying(opposite, address, (address,) * (x.dim() - 1))
    return torch._neg_view(opposite)


def _bits(x: Tensor) -> Tensor:
    """Eight bits as integers, which torch can copy on any device."""
    return x.view(torch.uint8) if x.itemsize == 1 and x.dim() else x
