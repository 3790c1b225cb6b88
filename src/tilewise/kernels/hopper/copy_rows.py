"""Rows copied from some strides to others: as fast as memory allows, where a row is no whole number
of 16 bytes, too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...tile.types import Strided
from ..common.building import first_launch
from ..common.relaunch import class_of, is_watched, relaunch

UNIT = 8  # elements of 16 bits in 16 bytes
ELEMENTS = 8192  # of a program


class Copy(NamedTuple):
    """A copy's constants. Strides count units, so that the compiler knows how many elements it can
    move at once.
    """

    HEADDIM: int
    WIDTH: int  # columns that are written: zeros past HEADDIM
    FROM_UNIT: int
    TO_UNIT: int
    ROWS: int
    BLOCK_D: int


@triton.jit
def copy_rows_kernel(source, target, rows, seqlen, nheads, COPY: tl.constexpr):
    """One block of rows, of all heads of all positions of all batches."""
    row = tl.program_id(0) * COPY.ROWS + tl.arange(0, COPY.ROWS)
    column = tl.arange(0, COPY.BLOCK_D)[None, :]
    read = place_of_rows(source, row, seqlen, nheads) * COPY.FROM_UNIT
    write = place_of_rows(target, row, seqlen, nheads) * COPY.TO_UNIT
    exists = (row < rows)[:, None]
    is_read, is_written = exists & (column < COPY.HEADDIM), exists & (column < COPY.WIDTH)
    x = tl.load(source.ptr + (read[:, None] + column), mask=is_read, other=0.0)
    tl.store(target.ptr + (write[:, None] + column), x, mask=is_written)


@triton.jit
def place_of_rows(x, row, seqlen, nheads):
    """Where rows begin, in units."""
    sequence, head = row // nheads, (row % nheads).to(tl.int64)
    batch, position = (sequence // seqlen).to(tl.int64), (sequence % seqlen).to(tl.int64)
    return batch * x.batch + position * x.row + head * x.head


_compiled: dict[tuple, Any] = {}


def copy_rows(source: torch.Tensor, target: torch.Tensor, width: int) -> None:
    """A (batch, seqlen, nheads, headdim) tensor into another, whose memory holds `width` columns a
    row.
    """
    batch, seqlen, nheads, headdim = source.shape
    units = unit_of(source), unit_of(target)
    block_d = triton.next_power_of_2(width)
    copy = Copy(headdim, width, *units, ELEMENTS // block_d, block_d)
    lengths = batch * seqlen * nheads, seqlen, nheads
    args = in_units(source, units[0]), in_units(target, units[1]), *lengths
    programs = triton.cdiv(lengths[0], copy.ROWS)
    if programs == 0:
        return
    if source.device.type == "cpu":
        from ...emulator.triton.interpreter import interpret

        interpret(copy_rows_kernel)[(programs,)](*args, COPY=copy)
        return
    index = source.device.index
    key = index, copy, *map(class_of, (*args[0], *args[1], *lengths))
    compiled = _compiled.get(key)
    if compiled is None or is_watched() or torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            launched = first_launch(copy_rows_kernel, programs, *args, COPY=copy, num_warps=8)
        _compiled[key] = launched
    else:
        relaunch(compiled, programs, index, *args, copy)


def in_units(x: torch.Tensor, unit: int) -> Strided:
    """A tensor as the kernel takes it."""
    return Strided(x, *(stride // unit for stride in x.stride()[:3]))


def unit_of(x: torch.Tensor) -> int:
    """The elements, up to UNIT, that the strides between rows of x are multiples of."""
    return math.gcd(UNIT, *(stride for n, stride in zip(x.shape[:3], x.stride()) if n > 1))
