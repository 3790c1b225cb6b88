"""Rows that are not multiples of 16 bytes, such as those of headdim 100, which TMA cannot read:
they are copied into rows that are padded with zeros to a multiple of 8 elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton

from ...problem import Problem
from ..common.arguments import aligned
from ..common.program import TorchStep
from ..common.workspace import Workspace
from .copy_rows import UNIT, copy_rows

Tensor = torch.Tensor


def is_padded(problem: Problem) -> bool:
    """Whether dense rows of either head dim are no whole number of 16 bytes."""
    return problem.headdim % UNIT != 0 or problem.headdim_v % UNIT != 0


def padded_width(columns: int) -> int:
    """The columns of a row that is padded to a whole number of 16 bytes."""
    return -(-columns // UNIT) * UNIT


def is_readable(x: Tensor) -> bool:
    """Whether TMA can read the rows of a tensor."""
    return x.stride(-1) == 1 and aligned(x)


def copy_into_padded_rows(*tensors: Tensor) -> None:
    """Copies the first half of the tensors into the others."""
    count = len(tensors) // 2
    pairs = list(zip(tensors[:count], tensors[count:]))
    copy_rows(*((x, copy, copy.shape[-1]) for x, copy in pairs if x.stride(-1) == 1))
    for x, copy in pairs:
        if x.stride(-1) != 1:
            copy[..., : x.shape[-1]] = x
            copy[..., x.shape[-1] :] = 0


class Readable:
    """The operands of a program as TMA can read them, and the steps that copy them to there."""

    def __init__(self, work: Workspace) -> None:
        self.work = work
        self.steps: list[TorchStep] = []

    def copied(self, operands: Sequence[Any], which: Sequence[bool]) -> list[Any]:
        """The operands, with copies in padded rows for some of them, by one launch."""
        pairs = {
            x.name: self.work.add(
                f"{x.name} in padded rows", (*x.shape[:-1], padded_width(x.shape[-1])), x.dtype
            )
            for x, is_copied in zip(operands, which)
            if is_copied
        }
        if pairs:
            names = *pairs, *(x.name for x in pairs.values())
            self.steps.append(TorchStep(copy_into_padded_rows, names))
        return [pairs.get(x.name, x) for x in operands]


def is_flat(problem: Problem, v: Tensor) -> bool:
    """Whether TMA can read v as one head whose rows hold all heads, and should: not where it can
    read heads, nor where it stores O, which then begins at a multiple of 16 bytes.

    Columns of other heads that come along end as columns of O that are never stored. K cannot be
    read like that: they would be multiplied with those of Q, and 0 times what may be NaN is NaN.
    """
    columns, step = v.shape[-1], v.stride(2)
    unit = math.gcd(UNIT, columns)
    if aligned(v) or unit == UNIT or (problem.has_seqused_k and not problem.is_packed):
        return False
    reaches = columns + UNIT - math.gcd(UNIT, step)  # with what it may begin with of another head
    fits = reaches <= max(64, triton.next_power_of_2(columns)) and step > 0 and step % unit == 0
    first_head = v.as_strided((*v.shape[:2], 1, columns), v.stride())
    return fits and v.stride(-1) == 1 and aligned(first_head)


def copy_back(*tensors: Tensor) -> None:
    """What was written in padded rows, the first half of the tensors, into the others."""
    count = len(tensors) // 2
    pairs = zip(tensors[:count], tensors[count:])
    copy_rows(*((rows[..., : x.shape[-1]], x, x.shape[-1]) for rows, x in pairs))
