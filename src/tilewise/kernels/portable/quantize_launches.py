"""The launches that quantise q, k and v, and their operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from ...tile.rotary import Rotary
from ...tile.types import Strided
from ..common.arguments import strided
from ..common.program import Launch, checked
from ..common.quantized import EVERY, Lengths
from .fp8_launch import of_head
from .hadamard import Rotation, tiles_at_once
from .plan import options_of
from .quantize_kernels import quantize_cast_kernel, quantize_loss_kernel, transpose_values_kernel
from .quantize_memory import Memory, Recipe, count_of, is_sampled, written_in
from .quantize_rows import ROWS, WARPS, Form, Operand, RowBlocks, Tables, chunks_of
from .quantize_statistics import quantize_means_kernel, quantize_statistics_kernel, shares_of

Tensor = torch.Tensor
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDE, STAGES = 8, 1


def recipes_of(q: Tensor, k: Tensor, steps: Any) -> tuple[Recipe, Recipe, Recipe]:
    """What is done to q, to k and to v."""
    return (
        Recipe(q.shape[2] // k.shape[2], steps.rotate, smooths=False, transposes=False),
        Recipe(1, steps.rotate, smooths=steps.smooth_k, transposes=False),
        Recipe(1, rotates=False, smooths=steps.smooth_v, transposes=True),
    )


class Part(NamedTuple):
    """q, k or v in a launch."""

    operand: Operand
    form: Form


def launches_of(
    tensors: Sequence[Any],
    recipes: Sequence[Recipe],
    scales: Sequence[Any],
    of: Lengths,
    rotary: Rotary | None,
    memory: Sequence[Memory],
) -> list[Launch]:
    """The launches of a call."""
    q, k, v = tensors
    of_q = row_blocks(q, of.cu_seqlens_q, of.seqused_q)
    of_k = row_blocks(k, of.cu_seqlens_k, of.seqused_k)
    if of_q.sequences == 0:  # there is nothing to write
        return []
    blocks = of_q, of_k, of_k._replace(nheads=v.shape[2])
    turn = turn_of(rotary)
    q, k, v = map(part_of, tensors, recipes, blocks, (turn, turn, None), [of_k] * 3, scales, memory)
    launches = [*statistics_of(q, k), *statistics_of(v), *means_of(k, v)]
    launches += [*cast_of(q, k), *cast_of(v), *recast_of(q, k), *recast_of(v)]
    launches += loss_of(v, memory[2].drift)
    return [x for x in launches if x.programs]


def statistics_of(*parts: Part) -> list[Launch]:
    """Sums, extremes and maxima of blocks."""
    measured = [x for x in parts if x.operand.mean is not None or x.operand.largest is not None]
    blocks = EVERY if all(x.form.IS_SAMPLED for x in measured) else 1
    return launch(quantize_statistics_kernel, measured, blocks, warps_of(measured))


def means_of(*parts: Part) -> list[Launch]:
    """Means, and the largest magnitudes without them."""
    smooth = [x for x in parts if x.operand.mean is not None]
    programs = sum(
        x.operand.blocks.sequences * x.operand.blocks.nheads * shares_of(x.form.ROTATION.D)
        for x in smooth
    )
    args, forms = pair(smooth)
    return [launch_of(quantize_means_kernel, programs, args, forms, WIDE)]


def cast_of(*parts: Part) -> list[Launch]:
    """Codes, or V^T."""
    return launch(quantize_cast_kernel, parts, 1, warps_of_products(parts), IS_AGAIN=False)


def recast_of(*parts: Part) -> list[Launch]:
    """Codes where a scale had no room."""
    sampled = [x for x in parts if x.operand.beyond is not None]
    warps = warps_of_products(sampled)
    return launch(quantize_cast_kernel, sampled, EVERY, warps, IS_AGAIN=True)


def loss_of(v: Part, drift: Any) -> list[Launch]:
    """What rounding took from V, added to its mean; and how far V drifts."""
    if v.operand.rounding.lost is None:
        return []
    headdim, blocks = v.form.ROTATION.D, v.operand.blocks
    columns = dict(D=headdim, BLOCK_D=triton.next_power_of_2(headdim))
    bits = None if drift is None else drift.view(torch.int32)
    programs, args = blocks.sequences * blocks.nheads, dict(v=v.operand, drift=bits)
    return [launch_of(quantize_loss_kernel, programs, args, columns, WIDE)]


def launch_of(
    kernel: Any, programs: int, args: dict[str, Any], constants: dict[str, Any], warps: int
) -> Launch:
    """A launch of so many programs."""
    options = options_of(warps, STAGES)
    return checked(Launch(kernel, programs, args, constants, options))


def launch(
    kernel: Any, parts: Sequence[Part], blocks: int, warps: int, **constants: bool
) -> list[Launch]:
    """The launch of parts with so many blocks of rows per program."""
    programs = 0
    for operand, form in parts:
        chunks = chunks_of(form.ROTATION.D, form.ROTATION.HADAMARD)
        groups = groups_of(operand.blocks, operand.count, blocks)
        programs += groups * operand.blocks.nheads * chunks
    args, forms = pair(parts)
    constants = forms | dict(BLOCKS=blocks) | constants
    return [launch_of(kernel, programs, args, constants, warps)]


def groups_of(rows: RowBlocks, count: int, blocks: int) -> int:
    """`groups_of` of quantize_rows.py."""
    if rows.cu_seqlens is not None:
        return triton.cdiv(count, blocks)
    return rows.sequences * triton.cdiv(max(triton.cdiv(rows.seqlen, ROWS.value), 1), blocks)


def pair(parts: Sequence[Part]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two parts as kernels take them, or one and none."""
    (a, of_a), (b, of_b) = [*parts, (None, None), (None, None)][:2]
    return dict(a=a, b=b), dict(OF_A=of_a, OF_B=of_b)


