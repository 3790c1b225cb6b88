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
from ..common.program import Step, TorchStep
from ..common.workspace import Workspace
from .copy_rows import UNIT, launch_of

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


def copies_of(pairs: Sequence[tuple[Any, Any]]) -> list[Step]:
    """The steps that copy operands into others, whose columns past those are 0: rows of 16 bits by
    one launch, others by torch.
    """
    in_rows, steps = [], []
    for x, copy in pairs:
        if x.stride(-1) == copy.stride(-1) == 1 and x.itemsize == 2:
            in_rows.append((x, copy))
        else:
            steps.append(TorchStep(copy_columns, (x.name, copy.name)))
    return [*steps, launch_of(in_rows)] if in_rows else steps


def copy_columns(x: Tensor, copy: Tensor) -> None:
    """Copies a tensor into one of more columns or fewer."""
    columns = min(x.shape[-1], copy.shape[-1])
    copy[..., :columns] = x[..., :columns]
    copy[..., columns:] = 0


class Readable:
    """The operands of a program as TMA can read them, and the steps that copy them to there."""

    def __init__(self, work: Workspace) -> None:
        self.work = work
        self.steps: list[Step] = []

    def copied(self, operands: Sequence[Any], which: Sequence[bool]) -> list[Any]:
        """The operands, with copies in padded rows for some of them."""
        pairs = {
            x.name: self.work.add(
                f"{x.name} in padded rows", (*x.shape[:-1], padded_width(x.shape[-1])), x.dtype
            )
            for x, is_copied in zip(operands, which)
            if is_copied
        }
        self.steps += copies_of([(x, pairs[x.name]) for x in operands if x.name in pairs])
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
