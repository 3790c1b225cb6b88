"""Copies rows between strides at memory bandwidth, also where a row is not a multiple of 16
bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...tile.types import Strided
from ..common.program import Launch, checked

UNIT = 8  # elements of 16 bits in 16 bytes
ELEMENTS_PER_PROGRAM = 8192  # of a program
ARGS, CONSTANTS = ("first", "second", "third"), ("FIRST", "SECOND", "THIRD")


class Copy(NamedTuple):
    """A copy's constants; strides count units, which tell how many elements move at once."""

    HEADDIM: int
    WIDTH: int  # columns that are written: zeros past HEADDIM
    FROM_UNIT: int
    TO_UNIT: int
    ROWS: int
    BLOCK_D: int


class Copied(NamedTuple):
    """What is copied, to where, and by how many programs."""

    source: Strided
    target: Strided
    rows: int
    seqlen: int
    nheads: int
    programs: int


@triton.jit
def copy_rows_kernel(
    first, second, third, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr
):
    """One block of rows of one of the tensors, of which there may be fewer."""
    program = tl.program_id(0)
    if program < first.programs:
        copy_block(first, program, COPY=FIRST)
    if SECOND is not None:
        program -= first.programs
        if (program >= 0) & (program < second.programs):
            copy_block(second, program, COPY=SECOND)
    if THIRD is not None:
        program -= second.programs
        if program >= 0:
            copy_block(third, program, COPY=THIRD)


@triton.jit
def copy_block(copied, block, COPY: tl.constexpr):
    """One block of rows, of all heads of all positions of all batches."""
    source, target, rows, seqlen, nheads, _ = copied
    row = block * COPY.ROWS + tl.arange(0, COPY.ROWS)
    column = tl.arange(0, COPY.BLOCK_D)[None, :]
    source_offset = place_of_rows(source, row, seqlen=seqlen, nheads=nheads) * COPY.FROM_UNIT
    target_offset = place_of_rows(target, row, seqlen=seqlen, nheads=nheads) * COPY.TO_UNIT
    exists = (row < rows)[:, None]
    is_read, is_written = exists & (column < COPY.HEADDIM), exists & (column < COPY.WIDTH)
    x = tl.load(source.ptr + (source_offset[:, None] + column), mask=is_read, other=0.0)
    tl.store(target.ptr + (target_offset[:, None] + column), x, mask=is_written)


@triton.jit
def place_of_rows(x, row, seqlen, nheads):
    """Where rows begin, in units."""
    sequence, head = row // nheads, (row % nheads).to(tl.int64)
    batch, position = (sequence // seqlen).to(tl.int64), (sequence % seqlen).to(tl.int64)
    return batch * x.batch + position * x.row + head * x.head


def launch_of(pairs: Sequence[tuple[Any, Any]]) -> Launch:
    """A launch that copies up to three operands (batch, seqlen, nheads, headdim) into others, whose
    columns past those are 0.
    """
    args: dict[str, Any] = dict.fromkeys(ARGS)
    constants: dict[str, Any] = dict.fromkeys(CONSTANTS)
    programs = 0
    for name, constant, (source, target) in zip(ARGS, CONSTANTS, pairs):
        args[name], constants[constant] = of_copy(source, target)
        programs += args[name].programs
    return checked(Launch(copy_rows_kernel, programs, args, constants, dict(num_warps=8)))


def of_copy(source: Any, target: Any) -> tuple[Copied, Copy]:
    """A copy as the kernel takes it."""
    batch, seqlen, nheads, headdim = source.shape
    width = target.shape[-1]
    from_unit, to_unit = unit_of(source), unit_of(target)
    block_d = triton.next_power_of_2(width)
    constants = Copy(headdim, width, from_unit, to_unit, ELEMENTS_PER_PROGRAM // block_d, block_d)
    rows = batch * seqlen * nheads
    from_rows, to_rows = in_units(source, from_unit), in_units(target, to_unit)
    programs = triton.cdiv(rows, constants.ROWS)
    return Copied(from_rows, to_rows, rows, seqlen, nheads, programs), constants


def in_units(x: Any, unit: int) -> Strided:
    """A tensor as the kernel takes it."""
    batch, row, head = (stride // unit for stride in x.stride()[:3])
    return Strided(x, batch, row=row, head=head)


def unit_of(x: Any) -> int:
    """The elements, up to UNIT, that the strides between rows of x are multiples of."""
    strides = (stride for n, stride in zip(x.shape[:3], x.stride()) if n > 1)
    return functools.reduce(math.gcd, strides, UNIT)
