"""q, k and v as the kernels that quantise take them, and what these write: tensors that are
returned, and what one leaves to the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...tile.rotary import Rotary
from ...tile.types import Strided
from ...tuning.select import architecture
from ..common import operand as gaps
from ..common.arguments import strided
from ..common.building import num_sms
from ..common.quantized import COLUMNS, FP8, WHOLE, columns_of, empty_values, packed_columns
from .fp8_launch import has_product, of_head
from .hadamard import Rotation
from .quantize_kernels import Rounding
from .quantize_rows import Form, Operand, RowBlocks, Tables, chunks_of
from .quantize_statistics import Statistics

INT32 = torch.int32
HEADDIM = 128  # the headdim of which short sequences are quantised in one launch


class Recipe(NamedTuple):
    """What is done to q, to k or to v."""

    group: int  # heads that share a scale
    rotates: bool
    smooths: bool
    transposes: bool


class Part(NamedTuple):
    """q, k or v in a launch, and what is returned of it: codes, or V^T, in e4m3, or its bits where
    a GPU has no conversion; its scale, where none is given; its mean.
    """

    operand: Operand
    form: Form
    codes: Any
    scale: Any
    mean: Any


def hadamard_of(x: Any, recipe: Recipe) -> int:
    """Channels that are mixed: as many as the largest power of two that divides headdim; or 0."""
    return x.shape[3] & -x.shape[3] if recipe.rotates else 0


def waits_for_heads(operands: dict[str, Any], recipes: Sequence[Recipe]) -> bool:
    """Whether the programs that share a scale wait for each other, as in `quantize_short.py`: in
    the calls that were timed and compiled without spills, of more than one block, if all these
    programs fit on the GPU.
    """
    q, k, v = (operands[name] for name in "qkv")
    absent = ("q_scale", "k_scale", "v_scale", "cu_seqlens_q", "cu_seqlens_k", "cos")
    if any(operands[name] is not None for name in absent) or architecture(q.device) != "sm90":
        return False
    lengths = q.shape[1], k.shape[1]
    is_short = COLUMNS < min(lengths) and max(lengths) <= WHOLE and recipes[0].rotates
    is_wide = any(x.dtype.itemsize > 2 for x in (q, k, v))
    if not is_short or is_wide or (q.shape[3], v.shape[3]) != (HEADDIM, HEADDIM):
        return False
    together = 0
    for x, recipe in zip((q, k, v), recipes):
        chunks = chunks_of(HEADDIM, hadamard_of(x, recipe))
        together += recipe.group * max(1, columns_of(x.shape[1]) // COLUMNS) * chunks
    return not q.is_cuda or together <= num_sms(q.device)


def part_of(
    x: Any,
    recipe: Recipe,
    blocks: RowBlocks,
    rotary: Rotary | None,
    keys: RowBlocks,
    scale: Any,
    drifts: bool,
    is_short: bool,
    work: Any,
) -> Part:
    """q, k or v as kernels take it, and the memory that they write; `rotary` turns it at positions
    of keys. Its scale is found where none is given. `drifts`: whether v's drift is measured.
    `is_short`: whether all is done in one launch, whose programs have each a place in `largest`.
    """
    x = x if x.stride(3) == 1 else x.contiguous()
    headdim, starts = x.shape[3], blocks.cu_seqlens
    hadamard = hadamard_of(x, recipe)
    rotation = Rotation(headdim, hadamard, hadamard**-0.5 if hadamard else 1.0)
    tables = None
    if rotary is not None:
        positions, half = rotary.cos.shape
        tables = Tables(rotary.cos, rotary.sin, positions)
        rotation = rotation._replace(HALF=half, INTERLEAVED=bool(rotary.interleaved))
    count, finds_scale = count_of(x, starts), scale is None
    is_rounded = recipe.smooths and recipe.transposes
    is_walked, samples = is_rounded and drifts, is_sampled(x, is_rounded and drifts)
    has_extremes, of_scale = recipe.smooths and finds_scale, (blocks.sequences, keys.nheads)
    of_blocks, of_heads = (count, *x.shape[2:]), (blocks.sequences, *x.shape[2:])
    of_largest = (count, x.shape[2], chunks_of(headdim, hadamard)) if is_short else of_scale

    def room(name, shape, is_there, dtype=torch.float32, is_cleared=False):
        return work.add(f"{x.name} {name}", shape, dtype, is_cleared) if is_there else None

    def output(name: str, shape: tuple, is_there: bool) -> Any:
        operand = gaps.Operand(f"{x.name} {name}", shape, torch.float32, x.device)
        return operand if is_there else None

    codes = codes_of(x, recipe, starts)
    new_scale = output("scale", of_scale, finds_scale)
    mean = output("mean", of_heads, recipe.smooths)
    reach = room("reach", of_heads, is_walked)
    written = codes.view(FP8 if has_product(architecture(x.device)) else torch.uint8)
    operand = Operand(
        strided(x),
        blocks=blocks,
        tables=tables,
        keys=None if tables is None else keys,
        count=count,
        headdim=headdim,
        mean=None if mean is None else of_head(mean),
        statistics=Statistics(
            sums=room("sums", of_blocks, recipe.smooths),
            highs=room("highs", of_blocks, has_extremes),
            lows=room("lows", of_blocks, has_extremes),
        ),
        reach=None if reach is None else of_head(reach),
        largest=room("largest", of_largest, finds_scale, INT32, is_cleared=not is_short),
        beyond=room("beyond", of_scale, finds_scale and samples, INT32, True),
        scale=of_head(new_scale if finds_scale else scale),
        rounding=Rounding(
            lost=room("lost", of_blocks, is_rounded), squares=room("squares", of_blocks, is_walked)
        ),
        counters=room("counters", (1 + 2 * math.prod(of_scale),), is_short, INT32, True),
        out=of_values(written) if recipe.transposes else strided(written),
    )
    form = Form(rotation, recipe.group, samples, recipe.transposes, HAS_ONE_ROW=x.shape[1] == 1)
    return Part(operand, form, codes, scale=new_scale, mean=mean)


def of_values(v_t: Any) -> Strided:
    """V^T as kernels take it: rows are the dims of a head, and as long as there are columns."""
    _, nheads, headdim, columns = v_t.shape
    return Strided(v_t, nheads * headdim * columns, columns, headdim * columns)


def codes_of(x: Any, recipe: Recipe, starts: Any) -> Any:
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
    return gaps.Operand(name, shape, dtype, x.device, is_cleared=is_cleared)


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
