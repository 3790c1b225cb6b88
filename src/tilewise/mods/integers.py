"""Integer arithmetic that is defined for every pair of operands, where torch, and kernels alike,
raise, crash or give what the machine gives: int64, wrapping.

    x // 0 = 0, x % 0 = x, x // -1 = -x, x % -1 = 0    x = (x // d) * d + x % d for every d
    x << y = 0, x >> y = 0 or -1, x's sign             for y < 0 and y > 63
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor
LAST_BIT = 63


def floor_divide(x: Tensor, d: Tensor) -> Tensor:
    """x // d, rounded down."""
    quotient = torch.where(d == 0, 0, x // _safe(d))
    return torch.where(d == -1, -x, quotient)


def remainder(x: Tensor, d: Tensor) -> Tensor:
    """x % d, of d's sign."""
    return torch.where(d == 0, x, x % _safe(d))


def shift_left(x: Tensor, y: Tensor) -> Tensor:
    """x << y."""
    return torch.where(_is_far(y), 0, x << torch.where(_is_far(y), 0, y))


def shift_right(x: Tensor, y: Tensor) -> Tensor:
    """x >> y, which keeps the sign."""
    return x >> torch.where(_is_far(y), LAST_BIT, y)


def whole(x: Tensor) -> Tensor:
    """A float rounded towards zero; the least integer for what is past 64 bits, or NaN."""
    fits = x.abs() < 2.0**63
    return torch.where(fits, torch.where(fits, x, 0).long(), -(2**63))


def _safe(d: Tensor) -> Tensor:
    """The divisor, 1 for 0 and for -1: the least integer by that ends the process."""
    return torch.where((d == 0) | (d == -1), 1, d)


def _is_far(y: Tensor) -> Tensor:
    return (y < 0) | (y > LAST_BIT)
