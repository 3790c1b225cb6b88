"""Host side of quantising: `quantize` and `transposed_values` of `kernels/cpu/quantize.py`, by
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from ...tile.rotary import Rotary
from ...tile.types import Strided
from ..common.arguments import strided
from ..common.quantized import FP8, Lengths, Quantized, Scales, empty_values
from ..common.relaunch import Launches, addresses_of, distinct_views
from .decode_launch import SplitPlan, run
from .fp8_launch import of_head
from .hadamard import Rotation, tiles_at_once
from .quantize_kernels import quantize_cast_kernel, quantize_loss_kernel, transpose_values_kernel
from .quantize_memory import (
    Given,
    Memory,
    Room,
    Side,
    addresses_in,
    count_of,
    is_sampled,
    make,
    memory_in,
    room_of,
    tensors_of,
)
from .quantize_rows import WARPS, RowBlocks, Tables, chunks_of
from .quantize_statistics import (
    SHARE,
    quantize_amax_kernel,
    quantize_means_kernel,
    quantize_statistics_kernel,
)

Tensor = torch.Tensor
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDE, STAGES = 8, 1


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Any,
    scales: Given,
    of: Lengths,
    rotary: Rotary | None = None,
) -> Quantized:
    """Of 4-dimensional tensors; `steps` has rotate, smooth_k and smooth_v, and `scales` those that
    are given, (batch, nheads_k).
    """
    return prepare_quantize(steps)(q, k, v, scales, of, rotary)


def transposed_values(v: Tensor, seqused_k: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor:
    """V^T, (batch, nheads_k, headdim_v, columns), of e4m3 (batch, seqlen_k, nheads_k, headdim_v):
    0 where no key is in use.
    """
    return prepare_transposed()(v, seqused_k, cu_seqlens_k)


class Quantizing(Launches):
    """`quantize` of one signature."""

    def __init__(self, steps: Any) -> None:
        super().__init__()
        self.steps = steps
        self.room: Room | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, scales: Given, of: Lengths, rotary: Rotary | None
    ) -> Quantized:
        starts = of.cu_seqlens_q, of.cu_seqlens_k, of.cu_seqlens_k
        room = self.room
        if room is None:
            sides = sides_of(q, k, self.steps)
            room = self.room = room_of((q, k, v), sides, starts, scales)
        made = make(room, (q, k, v), starts)
        tables = (None, None) if rotary is None else rotary[:2]
        read = q, k, v, *scales, *of, *tables
        if not self.again_at(addresses_of(read) + addresses_in(room, made)):
            sides, memory = sides_of(q, k, self.steps), memory_in(room, made)
            written = [x for one in memory for x in tensors_of(one)]
            views = distinct_views(read)
            inputs, given, lengths = views[:3], views[3:6], Lengths(*views[6:10])
            turns = None if rotary is None else rotary._replace(cos=views[10], sin=views[11])
            plans = plans_of(inputs, sides, given, lengths, turns, memory)
            self.record([run(plan, q.device) for plan in plans], (*views, *written), q)
        q8, k8, v_t = (x if x.dtype == FP8 else x.view(FP8) for x in made.outs)
        found = Scales(*(x if one is None else one for x, one in zip(made.scales, scales)))
        drift = made.words[0] if room.drifts and made.words is not None else None
        return Quantized(q8, k8, v_t, found, *made.means[1:], drift)


class Transposing(Launches):
    """`transposed_values` of one signature."""

    def __call__(self, v: Tensor, seqused_k: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor:
        v_t = empty_values(v, cu_seqlens_k)
        if not self.again((v, seqused_k, cu_seqlens_k, v_t)):
            views = distinct_views((v.view(torch.uint8), seqused_k, cu_seqlens_k))
            launched = [run(plan, v.device) for plan in transposing(*views, v_t)]
            self.record(launched, (*views, v_t), v)
        return v_t.view(FP8)


prepare_quantize, prepare_transposed = Quantizing, Transposing


def sides_of(q: Tensor, k: Tensor, steps: Any) -> tuple[Side, Side, Side]:
    """Of q, k and v."""
    return (
        Side(q.shape[2] // k.shape[2], steps.rotate, False, False),
        Side(1, steps.rotate, steps.smooth_k, False),
        Side(1, False, steps.smooth_v, True),
    )


def plans_of(
    tensors: Sequence[Any],
    sides: Sequence[Side],
    scales: Given,
    of: Lengths,
    rotary: Rotary | None,
    memory: Sequence[Memory],
) -> list[SplitPlan]:
    """The launches of a call."""
    q, k, v = tensors
    of_q = row_blocks(q, of.cu_seqlens_q, of.seqused_q)
    of_k = row_blocks(k, of.cu_seqlens_k, of.seqused_k)
    blocks = of_q, of_k, of_k._replace(nheads=v.shape[2])
    tables = tables_of(rotary, of_k)
    each = zip(tensors, sides, blocks, (tables, tables, None), scales, memory)
    return [plan for one in each for plan in plans_of_one(*one)]


def plans_of_one(
    x: Tensor,
    side: Side,
    blocks: RowBlocks,
    tables: tuple[Tables, int, bool] | None,
    scale: Tensor | None,
    into: Memory,
) -> list[SplitPlan]:
    """The launches of q, k or v."""
    x = x if x.dtype in DTYPES else x.float()
    x = x if x.stride(3) == 1 else x.contiguous()
    headdim, group = x.shape[3], side.group
    mixed = headdim & -headdim if side.rotates else 0
    rotation = Rotation(headdim, mixed, mixed**-0.5 if mixed else 1.0)
    angles = None
    if tables is not None:
        angles, half, is_interleaved = tables
        rotation = rotation._replace(HALF=half, INTERLEAVED=is_interleaved)
    constants = dict(ROTATION=rotation)
    of_x, programs = (strided(x), angles), count_of(x, blocks.cu_seqlens) * x.shape[2]
    heads = blocks.sequences * blocks.nheads
    # Rows that are not aligned come through more registers
    warps = WIDE if headdim % 16 else WARPS.value
    warps_of_sums = warps if mixed else 1
    mean, reach = (None if t is None else of_head(t) for t in (into.mean, into.reach))
    sampled = dict(IS_SAMPLED=is_sampled(x, reach is not None))
    launches = []
    if mean is not None:
        args = *of_x, into.statistics, blocks
        parts = programs * chunks_of(headdim, mixed)
        of_sums = constants | sampled
        launches.append((quantize_statistics_kernel, parts, args, of_sums, warps_of_sums))
        args = into.statistics, mean, reach, into.largest, blocks
        means = heads * triton.cdiv(headdim, SHARE.value)
        launches.append((quantize_means_kernel, means, args, dict(D=headdim) | sampled, WIDE))
    elif scale is None:
        args = *of_x, into.largest, blocks, headdim
        of_amax = constants | sampled | dict(GROUP=group)
        launches.append((quantize_amax_kernel, programs, args, of_amax, warps_of_sums))
    out = _of_values(into.out) if side.transposes else strided(into.out)
    scale = of_head(into.scale if scale is None else scale)
    constants = constants | dict(GROUP=group, TRANSPOSED=side.transposes)
    args = *of_x, mean, into.largest, into.beyond, scale, into.rounding, out, blocks
    # At least the 64 rows of a product on Hopper, of all tiles that are computed together
    warps = WIDE if tiles_at_once(mixed) > 2 else warps
    programs *= chunks_of(headdim, mixed)
    for is_again in (False, True) if into.beyond is not None else (False,):
        of_cast = constants | dict(IS_AGAIN=is_again)
        launches.append((quantize_cast_kernel, programs, args, of_cast, warps))
    if into.rounding.lost is not None:
        columns = dict(D=headdim, BLOCK_D=triton.next_power_of_2(headdim))
        args = into.rounding, mean, reach, scale, into.drift, blocks
        launches.append((quantize_loss_kernel, heads, args, columns, WIDE))
    return _plans(blocks, launches)


def transposing(
    v: Any, seqused_k: Tensor | None, cu_seqlens_k: Tensor | None, v_t: Tensor
) -> list[SplitPlan]:
    """The launch that writes V^T, of bits."""
    v = v if v.stride(3) == 1 else v.contiguous()
    blocks = row_blocks(v, cu_seqlens_k, seqused_k)
    programs, args = count_of(v, cu_seqlens_k) * v.shape[2], (strided(v), _of_values(v_t), blocks)
    return _plans(blocks, [(transpose_values_kernel, programs, args, dict(D=v.shape[3]), WIDE)])


def _plans(blocks: RowBlocks, launches: list[tuple]) -> list[SplitPlan]:
    """Those that have a program; without sequences there is nothing to write."""
    there = [x for x in launches if x[1] and blocks.sequences]
    return [SplitPlan(*launch, STAGES) for launch in there]


def tables_of(rotary: Rotary | None, keys: RowBlocks) -> tuple[Tables, int, bool] | None:
    """Rotary tables, the pairs that they turn, and whether these are neighbours; None where nothing
    is turned.
    """
    if rotary is None or 0 in rotary.cos.shape:
        return None
    cos, sin = (x.contiguous() for x in rotary[:2])
    return Tables(cos, sin, cos.shape[0], keys), cos.shape[1], bool(rotary.interleaved)


def row_blocks(x: Tensor, starts: Tensor | None, used: Tensor | None) -> RowBlocks:
    """The rows of q, k or v, by its cu_seqlens and seqused."""
    starts, used = (None if t is None else t.contiguous() for t in (starts, used))
    sequences = x.shape[0] if starts is None else starts.shape[0] - 1
    return RowBlocks(starts, used, sequences, x.shape[1], x.shape[2])


def _of_values(v_t: Tensor) -> Strided:
    """V^T as kernels take it: rows are the dims of a head, and as long as there are columns."""
    _, nheads, headdim, columns = v_t.shape
    return Strided(v_t, nheads * headdim * columns, columns, headdim * columns)
