"""What `attention` and its reference are called with for a shape, optional inputs included."""

from __future__ import annotations

import math
from typing import Any

import torch

from tilewise.explain.call import modifier_of
from tilewise.explain.shapes import FP8, Shape

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
        **modifier_of(shape, device),
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
