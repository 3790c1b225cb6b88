"""flash-attn 2's functions as drop-in replacements, argument for argument. Each translates its
convention into a call of `tilewise.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

import torch

from ..errors import ArgumentError, Words
from ..features import refuse
from ..kernels.common.quantized import GivenScales, Quantized
from ..keywords import refuses_others, unexpected
from ..ops import context_parallel as shards
from ..ops.calls import Entry, find
from ..problem import Extras
from ..tile.dropout_numbers import check_dropout, draw_rng_of
from . import fp8, paths
from .attention import attention
from .call import call, launch
from .checks import check_form, check_rank, in_order, with_contiguous_rows
from .chunks import check_chunk, chunk_of_batch, chunk_of_packed, mask_of_chunks, within_chunk
from .compiled import fits_node, has_node
from .paths import ONE_BYTE
from .scalars import Numbers, Window, as_bound, check_bounds, check_flag, check_size, is_long
from .values import check_longest

Tensor = torch.Tensor
WORDS = Words(
    scale="softmax_scale",
    window="window_size",
    sinks="learnable_sink",
    shape="(batch, seqlen, nheads, headdim)",
    order="where nheads comes before seqlen, pass them transposed",
)


@refuses_others("tilewise.flash_attn_func")
@has_node
def flash_attn_func(
    q: Tensor | Quantized,
    k: Tensor | None,
    v: Tensor | None,
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
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **unknown: Never,
):
    """flash-attn 2's `flash_attn_func`, argument for argument; newer arguments are keyword-only.

    Example:
        >>> import torch, tilewise
        >>> q = k = v = torch.randn(1, 16, 2, 32)
        >>> tilewise.flash_attn_func(q, k, v, 0.0, None, True).shape
        torch.Size([1, 16, 2, 32])

    Numbers may be numpy's. A row without keys has lse -inf (flash-attn 2: +inf). q, k and v whose
    last dimension is not contiguous are copied, with a PerformanceWarning.

    Args:
        q: (batch, seqlen_q, nheads, headdim); fp16, bf16, fp32 (fp64 on the CPU).
        k: (batch, seqlen_k, nheads_k, headdim), nheads a multiple of nheads_k.
        v: (batch, seqlen_k, nheads_k, headdim_v).
        dropout_p: probability of dropping a probability; bits come from torch's generator.
        softmax_scale: positive; 1 / sqrt(headdim) by default.
        causal: bottom-right causal mask.
        window_size: (left, right) or a tensor of two, both ends included; -1 is no limit.
        softcap: scores become softcap * tanh(score / softcap); 0 is none.
        alibi_slopes: fp32 (nheads,) or (batch, nheads).
        deterministic: gradients are the same bits in every run.
        return_attn_probs: returns (out, lse, None); flash-attn's third item is a dropout mask.
        return_lse: returns (out, lse).
        learnable_sink: (nheads,), a logit per head that joins the softmax without a value.
        attention_chunk: flash-attn 3's number of keys per chunk: a query attends to the keys of the
            chunk that its diagonal is in; 0 is no chunks.
        num_splits: a hint, checked and without effect.
        pack_gqa: a hint, checked and without effect.
        q_descale: with q, k and v of float8_e4m3fn, as in `tilewise.attention`; in place of q, k
            and v there may be what `tilewise.quantize` returns, None and None.
        k_descale: as q_descale, for k.
        v_descale: as k_descale, for v.
        out_dtype: dtype of `out` for FP8 q, k and v.

    Returns:
        out (batch, seqlen_q, nheads, headdim_v); lse is fp32 (batch, nheads, seqlen_q), natural
        log.

    Raises:
        ArgumentError: an argument is wrong.
        NotImplementedError: no backend supports the call; the message has each backend's reason.
    """
    if unknown:
        raise unexpected("tilewise.flash_attn_func", unknown)
    inputs: tuple[Any, Any, Any] = q, k, v
    flags = causal, softcap, deterministic, return_attn_probs, return_lse, num_splits, pack_gqa
    entry, optional = None, (alibi_slopes, learnable_sink)
    has_more = not (q_descale is k_descale is v_descale is out_dtype is None)
    is_sharded = shards.contexts and shards.is_sharded()
    if not (has_more or is_sharded) and is_plain(dropout_p, attention_chunk):
        if torch.compiler.is_dynamo_compiling() and fits_node(inputs, window_size):
            options: Any = {"softmax_scale": softmax_scale, "softcap": softcap, "causal": causal}
            options |= {"window_size": window_size, "num_splits": num_splits, "pack_gqa": pack_gqa}
            options |= {"learnable_sink": learnable_sink, "return_attn_probs": return_attn_probs}
            options |= {"alibi_slopes": alibi_slopes, "deterministic": deterministic}
            return paths.traced("flash_attn_func", q=q, k=k, v=v, return_lse=return_lse, **options)
        plain = "flash_attn", softmax_scale, *flags
        entry, _ = find((*inputs, *optional), plain=plain, window=window_size)
        if entry is not None and entry.call is not None:
            out, lse = launch(entry.call, inputs, optional=optional, layout="bshd")
            return (out, lse, None) if return_attn_probs else (out, lse) if return_lse else out
    check_hints(num_splits, pack_gqa)
    out, lse = _attend(
        inputs,
        Extras(alibi_slopes, learnable_sink),
        numbers=Numbers(softmax_scale, softcap, dropout_p, _flag(causal), window=window_size),
        scales=GivenScales(q_descale, k_descale, v_descale),
        out_dtype=out_dtype,
        deterministic=deterministic,
        attention_chunk=attention_chunk,
        entry=entry,
    )
    return _returned(out, lse, return_attn_probs=return_attn_probs, return_lse=return_lse)


@refuses_others("tilewise.flash_attn_varlen_func")
@has_node
def flash_attn_varlen_func(
    q: Tensor | Quantized,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
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
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **unknown: Never,
):
    """flash-attn 2's `flash_attn_varlen_func`, argument for argument: sequences of any lengths,
    packed end to end.

    Example:
        >>> import torch, tilewise
        >>> q = k = v = torch.randn(160 + 300, 2, 32)  # two sequences
        >>> cu_seqlens = torch.tensor([0, 160, 460], dtype=torch.int32)
        >>> tilewise.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, causal=True).shape
        torch.Size([460, 2, 32])

    Args:
        q: (total_q, nheads, headdim).
        k: (total_k, nheads_k, headdim), or pages (num_pages, page_size, nheads_k, headdim) with
            `block_table`.
        v: shaped as k, with its own headdim_v.
        cu_seqlens_q: int32 (batch + 1,), where sequences begin, on the device of q; never copied to
            the host.
        cu_seqlens_k: as cu_seqlens_q, for keys; None with `block_table` and `seqused_k`.
        max_seqlen_q: as in `tilewise.attention`, optional here, too.
        max_seqlen_k: upper bound of key lengths, refused where one on a CPU is longer; optional.
        block_table: int32 (batch, pages), the pages of each sequence; without gradients.
        seqused_q: int32 (batch,), valid queries of each sequence; not with `block_table`.
        seqused_k: int32 (batch,), valid keys of each sequence, in pages counted from the first.

    The other arguments are those of `flash_attn_func`.

    Returns:
        out (total_q, nheads, headdim_v); lse is fp32 (nheads, total_q).

    Raises:
        ArgumentError: an argument is wrong.
        NotImplementedError: no backend supports the call; the message has each backend's reason.
    """
    if unknown:
        raise unexpected("tilewise.flash_attn_varlen_func", unknown)
    has_keys = cu_seqlens_k is not None or not (block_table is None or seqused_k is None)
    if cu_seqlens_q is None or not has_keys:
        raise ArgumentError(
            "cu_seqlens_q and cu_seqlens_k say where sequences begin: pass both, or block_table "
            "and seqused_k in place of cu_seqlens_k"
        )
    lengths: Any = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if getattr(cu_seqlens_q, "is_cpu", False):
        check_longest(lengths, (cu_seqlens_q, cu_seqlens_k), used=(seqused_q, seqused_k))
    inputs: tuple[Any, Any, Any] = q, k, v
    flags = causal, softcap, deterministic, return_attn_probs, return_lse, num_splits, pack_gqa
    entry, optional = None, (alibi_slopes, learnable_sink, seqused_k, seqused_q)
    optional = *optional, cu_seqlens_q, cu_seqlens_k
    has_more = not (block_table is q_descale is k_descale is v_descale is out_dtype is None)
    if not has_more and is_plain(dropout_p, attention_chunk):
        if torch.compiler.is_dynamo_compiling() and fits_node(inputs, window_size):
            options: Any = {"softmax_scale": softmax_scale, "softcap": softcap, "causal": causal}
            options |= {"window_size": window_size, "num_splits": num_splits, "pack_gqa": pack_gqa}
            options |= {"learnable_sink": learnable_sink, "return_attn_probs": return_attn_probs}
            options |= {"alibi_slopes": alibi_slopes, "deterministic": deterministic}
            options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, **lengths}
            options |= {"seqused_q": seqused_q, "seqused_k": seqused_k, "return_lse": return_lse}
            return paths.traced("flash_attn_varlen_func", q=q, k=k, v=v, **options)
        bounds = as_bound(max_seqlen_q), as_bound(max_seqlen_k)
        plain = "flash_attn_varlen", softmax_scale, *bounds, *flags
        entry, _ = find((*inputs, *optional), plain=plain, window=window_size, checks_values=True)
        if entry is not None and entry.call is not None:
            out, lse = launch(entry.call, inputs, optional=optional, layout="bshd", words=WORDS)
            return (out, lse, None) if return_attn_probs else (out, lse) if return_lse else out
    check_bounds(max_seqlen_q, max_seqlen_k)
    check_hints(num_splits, pack_gqa)
    out, lse = _attend(
        inputs,
        Extras(alibi_slopes, learnable_sink, seqused_k, seqused_q, cu_seqlens_q, cu_seqlens_k),
        numbers=Numbers(softmax_scale, softcap, dropout_p, _flag(causal), window=window_size),
        scales=GivenScales(q_descale, k_descale, v_descale),
        out_dtype=out_dtype,
        deterministic=deterministic,
        attention_chunk=attention_chunk,
        entry=entry,
        max_seqlen_q=max_seqlen_q,
        block_table=block_table,
    )
    return _returned(out, lse, return_attn_probs=return_attn_probs, return_lse=return_lse)


def _attend(
    inputs: tuple[Any, Any, Any],
    extras: Extras,
    *,
    numbers: Numbers,
    scales: GivenScales,
    out_dtype: torch.dtype | None,
    deterministic: bool,
    attention_chunk: int,
    entry: Entry | None,
    max_seqlen_q: Any = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a call whose signature is new."""
    q, k, v = inputs
    dropout_p, chunk = check_dropout(numbers.dropout_p), check_chunk(attention_chunk)
    is_fp8 = isinstance(q, Quantized) or getattr(q, "dtype", None) in ONE_BYTE
    is_fp8 = is_fp8 or not (scales.q is out_dtype is None) or k is None or v is None
    has_scales = not (scales.k is scales.v is None)
    if is_fp8 or (has_scales and block_table is None):  # pages have scales over 16-bit q, too
        if block_table is not None:
            refuse("fp8", block_table=block_table)
        check_flag("deterministic", deterministic)
        refuse("fp8", dropout_p=dropout_p or None, attention_chunk=chunk or None)
        return fp8.attend(
            inputs,
            scales,
            extras=extras,
            numbers=numbers,
            max_seqlen_q=max_seqlen_q,
            out_dtype=out_dtype,
            words=WORDS,
        )
    if block_table is not None:
        refuse("cached", seqused_q=extras.seqused_q, dropout_p=dropout_p or None)
        shards.refuse_shards()
        used, starts = extras.seqused_k, extras.cu_seqlens_k
        if used is None and starts is not None:
            check_form("cu_seqlens_k", starts, q=starts)
            used = starts.diff()
        numbers = numbers._replace(window=numbers.sides("window_size"))
        return _by_attention(
            with_contiguous_rows(zip("qkv", inputs)),
            extras,
            within_chunk(numbers, chunk),
            page_table=block_table,
            seqused_k=used,
            cu_seqlens_q=extras.cu_seqlens_q,
            max_seqlen_q=max_seqlen_q if type(max_seqlen_q) is int else None,
            deterministic=deterministic,
            k_descale=scales.k,
            v_descale=scales.v,
            mask_mod=mask_of_chunks(chunk) if chunk else None,
        )
    if shards.contexts and shards.is_sharded() and extras.cu_seqlens_q is None:
        if chunk:
            raise NotImplementedError(
                "attention_chunk inside tilewise.distributed.context_parallel: pass "
                "mask_mod=tilewise.mods.chunked(size) to tilewise.attention"
            )
        return _by_attention(inputs, extras, numbers=numbers, deterministic=deterministic)
    q, k, v = with_contiguous_rows(zip("qkv", inputs))
    if not all(x is y for x, y in zip(inputs, (q, k, v))):
        entry = None  # what is launched are others
    is_packed = extras.cu_seqlens_q is not None
    if is_packed:
        q, k, v = in_order(q, k, v, "bshd", True)
        chunks = chunk_of_packed(chunk, extras)
    else:
        check_rank(q, k, v=v, words=WORDS)
        chunks = chunk_of_batch(chunk, q, k=k)
    rng = draw_rng_of(q) if dropout_p else None
    out, lse = call(
        q,
        k,
        v=v,
        extras=extras._replace(dropout_rng=rng, captured=chunks.captured),
        numbers=within_chunk(numbers, chunk),
        deterministic=deterministic,
        mods=chunks.mods,
        is_long=is_packed and is_long(max_seqlen_q),
        words=WORDS,
        entry=entry,
    )
    return (out.squeeze(0), lse.squeeze(0)) if is_packed else (out, lse)


