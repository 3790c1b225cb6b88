"""Sums of rows that lie at several places: of the parts that a rank's runs have of the gradient of
a key, or of those of all ranks, once they are pulled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .launches import programs_of

Tensor = torch.Tensor
BLOCK_M, BLOCK_N = tl.constexpr(4), tl.constexpr(256)
_PROGRAMS = 2112  # 16 an SM: of 528, an H200 reads 2.6 to 2.9 TB/s in place of 3.4


@triton.jit(do_not_specialize=["rows"])
def sum_runs_kernel(
    parts,
    places,
    targets,
    totals,
    columns,
    steps,
    rows,
    TENSORS: tl.constexpr,
    RUNS: tl.constexpr,
    SCATTERED: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """For each of TENSORS, rows of its total, a step apart, each from the rows of its parts at RUNS
    `places`, in their order, of which those below 0 are none; rounded once. SCATTERED: those that
    `targets` names, not all of them.
    """
    for i in tl.static_range(TENSORS):
        blocks = tl.cdiv(columns[i], BLOCK_N)
        for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * blocks, PROGRAMS):
            row = tile // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
            column = tile % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
            in_row = (column < columns[i])[None, :]
            acc = tl.zeros([BLOCK_M, BLOCK_N], parts[i].dtype.element_ty)
            for run in tl.static_range(RUNS):
                place = tl.load(places + row * RUNS + run, mask=row < rows, other=-1)
                offs = place[:, None].to(tl.int64) * columns[i] + column[None, :]
                acc += tl.load(parts[i] + offs, mask=(place >= 0)[:, None] & in_row, other=0.0)
            target = row
            if SCATTERED:
                target = tl.load(targets + row, mask=row < rows, other=0)
            offs = target[:, None].to(tl.int64) * steps[i] + column[None, :]
            x = acc.to(totals[i].dtype.element_ty)
            tl.store(totals[i] + offs, x, mask=(row < rows)[:, None] & in_row)


LISTS = dict.fromkeys(("parts", "totals", "columns", "steps"), "TENSORS")
sums = programs_of(sum_runs_kernel, LISTS)


def add_runs(
    parts: Sequence[Tensor], places: Tensor, targets: Tensor | None, totals: Sequence[Tensor]
) -> None:
    """The sums of each tensor's parts into the rows of its total that `targets` names, or into all;
    each row is dense, as all parts are. `places` (rows, runs) and `targets` are int32.
    """
    rows, runs = places.shape
    columns = [x.shape[1:].numel() for x in totals]
    if not rows or not any(columns):
        return
    steps = [x.stride(0) for x in totals]
    programs = _PROGRAMS if places.is_cuda else min(4, rows)
    tensors = *parts, places, places if targets is None else targets, *totals
    looks = (
        *[(x.dtype, x.data_ptr() % 16) for x in tensors],
        *[(x == 1, x % 16) for x in (*columns, *steps)],
    )
    constants = dict(TENSORS=len(parts), RUNS=runs, SCATTERED=targets is not None)
    program = sums(places.device, programs, compiled_for=looks, PROGRAMS=programs, **constants)
    program.run((*tensors, *columns, *steps, rows))
