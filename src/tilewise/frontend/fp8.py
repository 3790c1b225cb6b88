"""Calls with FP8 products: q, k and v of float8_e4m3fn with their scales, or a `Quantized`."""

from __future__ import annotations

from typing import Any

import torch

from .. import dispatch
from ..errors import ArgumentError
from ..kernels.common.kept import ones
from ..kernels.common.quantized import Quantized, Scales
from ..ops import fp8 as ops
from ..ops.attention import needs_dispatcher
from ..ops.calls import find
from ..problem import Call, Scalars
from ..tile.quantize import is_one_byte
from .checks import check_extras, check_values
from .fp8_checks import (
    check_backward,
    check_lengths,
    check_out_dtype,
    check_quantized,
    check_raw,
    check_shift,
    check_signs,
    descale,
    refuse_grad,
    refuse_sixteen_bits,
)
from .paths import Fp8Arguments
from .qkv import check_tensor, in_order
from .scalars import (
    as_bound,
    band,
    check_bounds,
    check_causal,
    check_layout,
    check_numbers,
    is_long,
)

Tensor = torch.Tensor


def attend(
    q: Any, k: Any, v: Any, given: Fp8Arguments, wants_lse: bool = True
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` in the order of the caller; `lse` is right where it is wanted."""
    extras, is_quantized = given.extras, isinstance(q, Quantized)
    if is_quantized:
        if not (k is v is None):
            raise ArgumentError(
                "k and v with a Quantized, which holds all three: pass it in place of q, and "
                "None for k and v"
            )
        if not (given.q_descale is given.k_descale is given.v_descale is None):
            name = next(name for name, x in zip(Fp8Arguments._fields, given) if x is not None)
            raise ArgumentError(
                f"{name} with a Quantized, which holds its scales: leave it out, or pass it to "
                "tilewise.quantize in scales="
            )
        inputs = q.q, q.k, q.v_t, *q.scales, q.k_mean, q.v_mean, q.v_drift, *(q.source or ())[:3]
    else:
        inputs = q, k, v, *given[:3]
    plain = "fp8", is_quantized, given.causal, given.scale, given.softcap, given.layout
    plain = *plain, given.backward, given.backend, str(given.out_dtype)
    plain = *plain, as_bound(given.max_seqlen_q)
    entry, _ = find((*inputs, *extras[:6]), plain, window=given.window, checks_values=True)
    checked = None if entry is None else entry.call
    is_packed = extras.cu_seqlens_q is not None or extras.cu_seqlens_k is not None
    if is_quantized:
        x = _as_batch(q, is_packed, layout=given.layout)
    else:
        x = _of_raw(q, k, v=v, given=given, is_packed=is_packed, is_new=checked is None)
    names = ("scales.q", "scales.k") if is_quantized else ("q_descale", "k_descale")
    check_signs(zip(names, x.scales))
    if checked is None:
        checked = check(x, is_quantized, given)
        if entry is not None:
            entry.call = checked
    if checked.has_extras and (entry is None or x.q.is_cpu):
        check_values(x.q, x.k, extras=extras, words=given.words)
    if x.lengths is not None:
        check_lengths(x.lengths, extras)
    out, lse = ops.attention(checked, x, extras, wants_lse)
    if is_packed:
        out, lse = out.squeeze(0), lse.squeeze(0)
    elif given.layout == "bhsd":
        out = out.transpose(1, 2)
    return out, lse


def _of_raw(
    q: Any, k: Any, v: Any, given: Fp8Arguments, is_packed: bool, is_new: bool
) -> Quantized:
    """q, k and v in order, with their scales; `v_t` is v as it came."""
    if is_new:
        check_layout(given.layout)
        for name, x in zip(given.words[:3], (q, k, v)):
            if x is None:
                raise ArgumentError(
                    f"{name} is None: pass {', '.join(given.words[:3])}, or a tilewise.Quantized "
                    f"in place of {given.words.q}"
                )
            check_tensor(name, x)
        if not any(is_one_byte(x) for x in (q, k, v)):
            refuse_sixteen_bits(q, given.words)
    q, k, v = in_order(q, k, v, given.layout, is_packed)
    if is_new:
        check_raw(q, k, v=v, descales=given[:3], words=given.words)
    starts = given.extras.cu_seqlens_q
    sequences = q.shape[0] if starts is None else starts.shape[0] - 1
    one: Any = None
    if any(x is None for x in given[:3]):
        one = ones_of(k, sequences)
    named = zip(Fp8Arguments._fields, given[:3])
    scales = [one if x is None else descale(name, x, k=k, batch=sequences) for name, x in named]
    return Quantized(q, k, v_t=v, scales=Scales._make(scales))


def ones_of(k: Tensor, sequences: int) -> Tensor:
    """Scales of 1: on a GPU without a launch of their own."""
    count = sequences * k.shape[2]
    if k.is_cuda and not needs_dispatcher((k,)) and (filled := ones(count, k.device)) is not None:
        return filled.view(sequences, k.shape[2])
    return k.new_ones(sequences, k.shape[2], dtype=torch.float32)


def _as_batch(x: Quantized, is_packed: bool, layout: str) -> Quantized:
    """A `Quantized` of 4-dimensional tensors: packed sequences are a batch of 1."""
    if is_packed != (x.q.dim() == 3):
        said = "cu_seqlens_q and cu_seqlens_k" if is_packed else "no cu_seqlens"
        raise ArgumentError(
            f"q of the Quantized has {x.q.dim()} dimensions, and this call has {said}: pass the "
            "same cu_seqlens_q and cu_seqlens_k to tilewise.quantize and tilewise.attention"
        )
    if not is_packed:
        return x
    if layout != "bshd":
        raise ArgumentError(
            f"layout={layout!r}: packed sequences are (total, nheads, headdim), so leave it out"
        )
    return x._replace(q=x.q.unsqueeze(0), k=x.k.unsqueeze(0), v_t=x.v_t.unsqueeze(0))


def check(x: Quantized, is_quantized: bool, given: Fp8Arguments) -> Call:
    """The call of 4-dimensional tensors."""
    extras, words = given.extras, given.words
    dispatch.check_backend(given.backend)
    check_layout(given.layout)
    check_bounds(given.max_seqlen_q)
    align = check_causal(given.causal)
    left, right = band(given.window, given.causal is not False, name=words.window)
    out_dtype = check_out_dtype(given.out_dtype)
    check_extras(x.q, x.k, extras=extras, words=words)
    starts = extras.cu_seqlens_q
    sequences = x.q.shape[0] if starts is None else starts.shape[0] - 1
    if is_quantized:
        check_quantized(x, sequences)
        refuse_grad(zip(("q", "k", "v_t"), x[:3]))
    scale, softcap = check_numbers(
        given.scale, given.softcap, headdim=x.q.shape[3], dtype=torch.float32, words=words
    )
    check_shift(x, softcap, sinks=extras.sinks)
    needs_grad = check_backward(x if is_quantized else None, given.backward, sinks=extras.sinks)
    scalars = Scalars(scale, softcap, left=left, right=right)
    headdim_v = x.v_t.shape[2 if is_quantized else 3]
    has_long = extras.cu_seqlens_q is not None and is_long(given.max_seqlen_q)
    problem = ops.problem_of(x.q, x.k, headdim_v, extras, scalars, align, is_long=has_long)
    checked = Call(problem, scalars, given.backend, needs_grad)
    checked.out_dtype, checked.is_transposed = out_dtype, is_quantized
    return checked
