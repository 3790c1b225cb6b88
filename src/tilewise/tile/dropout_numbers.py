"""The numbers of dropout: its seed and offset, and its probability in steps of 1/256."""

from __future__ import annotations

import numbers
import sys

import torch

from ..errors import ArgumentError

Tensor = torch.Tensor


def draw_rng(device: torch.device | str, generator: torch.Generator | None = None) -> Tensor:
    """A new (seed, offset) for one call: int64[2] on the device, all 128 bits random.

    >>> _ = torch.manual_seed(0)
    >>> first = draw_rng("cpu")
    >>> torch.equal(first, draw_rng("cpu"))
    False
    >>> _ = torch.manual_seed(0)
    >>> torch.equal(first, draw_rng("cpu"))
    True

    It comes from the device's default generator, or the one that is passed, by one of torch's own
    random operators: `torch.manual_seed` and `torch.utils.checkpoint` reach it, a CUDA graph draws
    new words at each replay, and the host never waits.
    """
    halves = torch.randint(
        -(2**31), 2**31, (4,), dtype=torch.int32, device=device, generator=generator
    )
    return halves.view(torch.int64)


def draw_rng_of(q: Tensor) -> Tensor:
    """A new (seed, offset) for a call of q; of a DTensor that of one rank, on all of them."""
    rng = draw_rng(q.device)
    if type(q) is Tensor or not hasattr(q, "device_mesh"):
        return rng
    return sys.modules["torch.distributed.tensor"].distribute_tensor(rng, q.device_mesh)


def check_dropout(p: float) -> float:
    """A dropout probability: a number, at least 0 and below 1."""
    if type(p) in (int, float) and 0 <= p < 1:  # the others take a microsecond
        return float(p)
    is_number = isinstance(p, (numbers.Real, torch.SymFloat)) and not isinstance(p, bool)
    if not is_number or not 0 <= p < 1:
        raise ArgumentError(f"dropout_p={p!r}: it must be a number, at least 0 and below 1")
    return float(p)


def threshold_of(p: float) -> int:
    """The bytes below this are dropped: 256 p, rounded, from 1 to 255; 0 where p is 0.

    >>> [threshold_of(p) for p in (0.0, 0.001, 0.1, 0.5, 0.999)]
    [0, 1, 26, 128, 255]
    """
    return min(255, max(1, round(256 * p))) if p > 0 else 0


def factor_of(threshold: int) -> float:
    """What a kept probability is multiplied by: the mean stays what it was.

    >>> factor_of(threshold_of(0.5))
    2.0
    """
    return 256 / (256 - threshold)
