"""Copies of rows of bytes between strided tensors of one GPU, as many as a call has in one launch:
each copy that torch would launch by itself costs the host more than the GPU.

Ranks that meet once they have copied do so in the same launch, each by its last program.

Tensors are addresses. A table, made once for a call's shapes, has where rows begin in them, how far
they are apart, and how many there are, in units of 16 bytes, which a thread moves at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..common.device_words import COPIED
from ..common.lengths import for_all_lengths
from ..common.row_table import BLOCK_M, BLOCK_N, Table
from .launches import programs_of
from .signals import Meeting, barrier_kernel

Tensor = torch.Tensor
_BLOCK_M, _BLOCK_N = tl.constexpr(BLOCK_M), tl.constexpr(BLOCK_N)
_FIELDS, _COPIED = tl.constexpr(9), tl.constexpr(COPIED)
_THREADS = tl.constexpr(128)  # of a program: one for each rank, where ranks meet
_PROGRAMS = 528  # four an SM


@triton.jit(do_not_specialize=["tiles"])
def copy_table_kernel(
    table,
    sources,
    targets,
    tiles,
    SOURCES: tl.constexpr,
    TARGETS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Each program takes every PROGRAMS-th tile. An entry of the table ends with how many tiles
    there are up to its last.
    """
    entry = table
    before = tl.zeros([], tl.int64)
    for tile in range(tl.program_id(0), tiles, PROGRAMS):
        while tl.load(entry + 8) <= tile:
            before = tl.load(entry + 8)
            entry += _FIELDS
        rows, width = tl.load(entry + 6), tl.load(entry + 7) * 4
        blocks = tl.cdiv(width, _BLOCK_N)
        place = tile - before
        row = place // blocks * _BLOCK_M + tl.arange(0, _BLOCK_M)
        column = place % blocks * _BLOCK_N + tl.arange(0, _BLOCK_N)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        source = words_at(tl.load(entry), tl.load(entry + 1), sources, SOURCES)
        target = words_at(tl.load(entry + 3), tl.load(entry + 4), targets, TARGETS)
        offs = row[:, None] * (tl.load(entry + 2) * 4) + column[None, :]
        x = tl.load(source + offs, mask=mask)
        offs = row[:, None] * (tl.load(entry + 5) * 4) + column[None, :]
        tl.store(target + offs, x, mask=mask)


@triton.jit
def words_at(number, units, addresses, COUNT: tl.constexpr):
    """Words of 4 bytes of one of COUNT tensors, from a unit on."""
    first = tl.cast(addresses[0], tl.int64)
    for i in tl.static_range(1, COUNT):
        first = tl.where(number == i, addresses[i], first)
    return tl.multiple_of((first + units * 16).to(tl.pointer_type(tl.int32)), 16)


@for_all_lengths(["meeting"])
@triton.jit(do_not_specialize=["tiles"])
def publish_kernel(
    table,
    sources,
    targets,
    tiles,
    meeting,
    SOURCES: tl.constexpr,
    TARGETS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TIMED: tl.constexpr,
):
    """The copies of a table, and the barrier of ranks by the last program that has copied."""
    copy_table_kernel(table, sources, targets, tiles, SOURCES, TARGETS, PROGRAMS)
    tl.debug_barrier()  # all threads have stored
    if tl.atomic_add(meeting.device_words + _COPIED, 1, sem="acq_rel") == PROGRAMS - 1:
        tl.store(meeting.device_words + _COPIED, 0)
        barrier_kernel(meeting, True, TIMED, _THREADS)


LISTS: dict[str, Any] = dict(sources="SOURCES", targets="TARGETS")
copies = programs_of(copy_table_kernel, LISTS)
publications = programs_of(publish_kernel, LISTS | dict(meeting=Meeting))


def copy_table(
    table: Table,
    sources: Sequence[int],
    targets: Sequence[int],
    device: torch.device,
    meeting: tuple[Any, ...] = (),
    **options: Any,
) -> None:
    """The copies of a table between tensors at these addresses, and behind them a `Meeting`."""
    entries = table.at(device)
    programs = _PROGRAMS if device.type == "cuda" else min(4, table.tiles)
    options |= dict(SOURCES=len(sources), TARGETS=len(targets), PROGRAMS=programs)
    program = (publications if meeting else copies)(device, programs, **options)
    program.run((entries, *sources, *targets, table.tiles, *meeting))
