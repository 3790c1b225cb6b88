"""A shape as the backends see it: the Problem, and tensors whose memory is neither read nor
written.

Only their metadata is read, which selects code and launch sizes: a call of any size is as cheap.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..frontend.scalars import band
from ..mods.flatten import modifiers_of
from ..problem import LONG_SEQLEN, Extras, Problem, Scalars, describe
from .modifiers import BIASES
from .options import options_of, packing_of
from .shapes import Shape

Tensor = torch.Tensor


class Call(NamedTuple):
    """What a launch is made of."""

    problem: Problem
    q: Tensor
    k: Tensor
    v: Tensor
    extras: Extras
    scalars: Scalars


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
