"""What the kernels that quantise write: tensors that are returned, and what one leaves to the
next.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...tuning.select import architecture
from ..common.operand import Operand
from ..common.quantized import COLUMNS, FP8, WHOLE, columns_of, empty_values, packed_columns
from .fp8_launch import has_product
from .quantize_kernels import Rounding
from .quantize_statistics import Statistics

INT32 = torch.int32


class Recipe(NamedTuple):
    """What is done to q, to k or to v."""

    group: int  # heads that share a scale
    rotates: bool
    smooths: bool
    transposes: bool


class Memory(NamedTuple):
    """What kernels write of one tensor, as operands."""

    out: Any  # codes, or V^T: e4m3, or its bits where a GPU has no conversion
    scale: Any  # where none is given
    mean: Any
    statistics: Statistics  # of each block of rows
    rounding: Rounding
    reach: Any
    drift: Any  # by its bits: ()
    # Magnitudes, by their bits: (sequences, nheads_k)
    largest: Any
    beyond: Any  # of those that are larger than what was found in some blocks

    @property
    def outputs(self) -> tuple[Any, Any, Any]:
        """The tensors that are returned."""
        return self.out, self.scale, self.mean


def memory_of(
    x: Any, recipe: Recipe, starts: Any, *, scale: Any, nheads_k: int, drifts: bool, work: Any
) -> Memory:
    """The memory of one tensor, of sequences that begin at `starts`, if they are packed. Its scale
    is found where none is given. `drifts`: whether it is measured how far v drifts.
    """
    sequences = x.shape[0] if starts is None else starts.shape[0] - 1
    block, mean = (count_of(x, starts), *x.shape[2:]), (sequences, *x.shape[2:])
    finds_scale, is_rounded = scale is None, recipe.smooths and recipe.transposes
    is_walked = is_rounded and drifts

    def room(name: str, shape: tuple, is_there: bool, dtype: Any = torch.float32) -> Any:
        is_cleared = dtype == INT32  # maxima
        return work.add(f"{x.name} {name}", shape, dtype, is_cleared) if is_there else None

    def output(name: str, shape: tuple, is_there: bool) -> Any:
        return Operand(f"{x.name} {name}", shape, torch.float32, x.device) if is_there else None

    has_extremes, of_scale = recipe.smooths and finds_scale, (sequences, nheads_k)
    drift = None
    if is_walked:
        drift = Operand("drift", (), torch.float32, x.device, is_cleared=True)
    return Memory(
        out=codes_of(x, recipe, starts),
        scale=output("scale", of_scale, finds_scale),
        mean=output("mean", mean, recipe.smooths),
        statistics=Statistics(
            sums=room("sums", block, recipe.smooths),
            highs=room("highs", block, has_extremes),
            lows=room("lows", block, has_extremes),
        ),
        rounding=Rounding(
            lost=room("lost", block, is_rounded), squares=room("squares", block, is_walked)
        ),
        reach=room("reach", mean, is_walked),
        drift=drift,
        largest=room("largest", of_scale, finds_scale, INT32),
        beyond=room("beyond", of_scale, finds_scale and is_sampled(x, is_walked), INT32),
    )


def codes_of(x: Any, recipe: Recipe, starts: Any) -> Operand:
    """The codes of x, or V^T. Rows of no packed sequence are 0; torch clears bytes."""
    name = f"{x.name} codes"
    if recipe.transposes:
        like = None if starts is None else starts.new("meta")
        is_cleared, bits = like is not None and len(like) == 1, empty_values(x.new("meta"), like)
        shape = tuple(bits.shape)
    else:
        is_cleared, shape = starts is not None, tuple(x.shape)
    has_codes = has_product(architecture(x.device)) and not is_cleared
    dtype = FP8 if has_codes else torch.uint8
    return Operand(name, shape, dtype, x.device, is_cleared=is_cleared)


def written_in(out: Operand) -> Operand:
    """Codes as kernels write them: by their bits where a GPU has no conversion."""
    return out.view(FP8 if has_product(architecture(out.device)) else torch.uint8)


def is_sampled(x: Any, is_walked: bool) -> bool:
    """Whether a sequence may be so long that means and maxima are of some of its blocks. Of those
    that are walked, from each block to the next, they are of all.
    """
    return x.shape[1] > WHOLE and not is_walked


def count_of(x: Any, starts: Any) -> int:
    """Blocks of rows of all sequences."""
    if starts is None:
        return x.shape[0] * max(1, columns_of(x.shape[1]) // COLUMNS)
    return packed_columns(x.shape[1], starts.shape[0] - 1) // COLUMNS
