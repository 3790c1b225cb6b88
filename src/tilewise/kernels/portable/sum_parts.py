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
_BLOCK_M, _BLOCK_N = 4, 256
_PROGRAMS = 528  # four an SM: enough reads of other GPUs in flight

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


@triton.jit(do_not_specialize=["offset", "count", "rows"])
def sum_parts_kernel(
    addresses,
    of_rows,
    total,
    offset,
    columns,
    count,
    rows,
    PART: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows of `total` from `count` blocks of memory at `addresses`: parts of them, (rows, columns),
    lie in each, `offset` bytes in. Of each row `of_rows` has first bits, of which that of block r
    says whether to add its part, and then which row of `total` it is.
    """
    blocks = tl.cdiv(columns, BLOCK_N)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * blocks, PROGRAMS):
        row = tile // blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tile % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
        bits = tl.load(of_rows + 2 * row, mask=row < rows, other=0)
        offsets = row[:, None].to(tl.int64) * columns + column[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], PART)
        for rank in range(count):
            part = (tl.load(addresses + rank) + offset).to(tl.pointer_type(PART))
            if IS_ALIGNED:
                part = tl.multiple_of(part, 16)
            has_part = ((bits >> rank) & 1 != 0)[:, None] & (column < columns)[None, :]
            acc += tl.load(part + offsets, mask=has_part, other=0.0)
        exists = (row < rows)[:, None] & (column < columns)[None, :]
        target = tl.load(of_rows + 2 * row + 1, mask=row < rows, other=0)
        offsets = target[:, None].to(tl.int64) * columns + column[None, :]
        tl.store(total + offsets, acc.to(total.dtype.element_ty), mask=exists)


sums = programs_of(sum_parts_kernel, BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N)


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
        total: Tensor,
    ) -> None:
        """The sums into rows of `total`, which are dense. Parts are in `dtype`, `offset` bytes into
        each of the ranks' blocks; `of_rows`, (rows, 2) in int32, has for each row the bits of those
        that have one, and where it goes.
        """
        if (addresses := [x.data_ptr() for x in blocks]) != self.known:
            self.known = addresses
            self.addresses = torch.tensor(addresses, device=total.device)
        rows, columns = len(of_rows), total[:1].numel()
        is_aligned = columns % 16 == 0 and offset % 16 == 0
        # On a GPU always as many: a launcher is of one grid
        tiles = -(-rows // _BLOCK_M) * -(-columns // _BLOCK_N)
        programs = _PROGRAMS if total.is_cuda else min(_PROGRAMS, tiles)
        looks = (
            *(total.dtype, of_rows.data_ptr() % 16, total.data_ptr() % 16),
            *(columns == 1, columns % 16, offset < 2**31),
        )
        constants = dict(PART=TYPES[dtype], IS_ALIGNED=is_aligned, PROGRAMS=programs)
        program = sums(total.device, programs, compiled_for=looks, **constants)
        program.run((self.addresses, of_rows, total, offset, columns, len(blocks), rows))
