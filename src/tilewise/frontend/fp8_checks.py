"""Argument validation of calls with FP8 products: dtypes, scales, `Quantized`, what is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..errors import OURS, ArgumentError, Words
from ..kernels.common.quantized import FP8, Lengths, Quantized, columns_of, packed_columns
from ..problem import Extras
from ..tile.quantize import is_one_byte
from .checks import knows_values
from .qkv import check_device, check_kind, check_tensor, check_tensors

Tensor = torch.Tensor
OUT_DTYPES = torch.bfloat16, torch.float16, torch.float32


def check_raw(q: Any, k: Any, v: Any, descales: tuple[Any, ...], words: Words = OURS) -> None:
    """q, k and v, all of e4m3, in (batch, seqlen, nheads, headdim) order."""
    named = list(zip(words[:3], (q, k, v)))
    for name, x in named:
        if is_one_byte(x) and x.dtype != FP8:
            raise NotImplementedError(
                f"{name}.dtype is {x.dtype}: FP8 products need torch.float8_e4m3fn; quantise with "
                "tilewise.quantize"
            )
    for name, x in named:
        if x.dtype != FP8:
            raise ArgumentError(
                f"{name}.dtype is {x.dtype} and {words.q}.dtype is {q.dtype}: FP8 products need "
                "q, k and v of torch.float8_e4m3fn; quantise all three (tilewise.quantize), or "
                f"leave {words.q} in bfloat16 with k and v as an 8-bit cache"
            )
    check_tensors(q, k, v=v, words=words, kinds=(FP8,))
    for name, x in zip(("q_descale", "k_descale", "v_descale"), descales):
        if x is not None:
            check_tensor(name, x)
    refuse_grad((*named, *zip(("q_descale", "k_descale", "v_descale"), descales)))


def refuse_sixteen_bits(q: Tensor, words: Words = OURS) -> None:
    """Arguments of FP8 products with a q that has none."""
    raise ArgumentError(
        f"{words.q}.dtype is {q.dtype}: q_descale, k_descale, v_descale, out_dtype and backward "
        "need q, k and v of torch.float8_e4m3fn or a tilewise.Quantized: leave them out, or "
        "quantise with tilewise.quantize"
    )


def refuse_grad(named: Iterable[tuple[str, Tensor | None]]) -> None:
    """Refuses 8-bit tensors and scales that require a gradient."""
    for name, x in named:
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name}.requires_grad: 8-bit tensors and their scales have no gradient; detach() "
                "them, or quantise with tilewise.quantize, and pass its result and "
                'backward="bf16" to tilewise.attention'
            )


def descale(name: str, x: Tensor, k: Tensor, batch: int) -> Tensor:
    """A scale as kernels take it, fp32 (batch, nheads_k)."""
    nheads_k = k.shape[2]
    check_tensor(name, x)
    if tuple(x.shape) not in ((), (nheads_k,), (batch, nheads_k)):
        raise ArgumentError(
            f"{name} has shape {tuple(x.shape)}: it must be (), ({nheads_k},) or "
            f"{(batch, nheads_k)}, one number, one per key head, or one per sequence and key "
            "head, for q, too"
        )
    check_kind(name, x, q=k, dtypes=(torch.float32,), of="k")
    return x.expand(batch, nheads_k).contiguous()


def check_signs(named: Iterable[tuple[str, Tensor | None]]) -> None:
    """Refuses scales of q and k below 0, where values may be read: kernels compare products before
    they are scaled. That of v may have any sign.
    """
    for name, x in named:
        if x is not None and knows_values(x) and bool((x < 0).any()):
            raise ArgumentError(
                f"{name} has {x.min().item():.3g}: a scale of q or k must be at least 0; negate q "
                "instead"
            )


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


def check_lengths(made: Lengths, extras: Extras) -> None:
    """A call has the lengths that a `Quantized` was made with; rows that were in use may be fewer
    now. Two tensors are compared where values may be read.
    """
    for name, before in made._asdict().items():
        now = getattr(extras, name)
        if before is None or before is now:
            continue
        is_other = now is None or now.shape != before.shape
        if now is not None and not is_other and now.device == before.device and knows_values(now):
            differs = now != before if name.startswith("cu_") else now > before
            is_other = bool(differs.any())
        if is_other:
            raise ArgumentError(
                f"{name} is {_value(now)} and the Quantized was made with {_value(before)}: pass "
                f"the same {name} to tilewise.quantize and tilewise.attention"
            )


def _value(x: Tensor | None) -> Any:
    """What a message says of lengths: their values, where they may be read."""
    if x is None:
        return None
    return x.tolist() if knows_values(x) else f"{x.dtype} of shape {tuple(x.shape)}"


def check_shift(x: Quantized, softcap: float, sinks: Tensor | None) -> None:
    """Scores of k without its mean are shifted, by as much for all keys of a row: what is not the
    same for shifted scores is refused.
    """
    if x.k_mean is None:
        return
    for name, is_given in (("softcap", softcap > 0), ("sinks", sinks is not None)):
        if is_given:
            raise NotImplementedError(
                f"{name} with a Quantized of a smoothed k: without the mean of k its scores are "
                f'shifted, and {name} depends on that; quantise with smooth="v", or smooth=False'
            )


def check_backward(x: Quantized | None, backward: Any, sinks: Tensor | None) -> bool:
    """Whether gradients are to be computed, in bf16."""
    if backward not in (None, "bf16"):
        raise ArgumentError(f'backward={backward!r}: it must be "bf16", or None for no gradient')
    source = None if x is None else x.source
    required = [
        name
        for name, t in zip(("q", "k", "v", "sinks"), (*(source or (None,) * 4)[:3], sinks))
        if t is not None and t.requires_grad and torch.is_grad_enabled()
    ]
    if required and (backward is None or source is None):
        remedy = 'pass backward="bf16"' if source is not None else "use a tilewise.Quantized of "
        if source is None:
            remedy += 'tensors that require a gradient, with backward="bf16"'
        raise NotImplementedError(
            f"{required[0]}.requires_grad: FP8 products have no gradient of their own; {remedy} "
            "for straight-through gradients, detach() it, or call under torch.no_grad()"
        )
    return bool(required)


def check_out_dtype(dtype: Any) -> torch.dtype:
    """The dtype of out, bf16 by default."""
    if dtype is None:
        return torch.bfloat16
    if dtype not in OUT_DTYPES:
        raise ArgumentError(
            f"out_dtype={dtype!r}: it must be torch.bfloat16, torch.float16 or torch.float32"
        )
    return dtype
