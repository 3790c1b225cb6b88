"""The drop-in faces: flash-attn 2's functions and torch's, argument for argument. Each turns its
own convention into a call of `tilewise.attention`.
"""

from __future__ import annotations

import functools

import torch

from .api import attention, call
from .checks import check_rank
from .dropout import draw_rng
from .errors import ArgumentError
from .modifiers import NO_MODIFIERS, Modifiers
from .mods import Mask, mask
from .problem import OPEN, Mods, extras_of
from .scalars import Window, band, check_window

Tensor = torch.Tensor


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
    lse -inf (flash-attn 2: +inf). `dropout_p` draws from torch's generator. `num_splits` and
    `pack_gqa` choose among equal results: 0 and None leave that to us. Raises ArgumentError, and
    NotImplementedError for forced splits or packing.
    """
    _refuse("num_splits", num_splits, (0, 1), "split-KV decoding is not here yet: leave it 0")
    _refuse("pack_gqa", pack_gqa, (None, False), "GQA packing is not here yet: leave it None")
    out, lse = call(
        *_ranked(q, k, v),
        extras=extras_of(alibi_slopes, learnable_sink, *(None,) * 5, _rng(dropout_p, q)),
        scale=softmax_scale,
        softcap=softcap,
        window=("bottom_right", *band(window_size, _flag(causal), "window_size")),
        deterministic=deterministic,
        dropout_p=dropout_p,
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


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
):
    """flash-attn 2's `flash_attn_varlen_func`, argument for argument: sequences of any lengths,
    packed one behind the other.

    >>> import torch, tilewise
    >>> q = k = v = torch.randn(160 + 300, 2, 32)  # two sequences
    >>> cu_seqlens = torch.tensor([0, 160, 460], dtype=torch.int32)
    >>> tilewise.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, causal=True).shape
    torch.Size([460, 2, 32])

    q is (total_q, nheads, headdim), k and v (total_k, nheads_k, headdim); cu_seqlens int32 (batch +
    1,), on the device of q, and never copied to the host. `max_seqlen_q` and `max_seqlen_k` may be
    left out. `seqused_q` and `seqused_k`, int32 (batch,): how many rows of a sequence are real.
    Returns and errors are those of `flash_attn_func`, lse (nheads, total_q); `block_table` raises
    NotImplementedError.
    """
    if block_table is not None:
        raise NotImplementedError("block_table: a paged KV cache is not here yet; pass None")
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ArgumentError("cu_seqlens_q and cu_seqlens_k say where sequences begin: pass both")
    out, lse = attention(
        q,
        k,
        v,
        causal=_flag(causal),
        scale=softmax_scale,
        window=check_window(window_size, "window_size"),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=learnable_sink,
        seqused_k=seqused_k,
        seqused_q=seqused_q,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        deterministic=deterministic,
        return_lse=True,
    )
    if return_attn_probs:
        return out, lse, None
    return (out, lse) if return_lse else out


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None, *flags, **options
):
    """`flash_attn_varlen_func` on q, k and v stacked in one tensor (total, 3, nheads, headdim),
    read in place.

    >>> import torch, tilewise
    >>> starts = torch.tensor([0, 3, 16], dtype=torch.int32)
    >>> tilewise.flash_attn_varlen_qkvpacked_func(torch.randn(16, 3, 2, 32), starts).shape
    torch.Size([16, 2, 32])

    What follows `max_seqlen` is as in `flash_attn_varlen_func` from `dropout_p` on, without
    `block_table`; so are returns and errors.
    """
    q, k, v = _unpack("qkv", qkv, 3, 1)
    bounds = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *bounds, *flags, **options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *flags,
    **options,
):
    """`flash_attn_varlen_func` on k and v stacked in one tensor (total_k, 2, nheads_k, headdim),
    read in place.

    >>> import torch, tilewise
    >>> starts = torch.tensor([0, 3, 16], dtype=torch.int32)
    >>> q, kv = torch.randn(16, 4, 32), torch.randn(16, 2, 2, 32)
    >>> tilewise.flash_attn_varlen_kvpacked_func(q, kv, starts, starts).shape
    torch.Size([16, 4, 32])

    What follows is as in `flash_attn_varlen_func` from `dropout_p` on, without `block_table`; so
    are returns and errors.
    """
    k, v = _unpack("kv", kv, 2, 1)
    bounds = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, k, v, *bounds, *flags, **options)


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

    Fewer key heads than query heads need `enable_gqa=True`, as in torch. `attn_mask` broadcasts
    over (batch, nheads, seqlen_q, seqlen_k): bools say which keys are seen, numbers are added to
    the scores, with a gradient. A row that sees no key gives 0 (torch: NaN). Raises ArgumentError.
    Inputs of rank 3 are taken as one batch row, as torch takes them.
    """
    if all(isinstance(x, torch.Tensor) and x.dim() == 3 for x in (query, key, value)):
        batched = (x.unsqueeze(0) for x in (query, key, value))
        return scaled_dot_product_attention(
            *batched, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        ).squeeze(0)
    query, key, value = _ranked(query, key, value)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ArgumentError(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}: pass enable_gqa=True to "
            "share key heads"
        )
    if attn_mask is not None and is_causal:
        raise ArgumentError(
            "attn_mask and is_causal: torch takes one of them, and so do we; the mask can say both"
        )
    bias, modifiers = _masked_by(attn_mask, (*query.shape[:3], key.shape[2]))
    out, _ = call(
        *(x.transpose(1, 2) for x in (query, key, value)),
        extras=extras_of(*(None,) * 6, bias, _rng(dropout_p, query), *modifiers.captured),
        scale=scale,
        softcap=None,
        window=("top_left", OPEN, 0) if is_causal else ("bottom_right", OPEN, OPEN),
        deterministic=False,
        dropout_p=dropout_p,
        mods=modifiers.mods,
    )
    return out.transpose(1, 2)


