"""`tilewise.attention`: its arguments, and which path a call takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Never

import torch

from ..dispatch import check_backend
from ..errors import HEADS_FIRST, OURS
from ..features import refuse
from ..kernels.common.cached import Cached
from ..kernels.common.quantized import GivenScales, Quantized
from ..keywords import refuses_others, unexpected
from ..ops import attention as ops
from ..ops import context_parallel as shards
from ..ops.calls import Entry, find
from ..problem import OPEN, Call, Extras
from ..tile.dropout_numbers import check_dropout, draw_rng_of
from . import invariance, paths
from .cached import attend_cached, check_cached, is_cached, launch_step, train_cached
from .call import call, launch
from .checks import in_order, sizes_of
from .compiled import fits_node, has_node
from .paths import ONE_BYTE
from .scalars import (
    Numbers,
    Window,
    as_bound,
    check_bounds,
    check_causal,
    check_flag,
    is_long,
    longest_of,
    step_bound,
)
from .values import check_longest

if TYPE_CHECKING:
    from ..mods.block_mask import BlockMask

Tensor = torch.Tensor


@refuses_others("tilewise.attention")
@has_node
def attention(
    q: Tensor | Quantized,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    dropout_p: float = 0,  # not 0.0: a compiler takes that for a variable
    dropout_rng: Tensor | None = None,
    causal: bool | str = False,
    window: Window = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    split_size: int | None = None,
    out: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backward: str | None = None,
    layout: str = "bshd",
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(scale * q k^T) v, computed tile by tile without storing the scores.

    Example:
        >>> import torch, tilewise
        >>> q = torch.randn(2, 128, 8, 64)  # (batch, seqlen_q, nheads, headdim)
        >>> k, v = torch.randn(2, 2, 256, 2, 64).unbind(0)  # 4 query heads per key head
        >>> tilewise.attention(q, k, v, causal=True, window=(63, 0)).shape
        torch.Size([2, 128, 8, 64])

        Packed, two sequences of 100 and 28 tokens:

        >>> q, k, v = torch.randn(3, 128, 8, 64).unbind(0)  # (total, nheads, headdim)
        >>> ends = torch.tensor([0, 100, 128], dtype=torch.int32)
        >>> tilewise.attention(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True).shape
        torch.Size([128, 8, 64])

        Paged, one query for each of two sequences, of 40 and 9 keys in pages of 16:

        >>> q, pages = torch.randn(2, 1, 8, 64), torch.randn(2, 4, 16, 2, 64)
        >>> table = torch.tensor([[3, 0, 2], [1, 0, 0]], dtype=torch.int32)
        >>> used = torch.tensor([40, 9], dtype=torch.int32)
        >>> tilewise.attention(q, pages[0], pages[1], page_table=table, seqused_k=used).shape
        torch.Size([2, 1, 8, 64])

    Tensors may have any strides with a contiguous last dimension. dtypes are fp16, bf16 and fp32,
    and fp64 on the CPU. k and v may also be a KV cache of float8_e4m3fn or int8, and q, k and v
    float8_e4m3fn, for FP8 products (see the page on FP8). On a GPU scores must stay below 2^27 in
    magnitude, and below 2^24 for gradients. TILEWISE_CHECK=1 in the environment refuses q and k
    whose norms allow more, and checks the values of lengths, which synchronizes.

    Args:
        q: (batch, seqlen_q, nheads, headdim); (total_q, nheads, headdim) with `cu_seqlens_q`; or
            the result of `tilewise.quantize`, in place of q, k and v.
        k: (batch, seqlen_k, nheads_k, headdim), nheads a multiple of nheads_k; (total_k, nheads_k,
            headdim) with `cu_seqlens_k`; (num_pages, page_size, nheads_k, headdim) with
            `page_table`.
        v: shaped as k, with its own headdim_v.

    Scores:
        scale: softmax scale, positive; 1 / sqrt(headdim) by default.
        softcap: scores become softcap * tanh(score / softcap), before masks and ALiBi.
        alibi_slopes: fp32 (nheads,) or (batch, nheads); adds -slope * abs(distance to the
            diagonal).
        sinks: (nheads,), a learnable logit per head, below inf; joins the softmax without a value.
        bias: added to the scores, dtype of q or fp32, (batch or 1, nheads or 1, seqlen_q or 1,
            seqlen_k or 1); differentiable. -inf hides a key. A row of -1e9 and the like attends to
            all keys alike, as in torch (see Troubleshooting, NaN).
        score_mod: FlexAttention's function of (score, b, h, q_idx, kv_idx), applied to the scaled
            and capped score, before ALiBi, bias and masks. Captured float tensors that require grad
            get gradients. Under torch.compile create it outside, with `tilewise.scores.score`.
        dropout_p: probability of dropping a probability, rounded to a multiple of 1/256; the
            remaining ones are rescaled.
        dropout_rng: int64 (2,), seed and offset on the device of q; drawn from torch's generator by
            default.

    Masks:
        causal: True or "bottom_right": the last query attends up to the last key; "top_left": the
            first query attends to the first key alone.
        window: (left, right), the keys before and after its diagonal that a query attends to, both
            ends included; None or -1 is no limit.
        mask_mod: a predicate of (b, h, q_idx, kv_idx), of what `tilewise.mods.trace` lists, or a
            `Mask`: which keys a query attends to, in addition to `causal` and `window`. It is
            evaluated for every pair. Captured tensors get no gradient. Positions count from 0 in
            each sequence: q_idx from its first query, but from its first key, as queries are its
            last ones, with `page_table`, `out`, `split_size`, an 8-bit k, or `cu_seqlens_q` without
            `cu_seqlens_k`. Under torch.compile create it outside of the graph.
        block_mask: a mask whose hidden tiles are skipped: the result of
            `tilewise.sparse.create_block_mask`, or FlexAttention's BlockMask. Not with `causal`,
            `window` and `mask_mod`, which join it as masks.

    Packed sequences:
        cu_seqlens_q: int32 (batch + 1,), 0 and the end of each sequence's queries, which are packed
            end to end. Without `cu_seqlens_k`: packed queries over a KV cache. Rows behind the last
            end are padding: out and gradients are 0 there and lse -inf, and `out=` stays as it is.
        cu_seqlens_k: as cu_seqlens_q, for keys. Lengths stay on the device.
        max_seqlen_q: upper bound of query lengths, refused where one on a CPU is longer. On a GPU a
            hint: over 2048 it selects the tile for long sequences, else their mean length does, and
            with a KV cache on Hopper it allows faster kernels (docs/design/cache.md, chunks). With
            one that is too small `out` is as right, and slower.
        max_seqlen_k: upper bound of key lengths; it has no effect, also where it is too small.
        seqused_q: int32 (batch,), valid queries of each packed sequence; the others have out 0 and
            lse -inf.
        seqused_k: int32 (batch,), valid keys of each sequence; the remaining keys are padding. With
            a KV cache: its keys, which include those of the call's queries, the last ones.

    KV cache:
        page_table: int32 (batch, pages): key j of sequence b is row j % page_size of page
            page_table[b, j // page_size]. Unused entries and rows may hold any values.
        split_size: keys per split, counted from key 0; splits are folded in order, so that a row's
            bits depend on the row alone, in prefill, chunks and decoding. None: the fastest order
            for each sequence, unless `tilewise.batch_invariant` is on (see the page on the cache).
        out: written in place and returned. `page_table`, `split_size`, `out` and 8-bit caches
            exclude dropout, bias, block_mask and score_mod; all but `split_size` exclude gradients.

    Eight bits:
        q_descale: fp32 scale for a float8_e4m3fn q, which represents q * q_descale: (), (nheads_k,)
            or (batch, nheads_k), as those of k and v then are; only v's may be negative; None is 1.
        k_descale: fp32 scale for an 8-bit k: (), one per key head (nheads_k,), per sequence and key
            head (batch, nheads_k), or per row, shaped as k without headdim; None is 1. Unused rows
            may have any scale.
        v_descale: as k_descale, for v.
        out_dtype: dtype of `out` for FP8 q, k and v: bfloat16 (default), float16 or float32.
        backward: "bf16": straight-through gradients for the tensors that were quantised, computed
            in bfloat16 on the dequantised values.

    Execution:
        layout: "bshd", or "bhsd" for (batch, nheads, seqlen, headdim).
        deterministic: gradients are the same bits in every run; on a CPU with as many threads.
        return_lse: whether to return the log-sum-exp, too.
        backend: the name of a backend to force.

    Returns:
        `out`, shaped as q with v's headdim. With `return_lse` also the log-sum-exp, natural log,
        fp32 (fp64 of fp64), (batch, nheads, seqlen_q), packed (nheads, total_q), differentiable,
        sink included. A row without keys has out 0 and lse -inf, or its sink's logit.

    Raises:
        ArgumentError: an argument is wrong.
        NotImplementedError: no backend supports the call; the message has each backend's reason.

    FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithms 1 and 2.
    """
    if unknown:
        raise unexpected("tilewise.attention", unknown)
    if max_seqlen_q is not None and getattr(cu_seqlens_q, "is_cpu", False):
        check_longest({"max_seqlen_q": max_seqlen_q}, (cu_seqlens_q,), used=(seqused_q,))
    # FP8 products have entries of their own
    is_fp8 = not (q_descale is out_dtype is backward is None)
    is_fp8 = is_fp8 or type(q) is Quantized or getattr(q, "dtype", None) in ONE_BYTE
    has_dropout = type(dropout_p) not in (int, float) or dropout_p != 0
    is_plain = not (is_fp8 or has_dropout) and mask_mod is score_mod is block_mask is None
    is_sharded = shards.contexts and shards.is_sharded()
    if is_sharded or torch.compiler.is_dynamo_compiling():
        # No `dict`, which a graph would guard
        options: Any = {"return_lse": return_lse, "causal": causal, "scale": scale, "sinks": sinks}
        options |= {"deterministic": deterministic, "alibi_slopes": alibi_slopes, "window": window}
        options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "backend": backend}
        options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "softcap": softcap}
        options |= {"seqused_q": seqused_q, "seqused_k": seqused_k, "layout": layout, "bias": bias}
        has_cache = not (page_table is split_size is k_descale is v_descale is out is None)
        has_cache = has_cache or (cu_seqlens_q is not None and cu_seqlens_k is None)
        if is_sharded:
            options |= dict(mask_mod=mask_mod, score_mod=score_mod, block_mask=block_mask)
            options |= dict(dropout_p=dropout_p, dropout_rng=dropout_rng, page_table=page_table)
            options |= dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
            options |= dict(split_size=split_size, out=out, out_dtype=out_dtype, backward=backward)
            return shards.innermost()(q=q, k=k, v=v, **options)
        if is_plain and not has_cache and fits_node((q, k, v), window):
            return paths.traced("attention", q=q, k=k, v=v, **options)
    entry = None
    if is_plain:
        plain = "attention", causal, scale, softcap, split_size, deterministic, layout, return_lse
        plain = *plain, backend, invariance.is_on
        if max_seqlen_q is not None or max_seqlen_k is not None:
            # Of a cache it says which kernels launch; of packed keys, which tile they take
            bound = as_bound if cu_seqlens_k is not None else step_bound
            plain = "attention with bounds", *plain, bound(max_seqlen_q), as_bound(max_seqlen_k)
        tensors: Any = q, k, v, page_table, seqused_k, cu_seqlens_q, alibi_slopes, sinks
        # Those of a decode step first, in its order
        tensors = *tensors, k_descale, v_descale, out, seqused_q, cu_seqlens_k, bias
        entry, addresses = find(tensors, plain=plain, window=window, checks_values=True)
        if entry is not None and entry.call is not None:
            if type(entry.call) is Call:
                extras = alibi_slopes, sinks, seqused_k, seqused_q, cu_seqlens_q, cu_seqlens_k, bias
                result = launch(entry.call, (q, k, v), optional=extras, layout=layout)
            else:
                result = launch_step(entry.call, tensors, addresses, return_lse, layout=layout)
            if result is not None:
                return result if return_lse else result[0]
    if max_seqlen_q is not None or max_seqlen_k is not None:
        check_bounds(max_seqlen_q, max_seqlen_k)
    check_flag("deterministic", deterministic)
    return_lse = check_flag("return_lse", return_lse)
    extras = Extras(alibi_slopes, sinks, seqused_k, seqused_q, cu_seqlens_q, cu_seqlens_k)
    numbers = Numbers(scale, softcap, dropout_p=dropout_p, causal=causal, window=window)
    optional: Any = dict(seqused_q=seqused_q, cu_seqlens_k=cu_seqlens_k, bias=bias)
    optional |= dict(mask_mod=mask_mod, block_mask=block_mask, score_mod=score_mod)
    optional |= dict(page_table=page_table, split_size=split_size, out=out)
    if is_fp8 or isinstance(q, Quantized) or k is None or v is None:
        refuse("fp8", **optional, dropout_p=dropout_p if has_dropout else None)
        scales = GivenScales(q_descale, k_descale, v_descale)
        options: Any = dict(layout=layout, out_dtype=out_dtype, backward=backward, backend=backend)
        options |= dict(extras=extras, numbers=numbers, max_seqlen_q=max_seqlen_q)
        outputs = paths.attend_fp8((q, k, v), scales, wants_lse=return_lse, **options)
        return outputs if return_lse else outputs[0]
    check_causal(causal)
    check_dropout(dropout_p)
    is_cache = out is not None or is_cached(k, page_table, cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if is_cache or not (split_size is k_descale is v_descale is None):
        refuse("cached", **optional, dropout_p=dropout_p or None)
        check_backend(backend)
        cached = Cached(q, k, v, page_table, extras=extras, backend=backend, entry=entry)
        longest = longest_of(max_seqlen_q)
        cached = cached._replace(k_descale=k_descale, v_descale=v_descale, longest=longest)
        options = dict(split_size=split_size, mask_mod=mask_mod, layout=layout, is_cache=is_cache)
        cached = check_cached(cached, numbers, **options)
        if is_cache or not ops.needs_grad((cached.q, cached.k, cached.v, sinks)):
            outputs = attend_cached(cached, out, layout=layout)
        else:
            outputs = train_cached(cached, deterministic, layout=layout)
        return outputs if return_lse else outputs[0]
    extras = extras._replace(bias=bias, dropout_rng=dropout_rng if dropout_p else None)
    options: Any = dict(mask_mod=mask_mod, score_mod=score_mod, block_mask=block_mask)
    options |= dict(max_seqlen_q=max_seqlen_q, deterministic=deterministic, layout=layout)
    options |= dict(numbers=numbers, backend=backend, entry=entry)
    outputs = _attend_dense((q, k, v), extras, **options)
    return outputs if return_lse else outputs[0]


def _attend_dense(
    inputs: tuple[Any, Any, Any],
    extras: Extras,
    *,
    numbers: Numbers,
    mask_mod: Callable[..., Any] | None,
    score_mod: Callable[..., Any] | None,
    block_mask: BlockMask | None,
    max_seqlen_q: int | None,
    deterministic: bool,
    layout: str,
    backend: str | None,
    entry: Entry | None,
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of sequences that are rows of a batch, or packed, whose signature is new."""
    is_packed = extras.cu_seqlens_q is not None or extras.cu_seqlens_k is not None
    q, k, v = inputs
    q, k, v = in_order(q, k, v=v, layout=layout, is_packed=is_packed)
    if numbers.dropout_p and extras.dropout_rng is None:
        extras = extras._replace(dropout_rng=draw_rng_of(q))
    sizes = sizes_of(q, k, extras.cu_seqlens_q)
    block_mask = paths.check_block_mask(
        block_mask, sizes, is_packed, has_band=numbers.sides() != (OPEN, OPEN)
    )
    documents = None  # packed, instead of a mask
    features = mask_mod, score_mod, *extras._replace(sinks=None).optional
    if block_mask is not None and all(x is None for x in features):
        documents = block_mask.documents_in(q, k, v)
    if documents is not None:
        block_mask, numbers = None, numbers._replace(window=None, causal=documents.causal)
        if documents.are_many:
            q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
            starts, max_seqlen_q = documents.cu_seqlens, documents.longest
            extras = extras._replace(cu_seqlens_q=starts, cu_seqlens_k=starts)
    modifiers = paths.modifiers_of(mask_mod, score_mod, block_mask, sizes)
    out, lse = call(
        q,
        k,
        v=v,
        extras=extras._replace(captured=modifiers.captured),
        numbers=numbers,
        deterministic=deterministic,
        backend=backend,
        mods=modifiers.mods,
        is_long=extras.cu_seqlens_q is not None and is_long(max_seqlen_q),
        words=OURS if layout == "bshd" else HEADS_FIRST,
        entry=entry,
    )
    if is_packed:
        return out.squeeze(0), lse.squeeze(0)
    if documents is not None and documents.are_many:
        out = out.reshape((sizes[0], -1, *out.shape[2:]))
        lse = lse.reshape(lse.shape[1], sizes[0], -1).transpose(0, 1)
    return out.transpose(1, 2) if layout == "bhsd" else out, lse
