"""The rotation of channels before they are rounded to 8 bits: q k^T stays as it is, and an outlier
of one channel is spread over all of them.

FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608), section 3.3, after QuIP (Chee et al. 2023,
arXiv 2307.13304).
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def signs(headdim: int, device: torch.device) -> Tensor:
    """1 or -1 of each channel, Rudin and Shapiro's: minus where an odd number of the pairs of
    adjacent bits of its index are both 1. What all channels share is spread evenly by a Hadamard
    transform of it, not gathered in the first.
    """
    d = torch.arange(headdim, device=device)
    d = d & (d >> 1)
    for shift in (8, 4, 2, 1):
        d = d ^ (d >> shift)
    return 1.0 - 2.0 * (d & 1)


def block_of(headdim: int) -> int:
    """The channels that are mixed: the largest power of two that divides headdim."""
    return headdim & -headdim


def hadamard(x: Tensor) -> Tensor:
    """The transform of the last dimension in blocks, orthogonal and its own inverse."""
    block, width = block_of(x.shape[-1]), 1
    while width < block:
        even, odd = x.unflatten(-1, (-1, 2, width)).unbind(-2)
        x = torch.stack((even + odd, even - odd), -2).flatten(-3)
        width *= 2
    return x * block**-0.5


def rotate(x: Tensor) -> Tensor:
    """Sign flip, then Hadamard."""
    return hadamard(x * signs(x.shape[-1], x.device))


def rotate_back(x: Tensor) -> Tensor:
    """The inverse of `rotate`."""
    return hadamard(x) * signs(x.shape[-1], x.device)