def _by_attention(
    inputs: Sequence[Any], extras: Extras, numbers: Numbers, **arguments: Any
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of `attention` with these numbers and this ALiBi, in whatever context."""
    q, k, v = inputs
    results: Any = attention(
        q,
        k,
        v=v,
        alibi_slopes=extras.alibi_slopes,
        sinks=extras.sinks,
        **numbers._asdict(),
        return_lse=True,
        **arguments,
    )
    return results


def is_plain(dropout_p: float, attention_chunk: int) -> bool:
    """Neither dropout nor chunks, which make tensors of their own at every call."""
    has_none = type(dropout_p) in (int, float) and dropout_p == 0
    return has_none and type(attention_chunk) is int and attention_chunk == 0


def _flag(causal: bool) -> bool:
    remark = ", which means bottom-right here; tilewise.attention takes 'top_left', too"
    return check_flag("causal", causal, remark=remark)


def _returned(out: Tensor, lse: Tensor, return_attn_probs: bool, return_lse: bool):
    if check_flag("return_attn_probs", return_attn_probs):
        return out, lse, None
    return (out, lse) if check_flag("return_lse", return_lse) else out


def check_hints(num_splits: int, pack_gqa: bool | None, sm_margin: int = 0) -> None:
    """Arguments of flash-attn that have no effect here."""
    for name, hint in (("num_splits", num_splits), ("sm_margin", sm_margin)):
        if type(hint) is not int or hint < 0:
            check_size(name, hint)
    if pack_gqa is not None:
        check_flag("pack_gqa", pack_gqa, remark=" or None")