def _masked_by(
    attn_mask: Tensor | None, sizes: tuple[int, int, int, int]
) -> tuple[Tensor | None, Modifiers]:
    """An attn_mask of torch's for a call of these sizes: numbers are a bias, bools a mask."""
    if attn_mask is None:
        return None, NO_MODIFIERS
    if not isinstance(attn_mask, torch.Tensor) or attn_mask.dim() > 4:
        shape = getattr(attn_mask, "shape", type(attn_mask).__name__)
        raise ArgumentError(
            f"attn_mask has shape {shape}: it must be a tensor that broadcasts over (batch, "
            "nheads, seqlen_q, seqlen_k)"
        )
    x = attn_mask[(None,) * (4 - attn_mask.dim())]
    if any(n not in (1, size) for n, size in zip(x.shape, sizes)):
        raise ArgumentError(
            f"attn_mask has shape {tuple(attn_mask.shape)}: it must broadcast over (batch, nheads, "
            f"seqlen_q, seqlen_k), here {tuple(sizes)}"
        )
    if x.dtype != torch.bool:
        return x, NO_MODIFIERS
    if 0 in sizes:
        return None, NO_MODIFIERS  # there is no pair to hide
    return None, Modifiers(Mods(mask=_reads(tuple(n > 1 for n in x.shape))), (x,))


def _reads(along: tuple[bool, ...]) -> str:
    """The name of the mask that is a bool tensor, read `along` those of its four dimensions that
    are not shared.
    """
    return _reading(along).key


_reads._dynamo_marked_constant = True  # a compiler takes the name, and traces no tracing


@functools.cache
def _reading(along: tuple[bool, ...]) -> Mask:
    x = torch.ones([1 + is_own for is_own in along], dtype=torch.bool, device="cpu")
    return mask(lambda *at: x[tuple(i if is_own else 0 for i, is_own in zip(at, along))])


def _ranked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check_rank(q, k, v)
    return q, k, v


def _unpack(name: str, packed: Tensor, parts: int, dim: int = 2) -> tuple[Tensor, ...]:
    is_tensor = isinstance(packed, torch.Tensor)
    if not is_tensor or packed.dim() != dim + 3 or packed.shape[dim] != parts:
        shape = tuple(packed.shape) if is_tensor else type(packed).__name__
        rows = "batch, seqlen" if dim == 2 else "total"
        raise ArgumentError(
            f"{name} has shape {shape}: it must be ({rows}, {parts}, nheads, headdim)"
        )
    return packed.unbind(dim)


def _flag(causal: bool) -> bool:
    if causal not in (False, True):  # 0 and 1 are, too
        raise ArgumentError(
            f"causal={causal!r}: it must be False or True, which means bottom-right here; "
            "tilewise.attention takes 'top_left', too"
        )
    return bool(causal)


def _rng(dropout_p: float, q: Tensor) -> Tensor | None:
    return draw_rng(q.device) if dropout_p else None


def _refuse(name: str, value, served: tuple, reason: str) -> None:
    if value not in served:
        raise NotImplementedError(f"{name}={value}: {reason}")
