"""The sum of what all GPUs of a group have published, read where it lies: each number is read once
of every GPU that has a part of it, added in the order of the ranks, and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .launches import programs_of

Tensor = torch.Tensor
BLOCK_M, BLOCK_N = tl.constexpr(4), tl.constexpr(256)
_PROGRAMS = 528  # four an SM: enough reads of other GPUs in flight

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit(do_not_specialize=["offset", "count", "rows"])
def sum_parts_kernel(
    addresses,
    of_rows,
    totals,
    offset,
    columns,
    pitch,
    count,
    rows,
    TENSORS: tl.constexpr,
    PART: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Rows of TENSORS totals from `count` blocks of memory at `addresses`: parts of them lie in
    each, `offset` bytes in, a row's columns of all tensors side by side, `pitch` of them. Of each
    row `of_rows` has first bits, of which that of block r says whether to add its part, and then
    which row of the totals it is.
    """
    before = 0  # columns of the tensors before
    for i in tl.static_range(TENSORS):
        blocks = tl.cdiv(columns[i], BLOCK_N)
        for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * blocks, PROGRAMS):
            row = tile // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
            column = tile % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
            bits = tl.load(of_rows + 2 * row, mask=row < rows, other=0)
            offs = row[:, None].to(tl.int64) * pitch + before + column[None, :]
            in_row = (column < columns[i])[None, :]
            acc = tl.zeros([BLOCK_M, BLOCK_N], PART)
            for rank in range(count):
                part = (tl.load(addresses + rank) + offset).to(tl.pointer_type(PART))
                if IS_ALIGNED:
                    part = tl.multiple_of(part, 16)
                has_part = ((bits >> rank) & 1 != 0)[:, None] & in_row
                acc += tl.load(part + offs, mask=has_part, other=0.0)
            target = tl.load(of_rows + 2 * row + 1, mask=row < rows, other=0)
            offs = target[:, None].to(tl.int64) * columns[i] + column[None, :]
            x = acc.to(totals[i].dtype.element_ty)
            tl.store(totals[i] + offs, x, mask=(row < rows)[:, None] & in_row)
        before += columns[i]


LISTS = dict(totals="TENSORS", columns="TENSORS")
sums = programs_of(sum_parts_kernel, LISTS)


class PartSums:
    """The sums of a group on one device."""

    def __init__(self) -> None:
        self.known: list[int] = []  # of blocks, which it does not keep
        self.addresses = torch.empty(0)

    def add(
        self,
        blocks: Sequence[Tensor],
        offset: int,
        dtype: torch.dtype,
        of_rows: Tensor,
        totals: Sequence[Tensor],
    ) -> None:
        """The sums into rows of the totals, which are dense. Parts are in `dtype`, `offset` bytes
        into each of the ranks' blocks; `of_rows`, (rows, 2) in int32, has for each row the bits of
        those that have one, and where it goes.
        """
        if (addresses := [x.data_ptr() for x in blocks]) != self.known:
            self.known = addresses
            self.addresses = torch.tensor(addresses, device=of_rows.device)
        rows, columns = len(of_rows), [x.shape[1:].numel() for x in totals]
        is_aligned = not any(x % 16 for x in (offset, *columns))
        # On a GPU always as many: a launcher is of one grid
        programs = _PROGRAMS if of_rows.is_cuda else min(4, rows)
        pitch = sum(columns)
        looks = (
            *[(x.dtype, x.data_ptr() % 16) for x in (of_rows, *totals)],
            *[(x == 1, x % 16) for x in (*columns, pitch)],
            offset < 2**31,
        )
        constants = dict(
            TENSORS=len(columns), PART=TYPES[dtype], IS_ALIGNED=is_aligned, PROGRAMS=programs
        )
        program = sums(of_rows.device, programs, compiled_for=looks, **constants)
        numbers = offset, *columns, pitch, len(blocks), rows
        program.run((self.addresses, of_rows, *totals, *numbers))
