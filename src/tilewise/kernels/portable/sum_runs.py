"""Sums of rows that lie at several places: of the parts that a rank's runs have of the gradient of
a key, and of those that came from other ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launches import programs_of

Tensor = torch.Tensor
BLOCK_M, BLOCK_N = tl.constexpr(4), tl.constexpr(256)
_PROGRAMS = 528  # four an SM


@triton.jit(do_not_specialize=["rows"])
def sum_runs_kernel(
    parts,
    received,
    places,
    targets,
    total,
    columns,
    step,
    rows,
    BEFORE: tl.constexpr,
    RUNS: tl.constexpr,
    AFTER: tl.constexpr,
    SCATTERED: tl.constexpr,
):
    """Rows of `total`, `step` apart, each from the rows of `parts` at its RUNS `places`, in their
    order, of which those below 0 are none; rounded once. Places BEFORE and AFTER those are of rows
    that were `received`: to them the sum of this rank's parts is added as one. SCATTERED: those
    that `targets` names, not all of them.
    """
    PLACES: tl.constexpr = BEFORE + RUNS + AFTER
    blocks = tl.cdiv(columns, BLOCK_N)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * blocks, tl.num_programs(0)):
        row = tile // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tile % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        in_row = (column < columns)[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], parts.dtype.element_ty)
        mine = tl.zeros([BLOCK_M, BLOCK_N], parts.dtype.element_ty)
        place = places + row * PLACES
        for i in tl.static_range(BEFORE):
            acc = add_rows(acc, received, place + i, row < rows, columns, column)
        for i in tl.static_range(BEFORE, BEFORE + RUNS):
            mine = add_rows(mine, parts, place + i, row < rows, columns, column)
        acc += mine
        for i in tl.static_range(BEFORE + RUNS, PLACES):
            acc = add_rows(acc, received, place + i, row < rows, columns, column)
        target = row
        if SCATTERED:
            target = tl.load(targets + row, mask=row < rows, other=0)
        offsets = target[:, None].to(tl.int64) * step + column[None, :]
        tl.store(
            total + offsets, acc.to(total.dtype.element_ty), mask=(row < rows)[:, None] & in_row
        )


@triton.jit
def add_rows(acc, source, place, exists, columns, column):
    """Adds rows of `source` at the places that lie at `place`, none where one is below 0."""
    place = tl.load(place, mask=exists, other=-1)
    offsets = place[:, None].to(tl.int64) * columns + column[None, :]
    has_part = (place >= 0)[:, None] & (column < columns)[None, :]
    return acc + tl.load(source + offsets, mask=has_part, other=0.0)


sums = programs_of(sum_runs_kernel)


def add_runs(
    parts: Tensor,
    places: Tensor,
    targets: Tensor | None,
    total: Tensor,
    *,
    received: Tensor | None = None,
    before: int = 0,
    after: int = 0,
) -> None:
    """The sums into the rows of `total` that `targets` names, or into all; each row is dense, as
    all of `parts` and of `received` is. `places` (rows, runs) and `targets` are int32; the first
    and the last of a row, so many, are of rows that were received.
    """
    rows, count = places.shape
    if not rows or not total.numel():
        return
    columns, step = total[:1].numel(), total.stride(0)
    tiles = -(-rows // BLOCK_M.value) * -(-columns // BLOCK_N.value)
    programs = _PROGRAMS if total.is_cuda else min(4, tiles)
    received = parts if received is None else received
    tensors = parts, received, places, places if targets is None else targets, total
    looks = (
        *(parts.dtype, total.dtype, *[x.data_ptr() % 16 for x in tensors]),
        *(columns == 1, columns % 16, step == 1, step % 16),
    )
    runs = count - before - after
    constants = dict(BEFORE=before, RUNS=runs, AFTER=after, SCATTERED=targets is not None)
    program = sums(total.device, programs, compiled_for=looks, **constants)
    program.run((*tensors, columns, step, rows))
