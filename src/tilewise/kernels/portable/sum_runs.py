"""Sums of rows that lie at several places: of the parts that a rank's runs have of the gradient of
a key, or of those of all ranks, once they are pulled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launches import Launches

Tensor = torch.Tensor
_BLOCK_M, _BLOCK_N = 4, 256
_PROGRAMS = 528  # four an SM


@triton.jit(do_not_specialize=["rows"])
def sum_runs_kernel(
    parts,
    places,
    total,
    columns,
    step,
    rows,
    RUNS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Each row of `total`, `step` apart, from the rows of `parts` at its RUNS `places`, in their
    order, of which those below 0 are none; rounded once.
    """
    blocks = tl.cdiv(columns, BLOCK_N)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * blocks, PROGRAMS):
        row = tile // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tile % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        in_row = (column < columns)[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], parts.dtype.element_ty)
        for run in tl.static_range(RUNS):
            place = tl.load(places + row * RUNS + run, mask=row < rows, other=-1)
            at = place[:, None].to(tl.int64) * columns + column[None, :]
            acc += tl.load(parts + at, mask=(place >= 0)[:, None] & in_row, other=0.0)
        at = row[:, None].to(tl.int64) * step + column[None, :]
        tl.store(total + at, acc.to(total.dtype.element_ty), mask=(row < rows)[:, None] & in_row)


def add_runs(launch: Launches, parts: Tensor, places: Tensor, total: Tensor) -> None:
    """The sums into `total`, each of whose rows is dense, as all of `parts` is; `places` (rows,
    runs) are int32.
    """
    if not total.numel():
        return
    rows, runs = places.shape
    columns, step = total[:1].numel(), total.stride(0)
    tiles = -(-rows // _BLOCK_M) * -(-columns // _BLOCK_N)
    programs = _PROGRAMS if total.is_cuda else min(4, tiles)
    constants = dict(RUNS=runs, PROGRAMS=programs, BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N)
    alignment = parts.data_ptr() % 16, places.data_ptr() % 16, total.data_ptr() % 16
    key = parts.dtype, total.dtype, runs, *alignment, columns == 1, columns % 16
    key = *key, step == 1, step % 16
    launch(sum_runs_kernel, programs, (parts, places, total), (columns, step, rows), constants, key)
