"""flash-attn 2's functions as drop-in faces, argument for argument. Each turns its own convention
into a call as `tilewise.attention` makes it.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError, Words
from ..ops import context_parallel as shards
from ..ops.calls import find
from ..problem import Extras
from ..tile.random_bytes import check_dropout, draw_rng
from . import sharded
from .attention import as_bound, call, is_long, launch
from .chunks import check_chunk, chunk_band, chunk_of_batch, chunk_of_packed
from .kv_cache import varlen_of_pages
from .qkv import check_rank, in_order
from .scalars import Window, as_int, band, check_bounds, check_flag

Tensor = torch.Tensor
WORDS = Words(
    scale="softmax_scale", sinks="learnable_sink", shape="(batch, seqlen, nheads, headdim)"
)


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
    attention_chunk: int = 0,
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
    lse -inf (flash-attn 2: +inf). `dropout_p` draws from torch's generator.

    `attention_chunk`, flash-attn 3's: keys in chunks of so many, of which a query sees the one that
    its diagonal lies in; 0 is one chunk of all. `window_size` may be a tensor of two, and numbers
    may be numpy's. `num_splits` and `pack_gqa` are hints, which choose among equal results in
    flash-attn: they are checked and change nothing here. Raises ArgumentError.
    """
    sides = window_size if type(window_size) is tuple else (window_size,)
    flags = causal, softcap, deterministic, return_attn_probs, return_lse, num_splits, pack_gqa
    learned = alibi_slopes, learnable_sink
    if shards.entered and shards.is_sharded():
        _check_hints(num_splits, pack_gqa)
        numbers = dropout_p, softmax_scale, softcap
        options = causal, window_size, deterministic, attention_chunk
        out, lse = sharded.flash_attn((q, k, v), learned, numbers, *options)
        return _returned(out, lse, return_attn_probs, return_lse)
    entry = None
    if is_plain(dropout_p, attention_chunk):
        entry = find((q, k, v, *learned), ("flash_attn", softmax_scale, *flags, *sides))
        if entry is not None and entry.call is not None:
            out, lse = launch(entry.call, q, k, v, learned, "bshd")
            return (out, lse, None) if return_attn_probs else (out, lse) if return_lse else out
    _check_hints(num_splits, pack_gqa)
    q, k, v = _ranked(q, k, v)
    chunk = check_chunk(attention_chunk)
    chunks = chunk_of_batch(chunk, q, k)
    rng = _rng(dropout_p, q)
    out, lse = call(
        *(q, k, v),
        extras=Extras(*learned, dropout_rng=rng, captured=chunks.captured),
        numbers=(softmax_scale, softcap, dropout_p),
        window=_window(window_size, causal, chunk),
        deterministic=deterministic,
        mods=chunks.mods,
        words=WORDS,
        entry=entry,
    )
    return _returned(out, lse, return_attn_probs, return_lse)


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
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
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
    return flash_attn_func(
        *(q, k, v, *flags),
        return_lse=return_lse,
        learnable_sink=learnable_sink,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
    )


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
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
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
    return flash_attn_func(
        *(q, k, v, *flags),
        return_lse=return_lse,
        learnable_sink=learnable_sink,
        attention_chunk=attention_chunk,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
    )


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
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
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
    Newer arguments, returns and errors are those of `flash_attn_func`, lse (nheads, total_q);
    with `block_table`, int32 (batch, pages), k and v are pages (num_pages, page_size, nheads_k,
    headdim), and there is no gradient.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ArgumentError("cu_seqlens_q and cu_seqlens_k say where sequences begin: pass both")
    lengths = seqused_k, seqused_q, cu_seqlens_q, cu_seqlens_k
    sides = window_size if type(window_size) is tuple else (window_size,)
    flags = causal, softcap, deterministic, return_attn_probs, return_lse, num_splits, pack_gqa
    bounds = as_bound(max_seqlen_q), as_bound(max_seqlen_k)
    learned = alibi_slopes, learnable_sink
    entry = None
    if block_table is None and is_plain(dropout_p, attention_chunk):
        words = "flash_attn_varlen", softmax_scale, *bounds, *flags, *sides
        entry = find((q, k, v, *learned, *lengths), words)
        if entry is not None and entry.call is not None:
            out, lse = launch(entry.call, q, k, v, (*learned, *lengths), "bshd")
            return (out, lse, None) if return_attn_probs else (out, lse) if return_lse else out
    check_bounds(max_seqlen_q, max_seqlen_k)
    _check_hints(num_splits, pack_gqa)
    if block_table is not None:
        numbers = _flag(causal), softmax_scale, window_size, softcap
        others = attention_chunk, dropout_p
        found = varlen_of_pages(q, k, v, block_table, lengths, learned, numbers, others)
        return _returned(*found, return_attn_probs, return_lse)
    q, k, v = in_order(q, k, v, "bshd", True)
    chunk = check_chunk(attention_chunk)
    chunks = chunk_of_packed(chunk, lengths)
    rng = _rng(dropout_p, q)
    out, lse = call(
        *(q, k, v),
        extras=Extras(*learned, *lengths, None, rng, chunks.captured),
        numbers=(softmax_scale, softcap, dropout_p),
        window=_window(window_size, causal, chunk),
        deterministic=deterministic,
        mods=chunks.mods,
        is_long=is_long(max_seqlen_q),
        words=WORDS,
        entry=entry,
    )
    return _returned(out.squeeze(0), lse.squeeze(0), return_attn_probs, return_lse)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None, *flags: Any, **options: Any
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
    *flags: Any,
    **options: Any,
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


def is_plain(dropout_p: float, attention_chunk: int) -> bool:
    """Neither dropout nor chunks, which make tensors of their own at every call."""
    has_none = type(dropout_p) in (int, float) and dropout_p == 0
    return has_none and type(attention_chunk) is int and attention_chunk == 0


def _ranked(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check_rank(q, k, v, WORDS)
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
    remark = ", which means bottom-right here; tilewise.attention takes 'top_left', too"
    return check_flag("causal", causal, remark)


def _returned(out: Tensor, lse: Tensor, return_attn_probs: bool, return_lse: bool):
    if check_flag("return_attn_probs", return_attn_probs):
        return out, lse, None
    return (out, lse) if check_flag("return_lse", return_lse) else out


def _rng(dropout_p: float, q: Tensor) -> Tensor | None:
    return draw_rng(q.device) if check_dropout(dropout_p) else None


def _window(window_size: Window, causal: bool, chunk: int) -> tuple[str, int, int]:
    sides = band(window_size, _flag(causal), "window_size")
    return "bottom_right", *chunk_band(chunk, sides)


def _check_hints(num_splits: int, pack_gqa: bool | None) -> None:
    splits = as_int(num_splits)
    if splits is None or splits < 0:
        raise ArgumentError(
            f"num_splits={num_splits!r}: it must be an int, and 0 leaves the choice to us"
        )
    if pack_gqa is not None:
        check_flag("pack_gqa", pack_gqa, " or None")
