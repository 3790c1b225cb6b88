"""Sums of rows that lie at several places: of the parts that a rank's runs have of the gradient of
a key, or of those of all ranks, once they are pulled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launches import programs_of

Tensor = torch.Tensor
_BLOCK_M, _BLOCK_N = 4, 256
_PROGRAMS = 2112  # 16 an SM: of 528, an H200 reads 2.6 to 2.9 TB/s in place of 3.4


@triton.jit(do_not_specialize=["rows"])
def sum_runs_kernel(
    parts,
    places,
    targets,
    total,
    columns,
    step,
    rows,
    RUNS: tl.constexpr,
    SCATTERED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows of `total`, `step` apart, each from the rows of `parts` at its RUNS `places`, in their
    order, of which those below 0 are none; rounded once. SCATTERED: those that `targets` names, not
    all of them.
    """
    blocks = tl.cdiv(columns, BLOCK_N)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * blocks, PROGRAMS):
        row = tile // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tile % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        in_row = (column < columns)[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], parts.dtype.element_ty)
        for run in tl.static_range(RUNS):
            place = tl.load(places + row * RUNS + run, mask=row < rows, other=-1)
            offsets = place[:, None].to(tl.int64) * columns + column[None, :]
            acc += tl.load(parts + offsets, mask=(place >= 0)[:, None] & in_row, other=0.0)
        target = row
        if SCATTERED:
            target = tl.load(targets + row, mask=row < rows, other=0)
        offsets = target[:, None].to(tl.int64) * step + column[None, :]
        tl.store(
            total + offsets, acc.to(total.dtype.element_ty), mask=(row < rows)[:, None] & in_row
        )


sums = programs_of(sum_runs_kernel, BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N)


def add_runs(parts: Tensor, places: Tensor, targets: Tensor | None, total: Tensor) -> None:
    """The sums into the rows of `total` that `targets` names, or into all; each row is dense, as
    all of `parts` is. `places` (rows, runs) and `targets` are int32.
    """
    rows, runs = places.shape
    if not rows or not total.numel():
        return
    columns, step = total[:1].numel(), total.stride(0)
    tiles = -(-rows // _BLOCK_M) * -(-columns // _BLOCK_N)
    programs = _PROGRAMS if total.is_cuda else min(4, tiles)
    tensors = parts, places, places if targets is None else targets, total
    looks = (
        *(parts.dtype, total.dtype, *[x.data_ptr() % 16 for x in tensors]),
        *(columns == 1, columns % 16, step == 1, step % 16),
    )
    constants = dict(RUNS=runs, SCATTERED=targets is not None, PROGRAMS=programs)
    program = sums(total.device, programs, compiled_for=looks, **constants)
    program.run((*tensors, columns, step, rows))
