"""Host side of quantising: `quantize` and `transposed_values` of `kernels/cpu/quantize.py`, by
kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...tile.rotary import Rotary
from ..common.operand import operand_of
from ..common.program import Planned, Program
from ..common.quantized import FP8, TWO_LEVELS, Lengths, Quantized, Scales, empty_values
from ..common.workspace import Workspace
from .quantize_launches import DTYPES, launches_of, recipes_of, transposing
from .quantize_memory import memory_of

Tensor = torch.Tensor
SCALES = ("q_scale", "k_scale", "v_scale")
FIELDS = ("q", "k", "v", *SCALES, *Lengths._fields, "cos", "sin")
OF_VALUES = ("v", "seqused_k", "cu_seqlens_k")


def quantize(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Any,
    scales: Sequence[Tensor | None],
    of: Lengths,
    rotary: Rotary | None = None,
) -> Quantized:
    """Quantises 4-dimensional tensors; `steps` has rotate, smooth_k and smooth_v, and `scales` are
    the caller's, (batch, nheads_k).
    """
    return prepare_quantize(steps)(q, k, v, scales, of, rotary)


def transposed_values(v: Tensor, seqused_k: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor:
    """V^T, (batch, nheads_k, headdim_v, columns), of e4m3 (batch, seqlen_k, nheads_k, headdim_v):
    0 where no key is in use.
    """
    return prepare_transposed()(v, seqused_k, cu_seqlens_k)


def prepare_quantize(steps: Any) -> Callable[..., Quantized]:
    """`quantize` of one signature."""
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
    tensors = q, k, v = [operands[name] for name in "qkv"]
    lengths = Lengths(**{name: operands[name] for name in Lengths._fields})
    cos, sin = operands["cos"], operands["sin"]
    rotary = None if cos is None else Rotary(cos, sin, is_interleaved)
    scales = [operands[name] for name in SCALES]
    recipes, work = recipes_of(q, k, steps), Workspace(q.device)
    starts = lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.cu_seqlens_k
    drifts = recipes[2].smooths and v.shape[3] > TWO_LEVELS
    memory = [
        memory_of(x, recipe, of, scale=scale, nheads_k=k.shape[2], drifts=drifts, work=work)
        for x, recipe, of, scale in zip(tensors, recipes, starts, scales)
    ]
    launches = launches_of(tensors, recipes, scales, lengths, rotary, memory)
    codes, new_scales, (_, *means) = zip(*(x.outputs for x in memory))
    return Program(FIELDS, launches, work, (*codes, *new_scales, *means, memory[2].drift))


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
