"""The operator of `tilewise.quantize`, and how a call reaches it: kernels on GPUs, plain torch
elsewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack

from ..kernels.common.alignment import check_elements
from ..kernels.common.outputs import has_no_sequence
from ..kernels.common.quantized import (
    FP8,
    TWO_LEVELS,
    GivenScales,
    Lengths,
    Quantized,
    Scales,
    columns_of,
    packed_columns,
)
from ..kernels.cpu import quantize as plain
from ..kernels.cpu.quantize import Steps
from ..tile.rotary import Rotary
from .attention import known, needs_dispatcher
from .calls import resolved
from .schema import check_devices, operator, record_of, refusing

Tensor = torch.Tensor
NAMES = "scales.q", "scales.k", "scales.v"
OPERANDS = "q", "k", "v", "q_scale", "k_scale", "v_scale", *Lengths._fields, "cos", "sin"
ARGUMENTS = *OPERANDS, "interleaved", *Steps._fields
SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "Tensor? cos, Tensor? sin, bool interleaved, bool rotate, bool smooth_k, bool smooth_v) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
# By device type, the module with kernels
QUANTIZERS = {"cuda": "tilewise.kernels.portable.quantize"}


class CallQuantize:
    """A checked call, and how calls of its signature are launched: its first says that."""

    __slots__ = ("run", "steps")

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.run: Callable[..., Quantized] | None = None


def quantize(
    call: CallQuantize,
    inputs: tuple[Tensor, Tensor, Tensor],
    scales: GivenScales,
    of: Lengths,
    rotary: Rotary | None,
) -> Quantized:
    """Quantizes 4-dimensional q, k and v."""
    if not needs_dispatcher(()) and peek_interpreter_stack() is None:
        return _run(call, inputs, scales=scales, of=of, rotary=rotary)
    tables, steps = (None, None, True) if rotary is None else rotary, call.steps
    arguments = dict(zip(ARGUMENTS, (*inputs, *scales, *of, *tables, *steps)))
    outputs = torch.ops.tilewise.quantize(**arguments)
    of_data = zip(scales, outputs[3:6])
    used_scales = Scales._make([x if scale is None else scale for scale, x in of_data])
    k_mean = outputs[6] if steps.smooth_k else None
    v_mean, v_drift = outputs[7:] if steps.smooth_v else (None, None)
    v_drift = v_drift if inputs[2].shape[3] > TWO_LEVELS else None
    q8, k8, v_t = outputs[:3]
    return Quantized(q8, k8, v_t, used_scales, k_mean, v_mean, v_drift)


def _run(
    call: CallQuantize,
    inputs: tuple[Tensor, Tensor, Tensor],
    *,
    scales: GivenScales,
    of: Lengths,
    rotary: Rotary | None,
) -> Quantized:
    (q, k, v), run = inputs, call.run
    if run is None:  # a call of lazily negated tensors is known by nothing, and so always new
        q, k, v = resolved((q, k, v))
        scales, of = GivenScales._make(resolved(scales)), Lengths._make(resolved(of))
        cos, sin = resolved((None, None) if rotary is None else rotary[:2])
        rotary = None if rotary is None else Rotary(cos, sin, interleaved=rotary.interleaved)
        tables = ("rotary.cos", cos), ("rotary.sin", sin)
        named = *zip("qkv", (q, k, v)), *zip(NAMES, scales), *zip(Lengths._fields, of), *tables
        check_elements(named)
        quantizer = plain if has_no_sequence(of) else quantizer_for(q)
        run = call.run = quantizer.prepare_quantize(call.steps)
    return run(q, k, v, scales, of, rotary)


def quantizer_for(x: Tensor) -> Any:
    """The module with `prepare_quantize` and `prepare_transposed` for a tensor."""
    name = QUANTIZERS.get(x.device.type)
    return plain if name is None else importlib.import_module(name)


def _kernel(args: tuple) -> tuple[Tensor, ...]:
    values, tensors = dict(zip(ARGUMENTS, args)), args[: len(OPERANDS)]
    check_devices(OPERANDS, tensors)
    (q, k, v), scales, of = args[:3], GivenScales._make(args[3:6]), record_of(Lengths, values)
    rotary = None if values["cos"] is None else record_of(Rotary, values)
    key = "quantize", args[len(OPERANDS) :]
    steps = Steps(values["rotate"], values["smooth_k"], smooth_v=values["smooth_v"])
    call = known(tensors, key, lambda: CallQuantize(steps))
    quantized = _run(call, (q, k, v), scales=scales, of=of, rotary=rotary)
    # What is given or left out is not returned: an output may neither alias an input nor be None
    of_data = (x if scale is None else None for scale, x in zip(scales, quantized.scales))
    fp32 = *of_data, quantized.k_mean, quantized.v_mean, quantized.v_drift
    return *quantized[:3], *(q.new_empty(0, dtype=torch.float32) if x is None else x for x in fp32)


def _fake(args: tuple) -> tuple[Tensor, ...]:
    values = dict(zip(ARGUMENTS, args))
    check_devices(OPERANDS, args[: len(OPERANDS)])
    (q, k, v), scales, starts = args[:3], args[3:6], values["cu_seqlens_q"]
    smooth_k, smooth_v = values["smooth_k"], values["smooth_v"]
    sequences, columns = q.shape[0], columns_of(v.shape[1])
    if starts is not None:
        sequences = starts.shape[0] - 1
        columns = packed_columns(v.shape[1], sequences)

    def number(is_there: bool, shape: tuple[int, ...]) -> Tensor:
        return q.new_empty(shape if is_there else (0,), dtype=torch.float32)

    heads = sequences, k.shape[2]
    return (
        *(x.new_empty(x.shape, dtype=FP8) for x in (q, k)),
        v.new_empty((v.shape[0], *v.shape[2:], columns), dtype=FP8),
        *(number(x is None, heads) for x in scales),
        number(smooth_k, (*heads, k.shape[3])),
        number(smooth_v, (*heads, v.shape[3])),
        number(smooth_v and v.shape[3] > TWO_LEVELS, ()),
    )


operator(
    "quantize",
    SCHEMA,
    kernel=_kernel,
    fake=_fake,
    backward=refusing(
        "8-bit tensors have no gradient: pass what tilewise.quantize returns, and "
        'backward="bf16", to tilewise.attention'
    ),
    is_looped=True,
)
