"""FP8 shapes: their inputs, what a result is held to, and our calls with and without quantising.

The inputs are normal numbers rounded to e4m3, with scales of 1. Providers that take bfloat16, or
what was quantised of that before the time is taken, get the numbers before that rounding. Each is
held to what its inputs stand for. Of numbers on e4m3's coarse grid a mean would shift all by the
same part of a step, so that what the next rounding loses does not average out; and their few bits
cost bfloat16 less power than those of an activation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from tilewise import Quantized, quantize
from tilewise.explain.shapes import FP8, Shape
from tilewise.kernels.common.quantized import Lengths
from tilewise.kernels.cpu.quantize import dequantize

from .arguments import options_of
from .standards import Inputs

Tensor = torch.Tensor
BOUND = 3e-2  # norm of the error over norm of the result, of what is computed on 8 bits
BOUND_ROUNDED = 6e-2  # the same of a call that takes 16 bits, which it may round first
QUANTIZED, WIDE = "quantized", "bfloat16"  # beside the memory orders of inputs
NAMES = {  # of ours, with what each takes
    "tilewise:quantized": QUANTIZED,
    "tilewise:quantize": WIDE,
    "tilewise:calibrated": WIDE,
    "tilewise:bf16": WIDE,
}


def in_form(inputs: Inputs, form: str, shape: Shape) -> Inputs:
    """bfloat16 inputs as a provider takes them."""
    if form == WIDE:
        return inputs
    if form != QUANTIZED:
        return Inputs(*(x.to(getattr(torch, FP8)) for x in inputs[:4]))
    q, k, v = inputs[:3]
    x, nothing = cast(Any, (quantized(q, k, v, shape), None))
    return Inputs(x, nothing, nothing, inputs.dout)


def values_of(form: str) -> str:
    """The form whose numbers a result is held to; all memory orders are one."""
    return form if form in (QUANTIZED, WIDE) else "bshd"


def meant(inputs: Inputs) -> Inputs:
    """What inputs stand for, in a dtype that holds it; queries and keys of a `Quantized` as they
    are rotated, and keys without their mean, which out does not show.
    """
    x: Any = inputs.q
    if isinstance(x, Quantized):
        return Inputs(*dequantize(x, Lengths()), inputs.dout)
    return Inputs(*(y.to(torch.bfloat16) for y in inputs[:4]))


def quantized(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> Quantized:
    """As `tilewise.quantize` does it, with the means that the shape's scores allow."""
    return quantize(q, k, v, smooth="v" if shape.sinks else True)


def refuse(name: str, shape: Shape, device: str) -> str | None:
    """Why one of NAMES does not serve a shape."""
    if shape.dtype != FP8:
        return f"{name} is for {FP8}"
    if name != "tilewise:bf16" and shape.softcap:
        return "scores that reach a softcap move by more than its bound when q and k are rounded"
    return None


def prepare(name: str, shape: Shape, device: str) -> Callable[..., Tensor]:
    """The callable of one of NAMES."""
    from tilewise import attention

    options = options_of(shape, device)
    scales: list[Any] = []  # those of the first call, which is not timed

    def attend(q: Any, k: Any, v: Any) -> Tensor:
        if name == "tilewise:quantize":
            q, k, v = quantized(q, k, v, shape), None, None
        elif name == "tilewise:calibrated":
            if not scales:
                scales.append(quantize(q, k, v, smooth=False).scales)
            q, k, v = quantize(q, k, v, scales=scales[0], smooth=False), None, None
        return cast(Tensor, attention(q, k, v, **options))

    return attend


def error_of(result: Tensor, expected: list, inputs: Inputs) -> tuple[float, float]:
    """The largest error of the sampled heads, and its bound."""
    found = 0.0
    for _, place, exact, _ in expected:
        off = torch.linalg.vector_norm(result[place].double() - exact)
        found = max(found, (off / torch.linalg.vector_norm(exact)).item())
    is_wide = isinstance(inputs.q, Tensor) and inputs.q.dtype == torch.bfloat16
    return found, BOUND_ROUNDED if is_wide else BOUND
