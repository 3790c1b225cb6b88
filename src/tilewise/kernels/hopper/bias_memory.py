"""The memory layout of a bias, as far as kernels depend on it."""

from __future__ import annotations

from typing import Any

import torch

from ...problem import Extras
from ..common.alignment import TMA, Access, fits

Tensor = torch.Tensor


def has_tiles(bias: Tensor | None, q: Tensor) -> bool:
    """Whether TMA can read tiles of a bias: none is shared by queries or by keys.

    The same of the gradient of one, and of writing.
    """
    if bias is None or bias.dtype != q.dtype or bias.shape[2] != q.shape[1]:
        return False
    return bias.shape[3] > 1 and bias.stride(3) == 1 and fits(bias, TMA)


def bias_step(bias: Tensor | None) -> int:
    """`Pipeline.BIAS_STEP`: the memory layout of the bias of neighbouring keys."""
    if bias is None or bias.shape[3] == 1:
        return 0
    if bias.stride(3) != 1:
        return -1
    return 2 if _consists_of_runs(bias, 2) else 1


def _consists_of_runs(bias: Tensor, run: int) -> bool:
    """Whether every row is made up of whole runs, all at multiples of their size."""
    return bias.shape[3] % run == 0 and fits(bias, Access(run * bias.itemsize))


def in_pairs(extras: Extras, plan: Any) -> Extras:
    """Extras with a 16-bit bias viewed as pairs, where two pairs may be read at once."""
    bias = extras.bias
    if (
        plan.tile.BIAS_COPIED
        or bias is None
        or bias.itemsize != 2
        or bias_step(bias) != 2
        or not _consists_of_runs(bias, 4)
    ):
        return extras
    # Along a dimension of one element a stride may be odd, of which torch makes no pairs
    strides = [stride if n > 1 else 0 for n, stride in zip(bias.shape[:3], bias.stride())]
    bias = bias.as_strided(bias.shape, (*strides, 1))
    return extras._replace(bias=bias.view(torch.int32))
