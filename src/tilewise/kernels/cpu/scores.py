"""What becomes of a scaled score before functions, ALiBi, a bias and masks."""

from __future__ import annotations

import torch

from ...problem import Scalars

Tensor = torch.Tensor


def cap(s: Tensor, scalars: Scalars, factors: list[Tensor] | None = None) -> None:
    """softcap * tanh(s / softcap) in place; `factors` gets the derivative."""
    if scalars.softcap:
        s.div_(scalars.softcap).tanh_()
        if factors is not None:
            factors.append(1 - s * s)
        s.mul_(scalars.softcap)
