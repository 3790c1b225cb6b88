"""The public functions: three faces of one operation. Each turns its own convention into one
Problem and calls one op.
"""

from __future__ import annotations

import torch

from . import ops
from .checks import Window, band, check, check_rank
from .errors import ArgumentError
from .problem import NO_EXTRAS, Call, Extras, extras_of

Tensor = torch.Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seqused_k: Tensor | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(scale * q k^T) v, computed tile by tile without storing the score
    matrix.

    >>> import torch, tilewise
    >>> q = torch.randn(2, 128, 8, 64)  # (batch, seqlen_q, nheads, headdim)
    >>> k, v = torch.randn(2, 2, 256, 2, 64).unbind(0)  # each key head serves 4 query heads
    >>> tilewise.attention(q, k, v, causal=True, window=(63, 0)).shape
    torch.Size([2, 128, 8, 64])

    Shapes are (batch, seqlen, nheads, headdim), or (batch, nheads, seqlen, headdim) with
    `layout="bhsd"`; any strides, as long as the last dimension is contiguous. `v` may have another
    headdim than `q` and `k`. fp16, bf16, fp32 (fp64 on the CPU).

    causal: True or "bottom_right" lets the last query see the last key; "top_left" lets the first
    query see the first key only.
    window: (left, right), how many keys before and after its diagonal a query sees, both ends
    included; None or -1: no limit.
    softcap: scores become softcap * tanh(score / softcap), before masks and ALiBi.
    alibi_slopes: fp32 (nheads,) or (batch, nheads); adds -slope * |distance to the diagonal|.
    sinks: (nheads,), one learnable logit a head that takes its share of the softmax and gives no
    value.
    seqused_k: int32 (batch,), how many keys of each row of the batch are real, the rest being
    padding on the right.
    deterministic: the same bits in every backward. backend: the name of one to force.

    Returns `out`, shaped as `q` with v's headdim, and with `return_lse` also the log-sum-exp of
    each row's scores: natural log, fp32, (batch, nheads, seqlen_q), differentiable, sink included.
    A row that sees no key has out 0 and lse -inf
    (its sink's logit, if it has one). Raises ArgumentError for a wrong argument and
    NotImplementedError, with every backend's reason, where nothing serves it.

    FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithms 1 and 2.
    """
    align = _alignment(causal)
    if layout not in ("bshd", "bhsd"):
        raise ArgumentError(f"layout={layout!r}: it must be 'bshd' or 'bhsd'")
    check_rank(q, k, v)
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = _call(
        q,
        k,
        v,
        extras=extras_of(alibi_slopes, sinks, seqused_k),
        scale=scale,
        softcap=softcap,
        align=align,
        window=band(window, causal is not False),
        deterministic=deterministic,
        backend=backend,
    )
    if layout == "bhsd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _alignment(causal: bool | str) -> str:
    """Where the diagonal ends. `causal is not False` says whether the band is closed."""
    if causal in ("bottom_right", "top_left"):
        return causal
    if causal is True or causal is False:
        return "bottom_right"
    raise ArgumentError(
        f"causal={causal!r}: it must be False, True, 'bottom_right' (what True means) or 'top_left'"
    )


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    extras: Extras,
    scale: float | None,
    softcap: float | None,
    align: str,
    window: tuple[int, int],
    deterministic: bool,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Every face ends here: cast as autocast asks, check once, go."""
    is_watched = ops.is_watched(q, k, v, *extras)
    if is_watched or torch._C._is_any_autocast_enabled():
        q, k, v = ops.autocast(q, k, v)
    key = None
    if (
        not is_watched
        and extras is NO_EXTRAS
        and (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
    ):
        key = (
            *(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
            *(q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
            *(scale, softcap, align, window, deterministic, backend),
        )
    call = _calls.get(key)
    if call is None:
        asked = dict(scale=scale, softcap=softcap, align=align, window=window)
        checked = check(q, k, v, extras=extras, deterministic=deterministic, **asked)
        call = Call(checked.problem, checked.scalars, backend)
        if key is not None:
            if len(_calls) >= KEPT_CALLS:
                _calls.clear()
            _calls[key] = call
    return ops.attention(call, q, k, v, extras, is_watched)


# Calls as they look from outside: shapes, strides, dtypes, devices, numbers
_calls: dict[tuple | None, Call] = {}
KEPT_CALLS = 4096


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
):
    """flash-attn 2's `flash_attn_func`, argument for argument, with the newer ones keyword-only
    after it.

    >>> import torch, tilewise
    >>> q = k = v = torch.randn(1, 16, 2, 32)
    >>> tilewise.flash_attn_func(q, k, v, 0.0, None, True).shape
    torch.Size([1, 16, 2, 32])

    (batch, seqlen, nheads, headdim); causal is bottom-right; `window_size` counts both ends in, -1
    is no limit; GQA by head counts. Returns out; (out, lse) with `return_lse`; (out, lse, None)
    with `return_attn_probs` (flash-attn's third item is a dropout mask). A row that sees no key has
    lse -inf (flash-attn 2: +inf). `num_splits` and `pack_gqa` choose among equal results: 0 and
    None leave that to us. Raises ArgumentError, and NotImplementedError for `dropout_p` > 0 and for
    forced splits or packing.
    """
    _refuse_dropout(dropout_p)
    _refuse("num_splits", num_splits, (0, 1), "split-KV decoding is not here yet: leave it 0")
    _refuse("pack_gqa", pack_gqa, (None, False), "GQA packing is not here yet: leave it None")
    out, lse = _call(
        *_ranked(q, k, v),
        extras=extras_of(alibi_slopes, learnable_sink),
        scale=softmax_scale,
        softcap=softcap,
        align="bottom_right",
        window=band(window_size, causal, "window_size"),
        deterministic=deterministic,
    )
    if return_attn_probs:
        return out, lse, None
    return (out, lse) if return_lse else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
):
    """`flash_attn_func` on q, k and v stacked in one tensor (batch, seqlen, 3, nheads, headdim),
    read in place.

    >>> import torch, tilewise
    >>> tilewise.flash_attn_qkvpacked_func(torch.randn(1, 16, 3, 2, 32), causal=True).shape
    torch.Size([1, 16, 2, 32])

    Arguments, returns and errors are those of `flash_attn_func`.
    """
    q, k, v = _unpack("qkv", qkv, 3)
    flags = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    return flash_attn_func(q, k, v, *flags, return_lse=return_lse, learnable_sink=learnable_sink)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
):
    """`flash_attn_func` on k and v stacked in one tensor (batch, seqlen_k, 2, nheads_k, headdim),
    read in place.

    >>> import torch, tilewise
    >>> q, kv = torch.randn(1, 4, 6, 32), torch.randn(1, 16, 2, 2, 32)
    >>> tilewise.flash_attn_kvpacked_func(q, kv).shape
    torch.Size([1, 4, 6, 32])

    Arguments, returns and errors are those of `flash_attn_func`.
    """
    k, v = _unpack("kv", kv, 2)
    flags = (
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    return flash_attn_func(q, k, v, *flags, return_lse=return_lse, learnable_sink=learnable_sink)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`: (batch, nheads, seqlen, headdim), causal
    top-left, no copies.

    >>> import torch, tilewise
    >>> q = torch.randn(1, 4, 16, 32)
    >>> ours = tilewise.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> torch.allclose(ours, theirs, atol=1e-5)
    True

    Fewer key heads than query heads need `enable_gqa=True`, as in torch. Raises ArgumentError, and
    NotImplementedError for `attn_mask` and `dropout_p` > 0. Inputs of rank 3 are taken as one batch
    row, as torch takes them.
    """
    if attn_mask is not None:
        raise NotImplementedError(
            "attn_mask: masks as tensors are not here yet; causal and windows are arguments of "
            "tilewise.attention"
        )
    _refuse_dropout(dropout_p)
    if all(isinstance(x, torch.Tensor) and x.dim() == 3 for x in (query, key, value)):
        batched = (x.unsqueeze(0) for x in (query, key, value))
        return scaled_dot_product_attention(
            *batched, None, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        ).squeeze(0)
    query, key, value = _ranked(query, key, value)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ArgumentError(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}: pass enable_gqa=True to "
            "share key heads"
        )
    return attention(
        query, key, value, causal="top_left" if is_causal else False, scale=scale, layout="bhsd"
    )


def _ranked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check_rank(q, k, v)
    return q, k, v


def _unpack(name: str, packed: Tensor, parts: int) -> tuple[Tensor, ...]:
    if not isinstance(packed, torch.Tensor) or packed.dim() != 5 or packed.shape[2] != parts:
        shape = tuple(packed.shape) if isinstance(packed, torch.Tensor) else type(packed).__name__
        raise ArgumentError(
            f"{name} has shape {shape}: it must be (batch, seqlen, {parts}, nheads, headdim)"
        )
    return packed.unbind(2)


def _refuse_dropout(dropout_p: float) -> None:
    if not 0 <= dropout_p < 1:
        raise ArgumentError(f"dropout_p={dropout_p}: it must be at least 0 and below 1")
    if dropout_p > 0:
        raise NotImplementedError(
            f"dropout_p={dropout_p}: dropout inside the kernel is not here yet; pass 0.0 (in eval "
            "mode it is 0)"
        )


def _refuse(name: str, value, served: tuple, reason: str) -> None:
    if value not in served:
        raise NotImplementedError(f"{name}={value}: {reason}")
