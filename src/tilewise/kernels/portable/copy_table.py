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
from ..common.row_table import BLOCK_M, BLOCK_N, Table
from .launches import programs_of
from .signals import barrier_kernel

Tensor = torch.Tensor
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
        blocks = tl.cdiv(width, BLOCK_N)
        place = tile - before
        row = place // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        column = place % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
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


@triton.jit(do_not_specialize=["tiles", "number", "fingerprint", "rank", "ranks", "limit"])
def publish_kernel(
    table,
    sources,
    targets,
    tiles,
    pads,
    words,
    report,
    number,
    fingerprint,
    rank,
    ranks,
    limit,
    SOURCES: tl.constexpr,
    TARGETS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TIMED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The copies of a table, and the barrier of ranks by the last program that has copied."""
    copy_table_kernel(table, sources, targets, tiles, SOURCES, TARGETS, PROGRAMS, BLOCK_M, BLOCK_N)
    tl.debug_barrier()  # all threads have stored
    if tl.atomic_add(words + _COPIED, 1, sem="acq_rel") == PROGRAMS - 1:
        tl.store(words + _COPIED, 0)
        barrier_kernel(
            pads, words, report, number, fingerprint, rank, ranks, limit, True, TIMED, _THREADS
        )


LISTS = dict(sources="SOURCES", targets="TARGETS")
copies, publications = (
    programs_of(kernel, LISTS, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
    for kernel in (copy_table_kernel, publish_kernel)
)


def copy_table(
    table: Table,
    sources: Sequence[int],
    targets: Sequence[int],
    device: torch.device,
    barrier: tuple[Any, ...] = (),
    **options: Any,
) -> None:
    """The copies of a table between tensors at these addresses; then a barrier, if there is one."""
    entries = table.at(device)
    programs = _PROGRAMS if device.type == "cuda" else min(4, table.tiles)
    options |= dict(SOURCES=len(sources), TARGETS=len(targets), PROGRAMS=programs)
    program = (publications if barrier else copies)(device, programs, **options)
    program.run((entries, *sources, *targets, table.tiles, *barrier))
