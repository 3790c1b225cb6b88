"""Host side of quantising: what `kernels/cpu/quantize.py` computes, by kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...tile.rotary import Rotary
from ..common.operand import Operand, operand_of
from ..common.program import Planned, Program
from ..common.quantized import FP8, TWO_LEVELS, Lengths, Quantized, Scales, empty_values
from ..common.workspace import Workspace
from .quantize_launches import DTYPES, launches_of, recipes_of, row_blocks, transposing, turn_of
from .quantize_memory import part_of, waits_for_heads

Tensor = torch.Tensor
SCALES = ("q_scale", "k_scale", "v_scale")
FIELDS = ("q", "k", "v", *SCALES, *Lengths._fields, "cos", "sin")
OF_VALUES = ("v", "seqused_k", "cu_seqlens_k")


def prepare_quantize(steps: Any) -> Callable[..., Quantized]:
    """`quantize` of one signature, whose `scales` are the caller's, (batch, nheads_k)."""
    programs = [
        Planned(FIELDS, functools.partial(quantize_program, steps, is_interleaved))
        for is_interleaved in (False, True)
    ]

    def quantized(q, k, v, scales, of: Lengths, rotary: Rotary | None) -> Quantized:
        cos, sin, is_interleaved = (None, None, False) if rotary is None else rotary
        tensors = [x if x.dtype in DTYPES else x.float() for x in (q, k, v)]
        tensors += (*scales, *of, cos, sin)
        *codes, q_scale, k_scale, v_scale, k_mean, v_mean, drift = programs[is_interleaved](tensors)
        q8, k8, v_t = (x if x.dtype == FP8 else x.view(FP8) for x in codes)
        pairs = zip(scales, (q_scale, k_scale, v_scale))
        every = Scales._make([new if scale is None else scale for scale, new in pairs])
        return Quantized(q8, k8, v_t, every, k_mean, v_mean, drift)

    return quantized


def quantize_program(steps: Any, is_interleaved: bool, **operands: Any) -> Program:
    """The program of a call, of operands. Its outputs are the codes, the scales, of k and v the
    means, and how far v drifts.
    """
    q, k, v = (operands[name] for name in "qkv")
    cos, sin = operands["cos"], operands["sin"]
    turn = turn_of(None if cos is None else Rotary(cos, sin, is_interleaved))
    work, drift = Workspace(q.device), None
    if steps.smooth_v and v.shape[3] > TWO_LEVELS:
        drift = Operand("drift", (), torch.float32, v.device, is_cleared=True)
    of_q = row_blocks(q, operands["cu_seqlens_q"], operands["seqused_q"])
    of_k = row_blocks(k, operands["cu_seqlens_k"], operands["seqused_k"])
    blocks, turns = (of_q, of_k, of_k._replace(nheads=v.shape[2])), (turn, turn, None)
    recipes = recipes_of(q, k, steps)
    is_short = waits_for_heads(operands, recipes)
    common = dict(keys=of_k, drifts=drift is not None, is_short=is_short, work=work)
    parts = [
        part_of(operands[name], recipe, rows, rotary=turned, scale=operands[scale], **common)
        for name, recipe, rows, turned, scale in zip("qkv", recipes, blocks, turns, SCALES)
    ]
    outputs = [*(x.codes for x in parts), *(x.scale for x in parts), *(x.mean for x in parts[1:])]
    q, k, v = parts
    return Program(FIELDS, launches_of(q, k, v, drift), work, (*outputs, drift))


def prepare_transposed() -> Callable[..., Tensor]:
    """`transposed_values` of one signature."""
    run = Planned(OF_VALUES, transposed_program)

    def transposed(v: Tensor, seqused_k: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor:
        (v_t,) = run((v, seqused_k, cu_seqlens_k))
        return v_t.view(FP8)

    return transposed


def transposed_program(v: Any, seqused_k: Any, cu_seqlens_k: Any) -> Program:
    """The launch that writes V^T, of bits."""
    starts = None if cu_seqlens_k is None else cu_seqlens_k.new("meta")
    is_cleared = starts is not None and len(starts) == 1
    bits = empty_values(v.new("meta"), starts)
    v_t = operand_of("v_t", bits, v.device, is_cleared)
    launches = transposing(v.view(torch.uint8), seqused_k, cu_seqlens_k, v_t)
    return Program(OF_VALUES, launches, Workspace(v.device), (v_t,))