def warps_of(parts: Sequence[Part]) -> int:
    """One where channels are not mixed; else rows that are not aligned come through more
    registers.
    """
    rotations = [x.form.ROTATION for x in parts]
    if not any(x.HADAMARD for x in rotations):
        return 1
    return WIDE if any(x.D % 16 for x in rotations) else WARPS.value


def warps_of_products(parts: Sequence[Part]) -> int:
    """At least for the 64 rows of a product on Hopper, of all tiles that are computed together."""
    is_wide = any(tiles_at_once(x.form.ROTATION.HADAMARD) > 2 for x in parts)
    return WIDE if is_wide else warps_of(parts)


def part_of(
    x: Tensor,
    recipe: Recipe,
    blocks: RowBlocks,
    rotary: Rotary | None,
    keys: RowBlocks,
    scale: Tensor | None,
    into: Memory,
) -> Part:
    """q, k or v as kernels take it; `rotary` turns it at the positions of keys."""
    x = x if x.stride(3) == 1 else x.contiguous()
    headdim = x.shape[3]
    mixed = headdim & -headdim if recipe.rotates else 0
    rotation = Rotation(headdim, mixed, mixed**-0.5 if mixed else 1.0)
    tables = None
    if rotary is not None:
        positions, half = rotary.cos.shape
        tables = Tables(rotary.cos, rotary.sin, positions)
        rotation = rotation._replace(HALF=half, INTERLEAVED=bool(rotary.interleaved))
    form = Form(rotation, recipe.group, is_sampled(x, into.reach is not None), recipe.transposes)
    mean, reach = (None if t is None else of_head(t) for t in (into.mean, into.reach))
    out = written_in(into.out)
    operand = Operand(
        strided(x),
        blocks=blocks,
        tables=tables,
        keys=None if tables is None else keys,
        count=count_of(x, blocks.cu_seqlens),
        headdim=headdim,
        mean=mean,
        statistics=into.statistics,
        reach=reach,
        largest=into.largest,
        beyond=into.beyond,
        scale=of_head(into.scale if scale is None else scale),
        rounding=into.rounding,
        out=_of_values(out) if recipe.transposes else strided(out),
    )
    return Part(operand, form)


def transposing(
    v: Any, seqused_k: Tensor | None, cu_seqlens_k: Tensor | None, v_t: Tensor
) -> list[Launch]:
    """The launch that writes V^T, of bits."""
    v = v if v.stride(3) == 1 else v.contiguous()
    blocks = row_blocks(v, cu_seqlens_k, seqused_k)
    programs = count_of(v, cu_seqlens_k) * v.shape[2]
    if not (programs and blocks.sequences):
        return []
    args = dict(v=strided(v), v_t=_of_values(v_t), blocks=blocks)
    return [launch_of(transpose_values_kernel, programs, args, dict(D=v.shape[3]), WIDE)]


def turn_of(rotary: Rotary | None) -> Rotary | None:
    """Contiguous tables; None where nothing is turned."""
    if rotary is None or 0 in rotary.cos.shape:
        return None
    return rotary._replace(cos=rotary.cos.contiguous(), sin=rotary.sin.contiguous())


def row_blocks(x: Tensor, starts: Tensor | None, used: Tensor | None) -> RowBlocks:
    """The rows of q, k or v, by its cu_seqlens and seqused."""
    starts, used = (None if t is None else t.contiguous() for t in (starts, used))
    sequences = x.shape[0] if starts is None else starts.shape[0] - 1
    return RowBlocks(starts, used, sequences, x.shape[1], x.shape[2])


def _of_values(v_t: Tensor) -> Strided:
    """V^T as kernels take it: rows are the dims of a head, and as long as there are columns."""
    _, nheads, headdim, columns = v_t.shape
    return Strided(v_t, nheads * headdim * columns, columns, headdim * columns)
