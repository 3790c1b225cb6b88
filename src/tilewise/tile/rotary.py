"""Rotary position embedding (RoFormer, Su et al. 2021, arXiv 2104.09864), as caches need it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import short

Tensor = torch.Tensor


class Rotary(NamedTuple):
    """Tables of rotary embeddings (RoPE) by position.

    Args:
        cos: (positions, rotary_dim / 2), float: the first rotary_dim dimensions of a head are
            rotated.
        sin: shaped as cos.
        interleaved: pairs dimensions 0 and 1, 2 and 3 (GPT-J); else 0 and rotary_dim / 2, 1 and
            rotary_dim / 2 + 1 (GPT-NeoX, Llama).

    RoFormer (Su et al. 2021, arXiv 2104.09864), equation 34.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = True

    __repr__ = short


def rotate(x: Tensor, rotary: Rotary, positions: Tensor) -> Tensor:
    """x (..., nheads, headdim) turned by the angles of its positions (...), in the dtype of x.
    Positions past the tables take their last row.
    """
    if rotary.cos.shape[0] == 0:
        return x
    exact = torch.promote_types(x.dtype, torch.float32)
    index = positions.long().clamp(0, rotary.cos.shape[0] - 1)
    cos, sin = (table[index].to(exact).unsqueeze(-2) for table in rotary[:2])
    turned, unturned = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    pair = (-1, 2) if rotary.interleaved else (2, -1)
    first, second = turned.to(exact).unflatten(-1, pair).unbind(-1 if rotary.interleaved else -2)
    halves = first * cos - second * sin, second * cos + first * sin
    pairs = torch.stack(halves, -1 if rotary.interleaved else -2).flatten(-2)
    return torch.cat([pairs.to(x.dtype), unturned], -1)
