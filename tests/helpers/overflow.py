"""The casts to e4m3 of torch before 2.13: what lies beyond the largest number becomes NaN."""

import math

import torch

FP8 = torch.float8_e4m3fn
LARGEST_ROUNDED = 464.0  # to 448; beyond it the nearest number would be 480, whose bits are NaN


def before_2_13(monkeypatch):
    """Makes `Tensor.to` cast like that."""
    cast = torch.Tensor.to

    def to(x, *args, **named):
        if FP8 in (*args, *named.values()) and x.dtype.is_floating_point:
            x = torch.where(x.abs() > LARGEST_ROUNDED, math.nan, x)
        return cast(x, *args, **named)

    monkeypatch.setattr(torch.Tensor, "to", to)
