"""Calls with FP8 products: q, k and v of float8_e4m3fn with their scales, or a `Quantized`."""

from __future__ import annotations

from typing import Any

import torch

from .. import dispatch
from ..errors import OURS, ArgumentError, Words
from ..features import FEATURES, refuse_gradients
from ..kernels.common.kept import ones
from ..kernels.common.quantized import (
    FP8,
    GivenScales,
    Quantized,
    Scales,
    columns_of,
    packed_columns,
)
from ..ops import fp8 as ops
from ..ops.attention import needs_dispatcher
from ..ops.calls import find
from ..problem import Call, Extras, Scalars
from ..tile.quantize import is_one_byte
from .checks import check_descale, check_device, check_extras, check_tensor, check_tensors, in_order
from .paths import DESCALES, check_alone
from .scalars import (
    PACKED,
    Numbers,
    as_bound,
    check_bounds,
    check_causal,
    check_layout,
    check_numbers,
    is_long,
)
from .values import check_same_lengths, check_signs, check_values

Tensor = torch.Tensor
OUT_DTYPES = torch.bfloat16, torch.float16, torch.float32


def attend(
    inputs: tuple[Any, Any, Any],
    scales: GivenScales,
    *,
    extras: Extras,
    numbers: Numbers,
    max_seqlen_q: Any = None,
    layout: str = "bshd",
    out_dtype: torch.dtype | None = None,
    backward: str | None = None,
    backend: str | None = None,
    words: Words = OURS,
    wants_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` in the order of the caller, of q, k and v, or a `Quantized` in place of q.
    `lse` is right where it is wanted.
    """
    is_raw, x = not isinstance(inputs[0], Quantized), inputs[0]
    tensors = *inputs, *scales
    if not is_raw:
        check_alone(inputs, scales)
        tensors = x.q, x.k, x.v_t, *x.scales, x.k_mean, x.v_mean, x.v_drift, *(x.source or ())[:3]
    plain = "fp8", is_raw, *numbers[:-1], layout, backward, backend, str(out_dtype)
    plain = *plain, as_bound(max_seqlen_q)  # all numbers but the window
    entry, _ = find((*tensors, *extras[:6]), plain=plain, window=numbers.window, checks_values=True)
    checked = None if entry is None else entry.call
    is_packed = extras.cu_seqlens_q is not None or extras.cu_seqlens_k is not None
    if checked is None:
        check_layout(layout)
        if is_raw:
            check_raw(inputs, scales, words=words)
    if is_raw:
        x = _of_raw(inputs, scales, extras.cu_seqlens_q, layout=layout, is_packed=is_packed)
    else:
        x = _as_batch(x, is_packed, layout=layout)
    names = ("q_descale", "k_descale") if is_raw else ("scales.q", "scales.k")
    check_signs(zip(names, x.scales))
    if checked is None:
        checked = check(
            x,
            is_raw=is_raw,
            extras=extras,
            numbers=numbers,
            max_seqlen_q=max_seqlen_q,
            out_dtype=check_out_dtype(out_dtype),
            backward=backward,
            backend=backend,
            words=words,
        )
        if entry is not None:
            entry.call = checked
    if checked.has_extras and (entry is None or x.q.is_cpu):
        check_values(x.q, x.k, extras=extras, words=words)
    if x.lengths is not None:
        check_same_lengths(x.lengths, extras)
    out, lse = ops.attention(checked, x, extras, wants_lse)
    if is_packed:
        return out.squeeze(0), lse.squeeze(0)
    return out.transpose(1, 2) if layout == "bhsd" else out, lse


def _of_raw(
    inputs: tuple[Any, Any, Any], scales: GivenScales, starts: Tensor | None, **order: Any
) -> Quantized:
    """q, k and v in order, with scales as kernels take them; `v_t` is v."""
    q, k, v = inputs
    q, k, v = in_order(q, k, v=v, **order)
    sequences = q.shape[0] if starts is None else starts.shape[0] - 1
    one: Any = ones_of(k, sequences) if any(scale is None for scale in scales) else None
    of_q, of_k, of_v = (
        one if scale is None else expanded_scale(name, scale, k=k, sequences=sequences)
        for name, scale in zip(DESCALES, scales)
    )
    return Quantized(q, k, v_t=v, scales=Scales(of_q, of_k, of_v))


def expanded_scale(name: str, x: Tensor, k: Tensor, sequences: int) -> Tensor:
    """A scale as kernels take it, fp32 (sequences, nheads_k)."""
    checked: Tensor = check_descale(name, x, stored=k, batch=sequences)
    return checked.expand(sequences, k.shape[2]).contiguous()


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
    check_layout(layout, packed=PACKED)
    return x._replace(q=x.q.unsqueeze(0), k=x.k.unsqueeze(0), v_t=x.v_t.unsqueeze(0))


def check(
    x: Quantized,
    *,
    is_raw: bool,
    extras: Extras,
    numbers: Numbers,
    max_seqlen_q: Any,
    out_dtype: torch.dtype,
    backward: str | None,
    backend: str | None,
    words: Words,
) -> Call:
    """The call of 4-dimensional tensors."""
    dispatch.check_backend(backend)
    check_bounds(max_seqlen_q)
    align = check_causal(numbers.causal)
    check_extras(x.q, x.k, extras=extras, words=words)
    if is_raw:
        check_tensors(x.q, x.k, v=x.v_t, words=words, kinds=(FP8,))
    else:
        starts = extras.cu_seqlens_q
        check_quantized(x, x.q.shape[0] if starts is None else starts.shape[0] - 1)
    scalars = check_numbers(numbers, x.q, words)
    check_shift(x, scalars, extras)
    needs_grad = check_backward(x, backward, extras)
    headdim_v = x.v_t.shape[3 if is_raw else 2]
    has_long = extras.cu_seqlens_q is not None and is_long(max_seqlen_q)
    problem = ops.problem_of(x.q, x.k, headdim_v, extras, scalars, align, is_long=has_long)
    checked = Call(problem, scalars, backend, needs_grad)
    checked.out_dtype, checked.is_transposed = out_dtype, not is_raw
    return checked


def check_raw(inputs: tuple[Any, Any, Any], scales: GivenScales, words: Words) -> None:
    """q, k and v of the caller are all of e4m3."""
    named: list[tuple[str, Any]] = list(zip(words[:3], inputs))
    q = inputs[0]
    for name, t in named:
        if t is None:
            raise ArgumentError(
                f"{name} is None: pass {', '.join(words[:3])}, or a tilewise.Quantized in place "
                f"of {words.q}"
            )
        check_tensor(name, t)
    if not any(is_one_byte(t) for _, t in named):
        raise ArgumentError(
            f"{words.q}.dtype is {q.dtype}: q_descale, k_descale, v_descale, out_dtype and "
            "backward need q, k and v of torch.float8_e4m3fn or a tilewise.Quantized: leave them "
            "out, or quantise with tilewise.quantize"
        )
    for name, t in named:
        if is_one_byte(t) and t.dtype != FP8:
            raise NotImplementedError(
                f"{name}.dtype is {t.dtype}: FP8 products need torch.float8_e4m3fn; quantise with "
                "tilewise.quantize"
            )
    for name, t in named:
        if t.dtype != FP8:
            raise ArgumentError(
                f"{name}.dtype is {t.dtype} and {words.q}.dtype is {q.dtype}: FP8 products need "
                "q, k and v of torch.float8_e4m3fn; quantise all three (tilewise.quantize), or "
                f"leave {words.q} in bfloat16 with k and v as an 8-bit cache"
            )
    refuse_gradients("fp8", [*named, *zip(DESCALES, scales)])


def check_quantized(x: Quantized, sequences: int) -> None:
    """A `Quantized` of 4-dimensional tensors and so many sequences."""
    check_tensors(x.q, x.k, v=x.k, kinds=(FP8,))
    nheads_k, headdim = x.k.shape[2:]
    batch, total = x.k.shape[:2]
    allowed = [packed_columns(total, sequences)]  # no set, which would fix symbolic sizes
    if sequences == batch:
        allowed.insert(0, columns_of(total))
    shape = tuple(x.v_t.shape)
    if x.v_t.dtype != FP8 or len(shape) != 4 or shape[:2] != (batch, nheads_k):
        raise ArgumentError(
            f"v_t of a Quantized is {x.v_t.dtype} of shape {shape}: it must be as "
            "tilewise.quantize returns it"
        )
    named: list[tuple[str, Tensor | None, tuple[int, ...]]]
    named = [(f"scales.{name}", s, (sequences, nheads_k)) for name, s in x.scales._asdict().items()]
    named.append(("k_mean", x.k_mean, (sequences, nheads_k, headdim)))
    named.append(("v_mean", x.v_mean, (sequences, nheads_k, shape[2])))
    named.append(("v_drift", x.v_drift, ()))
    for name, t, _ in named:
        if t is not None and t.dtype != torch.float32:
            raise ArgumentError(
                f"{name} of a Quantized is {t.dtype}: it must be float32, as tilewise.quantize "
                "returns it"
            )
    if shape[3] not in allowed:
        named.append(("v_t", x.v_t, (*shape[:3], columns_of(total))))
    for name, t, expected in named:
        if t is not None and tuple(t.shape) != expected:
            raise ArgumentError(
                f"{name} of a Quantized has shape {tuple(t.shape)} and this call needs {expected}: "
                "pass the same cu_seqlens_q and cu_seqlens_k to tilewise.quantize and "
                "tilewise.attention"
            )
    for name, t in (("k", x.k), ("v_t", x.v_t), *((name, t) for name, t, _ in named)):
        if t is not None:
            check_device(f"{name} of a Quantized", t, of="q", q=x.q)
    refuse_gradients("fp8", [("q", x.q), ("k", x.k), ("v_t", x.v_t)])


def check_shift(x: Quantized, scalars: Scalars, extras: Extras) -> None:
    """Scores of k without its mean are shifted, by as much for all keys of a row: what is not the
    same for shifted scores is refused.
    """
    if x.k_mean is None:
        return
    for name in (name for name, feature in FEATURES.items() if feature.depends_on_shift):
        if getattr(scalars, name, 0) > 0 or getattr(extras, name, None) is not None:
            raise NotImplementedError(
                f"{name} with a Quantized of a smoothed k: without the mean of k its scores are "
                f'shifted, and {name} depends on that; quantise with smooth="v", or smooth=False'
            )


def check_backward(x: Quantized, backward: Any, extras: Extras) -> bool:
    """Whether gradients are to be computed, in bf16."""
    if backward not in (None, "bf16"):
        raise ArgumentError(f'backward={backward!r}: it must be "bf16", or None for no gradient')
    source = x.source
    named = [*zip("qkv", source or ()), *zip(Extras._fields, extras.optional)]
    learned = (name for name, t in named if t is not None and t.requires_grad)
    name = next(learned, None) if torch.is_grad_enabled() else None
    if name is not None and (backward is None or source is None):
        remedy = 'pass backward="bf16"' if source is not None else "use a tilewise.Quantized of "
        if source is None:
            remedy += 'tensors that require a gradient, with backward="bf16"'
        raise NotImplementedError(
            f"{name}.requires_grad: FP8 products have no gradient of their own; {remedy} for "
            "straight-through gradients, detach() it, or call under torch.no_grad()"
        )
    return name is not None


def check_out_dtype(dtype: Any) -> torch.dtype:
    """The dtype of out, bf16 by default."""
    if dtype is None:
        return torch.bfloat16
    if dtype not in OUT_DTYPES:
        raise ArgumentError(
            f"out_dtype={dtype!r}: it must be torch.bfloat16, torch.float16 or torch.float32"
        )
    return dtype
