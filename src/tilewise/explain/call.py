"""A shape as the arguments of `attention`, and as the backends see it: the Problem, and tensors
whose memory is neither read nor written.

Only their metadata is read, which selects code and launch sizes: a call of any size is as cheap.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .. import scores
from ..frontend.scalars import band
from ..mods.flatten import modifiers_of
from ..problem import LONG_SEQLEN, Extras, Problem, Scalars, describe
from ..sparse import create_block_mask
from .modifiers import BIASES, DROPOUT_P, MASKS, RNG
from .shapes import FP8, Shape

Tensor = torch.Tensor


class Call(NamedTuple):
    """What a launch is made of."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    extras: Extras
    scalars: Scalars


def options_of(shape: Shape, device: str) -> dict[str, Any]:
    """What `attention` and `attention_reference` are called with; None where nothing is asked, and
    no name of a modifier that is not.
    """
    return dict(
        causal=shape.causal,
        window=None if shape.window is None else (shape.window, 0),
        softcap=shape.softcap or None,
        alibi_slopes=_slopes(shape, device) if shape.alibi else None,
        sinks=_sinks(shape, device) if shape.sinks else None,
        **modifier_of(shape, device),
    )


def block_mask_of(shape: Shape, device: str):
    """The BlockMask of a shape, None for one without."""
    if shape.modifier not in MASKS:
        return None
    seqlen = shape.seqlen_q
    mask = MASKS[shape.modifier](seqlen, device)
    return create_block_mask(mask, shape.batch, shape.nheads, seqlen, seqlen, device=device)


def score_of(shape: Shape, device: str) -> Callable[..., Tensor] | None:
    """The score function of a shape: a slope a head times the distance to the key."""
    if shape.modifier != "score":
        return None
    heads = torch.arange(1, shape.nheads + 1, dtype=torch.float32, device=device)
    slopes = torch.exp2(-8 * heads / shape.nheads)
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


def modifier_of(shape: Shape, device: str) -> dict[str, Any]:
    """The arguments that a shape's modifier adds; none for a bias, which is an input."""
    if shape.modifier in MASKS:
        return {"block_mask": block_mask_of(shape, device)}
    if (score := score_of(shape, device)) is not None:
        return {"score_mod": scores.score(score)}
    if shape.modifier == "dropout":
        return {"dropout_p": DROPOUT_P, "dropout_rng": torch.tensor(RNG, device=device)}
    return {}


def packing_of(shape: Shape, device: str) -> dict[str, Any]:
    """Where packed sequences lie, by names that flash-attn and `attention` share; nothing for a
    dense shape.
    """
    if not shape.lengths:
        return {}
    ends = torch.tensor(shape.sequences).cumsum(0)
    starts = F.pad(ends, (1, 0)).to(device, torch.int32)
    longest = max(shape.sequences)
    return dict(
        cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest
    )


def call_of(shape: Shape, deterministic: bool = False) -> Call:
    """The call on the CPU, its tensors unwritten; RuntimeError where there is no room for them."""
    options = options_of(shape, "cpu")
    packing = packing_of(shape, "cpu")
    starts = packing.get("cu_seqlens_q")
    q, k, v = _tensors(shape)
    dropout_p = options.get("dropout_p", 0.0)
    left, right = band(options["window"], shape.causal)
    scalars = Scalars(shape.headdim**-0.5, shape.softcap, left, right, dropout_p)
    sizes = shape.batch, shape.nheads, shape.seqlen_q, shape.seqlen_k
    modified = modifiers_of(None, options.get("score_mod"), options.get("block_mask"), sizes)
    has_bias = shape.modifier in BIASES
    bias_sizes = 1, shape.nheads, shape.seqlen_q, shape.seqlen_k
    extras = Extras(
        options["alibi_slopes"],
        options["sinks"],
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        bias=torch.empty(bias_sizes, dtype=q.dtype, device="meta") if has_bias else None,
        dropout_rng=options.get("dropout_rng"),
        captured=modified.captured,
    )
    has_bias_grad = shape.modifier == "learned-bias"
    is_long = bool(shape.lengths) and packing["max_seqlen_q"] > LONG_SEQLEN
    problem = describe(
        q,
        k,
        v,
        extras,
        scalars,
        "bottom_right",
        deterministic,
        mods=modified.mods,
        has_bias_grad=has_bias_grad,
        is_long=is_long,
    )
    return Call(problem, q, k, v, extras, scalars)


def _tensors(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    dtype = getattr(torch, shape.dtype)
    packed = (1, sum(shape.sequences)) if shape.lengths else None
    rows_q = packed or (shape.batch, shape.seqlen_q)
    rows_k = packed or (shape.batch, shape.seqlen_k)
    return (
        torch.empty(*rows_q, shape.nheads, shape.headdim, dtype=dtype),
        torch.empty(*rows_k, shape.nheads_k, shape.headdim, dtype=dtype),
        torch.empty(*rows_k, shape.nheads_k, shape.headdim_v, dtype=dtype),
    )


def _slopes(shape: Shape, device: str) -> Tensor:
    """2^(-8 (i + 1) / nheads) for head i, as in ALiBi's paper (Press et al., arXiv 2108.12409)."""
    heads = torch.arange(1, shape.nheads + 1, dtype=torch.float32, device=device)
    return torch.exp2(-8 * heads / shape.nheads)


def _sinks(shape: Shape, device: str) -> Tensor:
    """Sinks about as heavy as all the keys of a query: one that is left out then shows."""
    generator = torch.Generator(device=device).manual_seed(1)
    normal = torch.randn(shape.nheads, device=device, generator=generator)
    keys = shape.seqlen_k if shape.window is None else min(shape.window + 1, shape.seqlen_k)
    wide = "float32" if shape.dtype == FP8 else shape.dtype
    return (normal + math.log(keys)).to(getattr(torch, wide))
