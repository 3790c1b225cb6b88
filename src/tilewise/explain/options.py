"""What a shape asks beyond a causal mask, as arguments: a window, a softcap, ALiBi's slopes, sinks,
its modifier; and where packed sequences begin.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from .modifiers import arguments_of
from .shapes import FP8, Shape

Tensor = torch.Tensor


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
        **arguments_of(shape, device),
    )


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
