"""The mean of V over the keys of each sequence and key head, of the 8-bit numbers.

`fp8_mma` keeps O without it where registers do not hold two levels. It need not be exact, for what
is subtracted is added again: a mean of NaN is left out.
"""

import torch
import triton
import triton.language as tl

from ....problem import Extras
from ....tile.bounds import clamp
from ....tile.seqlen import padded_row, rows_of
from ...common.building import on_device
from ...common.quantized import COLUMNS, columns_of

Tensor = torch.Tensor
ROWS, BLOCK = 16, 256  # of V^T that a program reads at a time


def center_of(v_t: Tensor, seqlen_k: int, extras: Extras) -> Tensor:
    """(batch or sequences, nheads_k, headdim_v), fp32, of V^T as `Quantized` has it."""
    batch, nheads_k, headdim_v, _ = v_t.shape
    starts, used = extras.cu_seqlens_k, extras.seqused_k
    sequences = batch if starts is None else starts.shape[0] - 1
    center = v_t.new_empty(sequences, nheads_k, headdim_v, dtype=torch.float32)
    if v_t.is_cuda:
        launch_center(v_t, center, seqlen_k, extras)
        return center
    for b in range(sequences):  # in the emulator
        row, first, keys = b, 0, seqlen_k
        if starts is not None:
            row, first = 0, (int(starts[b]) // COLUMNS + b) * COLUMNS
            keys = int(starts[b + 1] - starts[b])
        keys = keys if used is None else min(int(used[b]), keys)
        sums = v_t[row, :, :, first : first + columns_of(keys)].float().sum(-1)
        center[b] = (sums / max(keys, 1)).nan_to_num(0.0)
    return center


def launch_center(v_t: Tensor, center: Tensor, seqlen_k: int, extras: Extras) -> None:
    """Launches the kernel."""
    sequences, nheads_k, headdim_v = center.shape
    lengths = extras.cu_seqlens_k, extras.seqused_k, seqlen_k
    grid = sequences, nheads_k, triton.cdiv(headdim_v, ROWS)
    constants = dict(ROWS=ROWS, BLOCK=BLOCK, COLUMNS=COLUMNS)
    with on_device(v_t.device):
        center_kernel[grid](v_t, *v_t.stride()[:3], center, *lengths, headdim_v, **constants)


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
    headdim_v,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    offs_d = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    keys, first, batch = seqlen_k, 0, sequence
    if cu_seqlens_k is not None:
        first_k, keys = rows_of(cu_seqlens_k, sequence, sequence + 1, seqlen_k)
        first, batch = padded_row(first_k, sequence, COLUMNS), 0
    if seqused_k is not None:
        keys = clamp(tl.load(seqused_k + sequence), 0, keys)
    of_head = tl.cast(batch, tl.int64) * by_batch + head.to(tl.int64) * by_head
    rows = v_t + of_head + offs_d.to(tl.int64) * by_row
    exists = (offs_d < headdim_v)[:, None]
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, keys, BLOCK):
        offs_n = start + tl.arange(0, BLOCK)
        at = rows[:, None] + (first + offs_n)[None, :]
        # Keys stand in another order; columns past the end are 0
        is_column = offs_n < tl.cdiv(keys, COLUMNS) * COLUMNS
        sums += tl.load(at, mask=exists & is_column[None, :], other=0.0).to(tl.float32)
    mean = tl.sum(sums, 1) / tl.maximum(keys, 1)
    mean = tl.where(mean == mean, mean, 0.0)
    at = (sequence * tl.num_programs(1) + head) * headdim_v + offs_d
    tl.store(center + at, mean, mask=offs_d < headdim_v)
