"""The mean of V over the keys of each sequence and key head, of the 8-bit numbers.

`fp8_mma` keeps O without it where registers do not hold two levels. It need not be exact, for what
is subtracted is added again: a mean of NaN is left out.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ....problem import Extras
from ....tile.bounds import clamp
from ....tile.seqlen import padded_row, rows_of
from ...common.building import first_launch, on_device
from ...common.quantized import COLUMNS, columns_of
from ...common.relaunch import Launched, Launches, distinct_views

Tensor = torch.Tensor
ROWS, BLOCK = tl.constexpr(16), tl.constexpr(256)  # of V^T that a program reads at a time


class Centering(Launches):
    """The means of calls of one signature."""

    def __call__(self, v_t: Tensor, seqlen_k: int, extras: Extras) -> Tensor:
        """(batch or sequences, nheads_k, headdim_v), fp32, of V^T as `Quantized` has it."""
        if v_t.is_cuda:
            return self.launched(v_t, seqlen_k, extras)
        center = empty_center(v_t, extras)
        fill_center(v_t, center, seqlen_k, extras)
        return center

    def launched(self, v_t: Tensor, seqlen_k: int, extras: Extras) -> Tensor:
        """The same by the kernel."""
        center = empty_center(v_t, extras)
        row = v_t, center, extras.cu_seqlens_k, extras.seqused_k
        if not self.again(row):
            views = distinct_views(row)
            self.record([launch_center(*views[:2], seqlen_k, *views[2:])], views, v_t)
        return center


def empty_center(v_t: Tensor, extras: Extras) -> Tensor:
    """Its memory."""
    starts = extras.cu_seqlens_k
    sequences = v_t.shape[0] if starts is None else starts.shape[0] - 1
    return v_t.new_empty(sequences, *v_t.shape[1:3], dtype=torch.float32)


def fill_center(v_t: Tensor, center: Tensor, seqlen_k: int, extras: Extras) -> None:
    """The same in plain torch, for the emulator."""
    starts, used = extras.cu_seqlens_k, extras.seqused_k
    for b in range(center.shape[0]):
        row, first, keys = b, 0, seqlen_k
        if starts is not None:
            row, first = 0, (int(starts[b]) // COLUMNS + b) * COLUMNS
            keys = int(starts[b + 1] - starts[b])
        keys = keys if used is None else min(int(used[b]), keys)
        sums = v_t[row, :, :, first : first + columns_of(keys)].float().sum(-1)
        center[b] = (sums / max(keys, 1)).nan_to_num(0.0)


def launch_center(
    v_t: Any, center: Any, seqlen_k: int, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None
) -> Launched:
    """Launches the kernel."""
    sequences, nheads_k, headdim_v = center.shape
    programs = sequences * nheads_k * triton.cdiv(headdim_v, ROWS.value)
    args = v_t, *v_t.stride()[:3], center, cu_seqlens_k, seqused_k, seqlen_k, nheads_k
    constants = dict(HEADDIM_V=headdim_v, COLUMNS=COLUMNS)
    launched = Launched(None, programs, (*args, *constants.values()))
    if not programs:
        return launched
    with on_device(v_t.device):
        return launched._replace(compiled=first_launch(center_kernel, programs, *args, **constants))


@triton.jit
def center_kernel(
    v_t,
    by_batch,
    by_head,
    by_row,
    center,
    cu_seqlens_k,
    seqused_k,
    seqlen_k,
    nheads_k,
    HEADDIM_V: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Programs are of neighbouring dims, then heads, then sequences."""
    TILES: tl.constexpr = (HEADDIM_V + ROWS - 1) // ROWS
    of_head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    sequence, head = of_head // nheads_k, of_head % nheads_k
    offs_d = tile * ROWS + tl.arange(0, ROWS)
    keys, first, batch = seqlen_k, 0, sequence
    if cu_seqlens_k is not None:
        first_k, keys = rows_of(cu_seqlens_k, sequence, sequence + 1, seqlen_k)
        first, batch = padded_row(first_k, sequence, COLUMNS), 0
    if seqused_k is not None:
        keys = clamp(tl.load(seqused_k + sequence), 0, keys)
    first_row = tl.cast(batch, tl.int64) * by_batch + head.to(tl.int64) * by_head
    rows = v_t + first_row + offs_d.to(tl.int64) * by_row
    exists = (offs_d < HEADDIM_V)[:, None]
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, keys, BLOCK):
        offs_n = start + tl.arange(0, BLOCK)
        at = rows[:, None] + (first + offs_n)[None, :]
        # Keys stand in another order; columns past the end are 0
        is_column = offs_n < tl.cdiv(keys, COLUMNS) * COLUMNS
        sums += tl.load(at, mask=exists & is_column[None, :], other=0.0).to(tl.float32)
    mean = tl.sum(sums, 1) / tl.maximum(keys, 1)
    mean = tl.where(mean == mean, mean, 0.0)
    tl.store(center + of_head * HEADDIM_V + offs_d, mean, mask=offs_d < HEADDIM_V)
