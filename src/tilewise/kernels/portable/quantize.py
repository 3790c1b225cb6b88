"""Host side of quantising: `quantize` and `transposed_values` of `kernels/cpu/quantize.py`, by
kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from ...tile.types import Strided
from ...tuning.select import architecture
from ..common.arguments import strided
from ..common.quantized import (
    COLUMNS,
    FP8,
    Lengths,
    Quantized,
    Scales,
    columns_of,
    packed_columns,
)
from .decode_launch import SplitPlan, run
from .fp8_launch import has_product, of_head
from .quantize_kernels import (
    Rotation,
    RowBlocks,
    quantize_amax_kernel,
    quantize_cast_kernel,
    quantize_means_kernel,
    quantize_sums_kernel,
    transpose_values_kernel,
)

Tensor = torch.Tensor
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def quantize(
    q: Tensor, k: Tensor, v: Tensor, steps: Any, scales: tuple[Tensor | None, ...], of: Lengths
) -> Quantized:
    """Of 4-dimensional tensors; `steps` has rotate, smooth_k and smooth_v, and `scales` those that
    are given, (batch, nheads_k).
    """
    of_q = row_blocks(q, of.cu_seqlens_q, of.seqused_q)
    of_k = row_blocks(k, of.cu_seqlens_k, of.seqused_k)
    group = q.shape[2] // k.shape[2]
    q8, q_scale, _ = codes_of(q, of_q, scales[0], group, steps.rotate, False, False)
    k8, k_scale, k_mean = codes_of(k, of_k, scales[1], 1, steps.rotate, steps.smooth_k, False)
    of_v = of_k._replace(nheads=v.shape[2])
    v_t, v_scale, v_mean = codes_of(v, of_v, scales[2], 1, False, steps.smooth_v, True)
    return Quantized(q8, k8, v_t, Scales(q_scale, k_scale, v_scale), k_mean, v_mean)


def transposed_values(v: Tensor, seqused_k: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor:
    """V^T, (batch, nheads_k, headdim_v, columns), of e4m3 (batch, seqlen_k, nheads_k, headdim_v):
    0 where no key is in use.
    """
    v = v if v.stride(3) == 1 else v.contiguous()
    blocks = row_blocks(v, cu_seqlens_k, seqused_k)
    v_t = empty_values(v, blocks)
    args = strided(v.view(torch.uint8)), _of_values(v_t.view(torch.uint8)), blocks
    _run(transpose_values_kernel, _programs(v, blocks), args, dict(D=v.shape[3]), v.device)
    return v_t


def codes_of(
    x: Tensor,
    blocks: RowBlocks,
    scale: Tensor | None,
    group: int,
    rotates: bool,
    smooths: bool,
    transposes: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A tensor's codes, or V^T, its scale and its mean."""
    x = x if x.dtype in DTYPES else x.float()
    x = x if x.stride(3) == 1 else x.contiguous()
    headdim, heads_k = x.shape[3], x.shape[2] // group
    mixed = headdim & -headdim if rotates else 0
    rotation = Rotation(headdim, mixed, mixed**-0.5 if mixed else 1.0)
    programs, constants = _programs(x, blocks), dict(ROTATION=rotation)
    count = programs // blocks.nheads if blocks.nheads else 0
    number = dict(device=x.device, dtype=torch.float32)
    mean = of_mean = largest = None
    if smooths:
        sums = torch.empty(count, blocks.nheads, headdim, **number)
        mean = torch.zeros(blocks.sequences, blocks.nheads, headdim, **number)
        of_mean = of_head(mean)
        _run(quantize_sums_kernel, programs, (strided(x), sums, blocks), constants, x.device)
        means, args = blocks.sequences * blocks.nheads, (sums, of_mean, blocks)
        _run(quantize_means_kernel, means, args, dict(D=headdim), x.device)
    if scale is None:
        scale = torch.empty(blocks.sequences, heads_k, **number)
        largest = torch.empty(count, blocks.nheads, device=x.device, dtype=torch.int32)
        args = strided(x), of_mean, largest, blocks
        _run(quantize_amax_kernel, programs, args, constants, x.device)
    out = empty_values(x, blocks) if transposes else torch.zeros_like(x, dtype=torch.uint8)
    out = out.view(FP8) if has_product(architecture(x.device)) else out.view(torch.uint8)
    into = _of_values(out) if transposes else strided(out)
    args = strided(x), of_mean, largest, of_head(scale), into, blocks
    groups = dict(GROUP=group, BLOCK_GROUP=triton.next_power_of_2(group), TRANSPOSED=transposes)
    _run(quantize_cast_kernel, programs, args, constants | groups, x.device)
    return out.view(FP8), scale, mean


def row_blocks(x: Tensor, starts: Tensor | None, used: Tensor | None) -> RowBlocks:
    """The rows of q, k or v, by its cu_seqlens and seqused."""
    starts, used = (None if t is None else t.contiguous() for t in (starts, used))
    sequences = x.shape[0] if starts is None else starts.shape[0] - 1
    return RowBlocks(starts, used, sequences, x.shape[1], x.shape[2])


def empty_values(v: Tensor, blocks: RowBlocks) -> Tensor:
    """V^T without its contents; of no sequences it is 0."""
    columns = columns_of(v.shape[1])
    if blocks.cu_seqlens is not None:
        columns = packed_columns(v.shape[1], blocks.sequences)
    shape, empty = (v.shape[0], *v.shape[2:], columns), torch.empty
    if blocks.sequences == 0:
        empty = torch.zeros
    return empty(shape, device=v.device, dtype=torch.uint8).view(FP8)


def _of_values(v_t: Tensor) -> Strided:
    """V^T as kernels take it: rows are the dims of a head, and as long as there are columns."""
    _, nheads, headdim, columns = v_t.shape
    return Strided(v_t, nheads * headdim * columns, columns, headdim * columns)


def _programs(x: Tensor, blocks: RowBlocks) -> int:
    """One for each block and head."""
    if blocks.cu_seqlens is None:
        return x.shape[0] * max(1, triton.cdiv(x.shape[1], COLUMNS)) * x.shape[2]
    return packed_columns(x.shape[1], blocks.sequences) // COLUMNS * x.shape[2]


def _run(kernel: Any, programs: int, args: tuple, constants: dict, device: torch.device) -> None:
    has_sequences = any(isinstance(x, RowBlocks) and x.sequences for x in args)
    if programs and has_sequences:
        run(SplitPlan(kernel, programs, args, constants, 4, 2), device)
