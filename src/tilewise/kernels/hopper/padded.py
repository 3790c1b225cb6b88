"""Rows that are no whole number of 16 bytes, such as those of headdim 100: TMA takes no such
stride. They are copied into rows that are padded to a multiple of 8 elements.

Descriptors end at the head dim: TMA reads zeros for what lies behind it, and writes none of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...problem import Extras, Grads, Problem
from ..common import outputs
from ..common.arguments import aligned
from .copy_rows import UNIT, copy_rows

Tensor = torch.Tensor


def is_padded(problem: Problem) -> bool:
    """Whether dense rows of either head dim are no whole number of 16 bytes."""
    return problem.headdim % UNIT != 0 or problem.headdim_v % UNIT != 0


def empty_rows(x: Tensor, *shape: int) -> Tensor:
    """Memory of the dtype and device of x, dense but for the padding of its rows."""
    return x.new_empty(*shape[:-1], padded_width(shape[-1]))[..., : shape[-1]]


def padded_width(columns: int) -> int:
    """The columns of a row that is padded to a whole number of 16 bytes."""
    return -(-columns // UNIT) * UNIT


def in_padded_rows(x: Tensor) -> Tensor:
    """x, or a copy of it where TMA cannot read x."""
    if x.stride(-1) == 1 and aligned(x):
        return x
    return copy_in_padded_rows(x)


def copy_in_padded_rows(x: Tensor) -> Tensor:
    """A copy that TMA can read."""
    copy = empty_rows(x, *x.shape)
    if x.stride(-1) == 1:
        copy_rows(x, copy, padded_width(x.shape[-1]))
        return copy
    return copy.copy_(x)


def empty_out(problem: Problem, q: Tensor) -> tuple[Tensor, Tensor]:
    """`out`, whose rows TMA can write, and `lse`."""
    out, lse = outputs.empty_out(problem, q)
    return (empty_rows(q, *out.shape) if problem.headdim_v % UNIT else out), lse


class PaddedLaunch:
    """A forward that reads copies, and whose output is copied: `out` is dense, as all backends'."""

    def __init__(self, launch: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self.launch = launch

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        padded, lse = self.launch(*map(in_padded_rows, (q, k, v)), extras)
        if padded.is_contiguous():
            return padded, lse
        out = padded.new_empty(padded.shape)
        copy_rows(padded, out, out.shape[-1])
        return out, lse


def with_padded_rows(grads: Grads) -> Grads:
    """Gradients for TMA to write: dK and dV."""
    padded = (x if aligned(x) else empty_rows(x, *x.shape) for x in (grads.dk, grads.dv))
    return Grads(grads.dq, *padded, *grads[3:])


def copy_back(padded: Grads, grads: Grads) -> None:
    """What was written, into the gradients that come back."""
    for written, grad in zip(padded, grads):
        if written is not grad:
            copy_rows(written, grad, grad.shape[-1])
