"""A shape as the arguments of `attention`, and as the backends see it: the Problem, and tensors
whose memory is neither read nor written.

Only their metadata is read, which selects code and launch sizes: a call of any size is as cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .. import scores
from ..features import FEATURES, OPTIONS, Feature
from ..frontend.scalars import band
from ..mods.flatten import modifiers_of
from ..problem import LONG_SEQLEN, Extras, Problem, Scalars, describe
from ..sparse import create_block_mask
from .modifiers import BIASES, DROPOUT_P, MASKS, RNG
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
    packing, modifier = packing_of(shape, "cpu"), modifier_of(shape, "cpu")
    starts = packing.get("cu_seqlens_q")
    q, k, v = _tensors(shape)
    requested = {name: getattr(shape, option) for option, name in OPTIONS.items()}
    tensors: dict[str, Any] = {
        name: _empty(FEATURES[name], shape, q.dtype) if requested.pop(name) else None
        for name in OPTIONS.values()
        if FEATURES[name].shapes
    }
    left, right = band(None if shape.window is None else (shape.window, 0), shape.causal)
    dropout_p = modifier.get("dropout_p", 0.0)
    scalars = Scalars(shape.headdim**-0.5, left=left, right=right, dropout_p=dropout_p, **requested)
    sizes = shape.batch, shape.nheads, shape.seqlen_q, shape.seqlen_k
    modified = modifiers_of(None, modifier.get("score_mod"), modifier.get("block_mask"), sizes)
    has_bias = shape.modifier in BIASES
    bias_sizes = 1, shape.nheads, shape.seqlen_q, shape.seqlen_k
    extras = Extras(
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        bias=torch.empty(bias_sizes, dtype=q.dtype, device="meta") if has_bias else None,
        dropout_rng=modifier.get("dropout_rng"),
        captured=modified.captured,
        **tensors,
    )
    flags: dict[str, Any] = dict(mods=modified.mods, deterministic=deterministic)
    flags["has_bias_grad"] = shape.modifier == "learned-bias"
    flags["is_long"] = bool(shape.lengths) and packing["max_seqlen_q"] > LONG_SEQLEN
    problem = describe(q, k, v, extras=extras, scalars=scalars, align="bottom_right", **flags)
    return Call(problem, q, k, v, extras, scalars)


def _empty(feature: Feature, shape: Shape, dtype: torch.dtype) -> Tensor:
    """An optional tensor of the first of its shapes, and of the dtype of q if it may have that."""
    sizes = [getattr(shape, size) for size in feature.shapes[0]]
    return torch.empty(sizes, dtype=dtype if dtype in feature.dtypes else feature.dtypes[0])


def _tensors(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v."""
    dtype = getattr(torch, shape.dtype)
    rows_q, rows_k = (shape.batch, shape.seqlen_q), (shape.batch, shape.seqlen_k)
    if shape.lengths:
        rows_q = rows_k = 1, sum(shape.sequences)
    sizes = (
        (*rows_q, shape.nheads, shape.headdim),
        (*rows_k, shape.nheads_k, shape.headdim),
        (*rows_k, shape.nheads_k, shape.headdim_v),
    )
    q, k, v = (torch.empty(size, dtype=dtype) for size in sizes)
    return q, k, v
