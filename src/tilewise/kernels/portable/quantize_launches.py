"""The launches that quantise q, k and v, and their operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from ...tile.rotary import Rotary
from ..common.arguments import strided
from ..common.program import Launch, checked
from ..common.quantized import EVERY
from .hadamard import tiles_at_once
from .quantize_kernels import quantize_cast_kernel, quantize_loss_kernel, transpose_values_kernel
from .quantize_memory import Part, Recipe, count_of, of_values
from .quantize_rows import ROWS, WARPS, RowBlocks, chunks_of
from .quantize_short import quantize_short_kernel
from .quantize_statistics import quantize_means_kernel, quantize_statistics_kernel, shares_of

Tensor = torch.Tensor
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDE, STAGES = 8, 1
# Of a thread, by warps, where programs wait for each other: so 4 and 18 programs run per SM, and
# nothing is spilled. Without these limits 1Ki tokens of headdim 128 take 200 us instead of 194 (an
# H100, Triton 3.6, 2026-11-27, 16 sequences)
REGISTERS = {1: 112, 4: 128}


def recipes_of(q: Tensor, k: Tensor, steps: Any) -> tuple[Recipe, Recipe, Recipe]:
    """What is done to q, to k and to v."""
    return (
        Recipe(q.shape[2] // k.shape[2], steps.rotate, smooths=False, transposes=False),
        Recipe(1, steps.rotate, smooths=steps.smooth_k, transposes=False),
        Recipe(1, rotates=False, smooths=steps.smooth_v, transposes=True),
    )


def launches_of(q: Part, k: Part, v: Part, drift: Any) -> list[Launch]:
    """The launches of a call. `drift` is how far v drifts, by its bits, where that is wanted."""
    if q.operand.blocks.sequences == 0:  # there is nothing to write
        return []
    if q.operand.counters is not None:
        return [*short_of(q, k), *short_of(v)]
    launches = [*statistics_of(q, k), *statistics_of(v), *means_of(k, v)]
    launches += [*cast_of(q, k), *cast_of(v), *recast_of(q, k), *recast_of(v)]
    launches += loss_of(v, drift)
    return [x for x in launches if x.programs]


def short_of(*parts: Part) -> list[Launch]:
    """Codes, or V^T, from statistics to the last step."""
    programs, (args, forms) = sum(programs_of(x, 1) for x in parts), pair(parts)
    warps = warps_of_products(parts)
    one = launch_of(quantize_short_kernel, programs, args, forms, warps)
    return [one._replace(options=one.options | dict(maxnreg=REGISTERS[warps]))]


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
    # Of up to 8 blocks, 2 warps add in the order of 8, and take 8 us instead of 24 (an H100)
    is_short = not any(x.form.IS_SAMPLED or x.operand.reach is not None for x in smooth)
    return [launch_of(quantize_means_kernel, programs, args, forms, 2 if is_short else WIDE)]


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
    options = dict(num_warps=warps, num_stages=STAGES)
    return checked(Launch(kernel, programs, args, constants, options))


def launch(
    kernel: Any, parts: Sequence[Part], blocks: int, warps: int, **constants: bool
) -> list[Launch]:
    """The launch of parts with so many blocks of rows per program."""
    programs = sum(programs_of(x, blocks) for x in parts)
    args, forms = pair(parts)
    constants = forms | dict(BLOCKS=blocks) | constants
    return [launch_of(kernel, programs, args, constants, warps)]


def programs_of(part: Part, blocks: int) -> int:
    """`programs_of` of quantize_rows.py."""
    operand, rotation = part.operand, part.form.ROTATION
    groups = groups_of(operand.blocks, operand.count, blocks)
    return groups * operand.blocks.nheads * chunks_of(rotation.D, rotation.HADAMARD)


def groups_of(rows: RowBlocks, count: int, blocks: int) -> int:
    """`groups_of` of quantize_rows.py."""
    if rows.cu_seqlens is not None:
        return triton.cdiv(count, blocks)
    return rows.sequences * triton.cdiv(max(triton.cdiv(rows.seqlen, ROWS.value), 1), blocks)


def pair(parts: Sequence[Part]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two parts as kernels take them, or one and none."""
    args: dict[str, Any] = dict(a=None, b=None)
    forms: dict[str, Any] = dict(OF_A=None, OF_B=None)
    for name, form, part in zip(args, forms, parts):
        args[name], forms[form] = part.operand, part.form
    return args, forms


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


def transposing(
    v: Any, seqused_k: Tensor | None, cu_seqlens_k: Tensor | None, v_t: Tensor
) -> list[Launch]:
    """The launch that writes V^T, of bits."""
    v = v if v.stride(3) == 1 else v.contiguous()
    blocks = row_blocks(v, cu_seqlens_k, seqused_k)
    programs = count_of(v, cu_seqlens_k) * v.shape[2]
    if not (programs and blocks.sequences):
        return []
    args = dict(v=strided(v), v_t=of_values(v_t), blocks=blocks)
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
