"""Caches of 8 bits: x is stored as x / scale, rounded to nearest even and saturated, and read times
the scale.

A scale is one number, (), or one for each key head, (nheads_k,), for each sequence and key head,
(batch, nheads_k), or for each row of the cache and key head, shaped as the cache without headdim.
All values of float8_e4m3fn and int8 are exact in bfloat16, float16 and float32.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor
LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # the largest values in use
SMALLEST = 2.0**-126  # of a row's scale: the smallest normal number


def is_one_byte(x: Tensor | None) -> bool:
    """Whether a tensor has 8-bit numbers of any kind."""
    return isinstance(x, torch.Tensor) and x.dtype.itemsize == 1 and x.dtype != torch.bool


def row_scales(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each row, in fp32, which takes its largest magnitude to the largest of `dtype`;
    NaN for a row with NaN.
    """
    scale = x.float().abs().amax(-1) / LIMITS[dtype]
    return scale.masked_fill(scale < SMALLEST, SMALLEST)


def quantize(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """x / scale; NaN is 0 in int8, which has none."""
    limit = LIMITS[dtype]
    scaled = (x.float() / scale).clamp(-limit, limit)
    return scaled.to(dtype) if dtype.is_floating_point else scaled.round().nan_to_num(0.0).to(dtype)


def dequantize(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x * scale in `dtype`; `scale` has the dimensions of x but the last, or broadcasts to them."""
    if scale is None:
        return x.to(dtype)
    exact = torch.promote_types(dtype, torch.float32)
    return (x.to(exact) * scale.to(exact).unsqueeze(-1)).to(dtype)


def by_row(scale: Tensor | None) -> bool:
    """Whether each row of the cache has its own scale."""
    return scale is not None and scale.dim() == 3


def of_sequence(scale: Tensor, row: int) -> Tensor:
    """() or (nheads_k,): what a sequence has of scales that are not by row."""
    return scale[row] if scale.dim() == 2 else scale
