"""flash-attn's function for a KV cache, as a drop-in function over `attention` and
`cache.append`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Never

import torch

from ..errors import Words
from ..kernels.common.appended import AppendedCall
from ..kernels.common.cached import Cached
from ..keywords import refuses_others, unexpected
from ..mods.flat import FlatMods
from ..ops import append as append_ops
from ..ops.autocast import autocast
from ..ops.calls import find
from ..ops.kv_cache import check_run
from ..ops.schema import record_of
from ..problem import Extras
from ..tile.paging import batch_of
from . import invariance, new_keys, paths, values
from .cache_arguments import check_kinds, check_memory, lengths_after, lengths_before
from .cached import attend_cached, check_cached, check_outputs, launch_step
from .checks import check_form, with_contiguous_rows
from .chunks import check_chunk, mask_of_chunks, within_chunk
from .compiled import fits_node, has_node
from .flash_attn import check_hints
from .scalars import Numbers, Window, check_bounds, check_flag, longest_of, step_bound

Tensor = torch.Tensor
WORDS = Words(
    k="k_cache",
    v="v_cache",
    scale="softmax_scale",
    window="window_size",
    sinks="learnable_sink",
    seqused_k="cache_seqlens",
    page_table="block_table",
    order="",
)
# By the argument that says where keys lie, also of the lengths with new keys
TABLES = "block_table", "page_table", "cache_batch_idx"
WORDS_OF = {x: WORDS._replace(page_table=x) for x in TABLES}
WITH_NEW = {x: WORDS_OF[x]._replace(seqused_k="cache_seqlens + new keys") for x in TABLES}


@refuses_others("tilewise.flash_attn_with_kvcache")
@has_node
@new_keys.has_operator
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    qv: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: Any = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    learnable_sink: Tensor | None = None,
    out: Tensor | None = None,
    **unknown: Never,
):
    """flash-attn 2's `flash_attn_with_kvcache`; flash-attn 3's newer arguments are keyword-only.

    Example:
        >>> import torch, tilewise
        >>> q, k, v = torch.randn(3, 2, 1, 4, 32).unbind(0)  # one new token per sequence
        >>> k_cache, v_cache = torch.zeros(2, 2, 64, 4, 32).unbind(0)
        >>> seqlens = torch.tensor([20, 3], dtype=torch.int32)  # before the new ones
        >>> tilewise.flash_attn_with_kvcache(
        ...     q, k_cache, v_cache, k, v, cache_seqlens=seqlens, causal=True
        ... ).shape
        torch.Size([2, 1, 4, 32])

    Args:
        q: (batch, seqlen_q, nheads, headdim); (total_q, nheads, headdim) with `cu_seqlens_q`. q, k
            and v whose last dimension is not contiguous are copied; caches must have it so.
        k_cache: (batch, seqlen_k, nheads_k, headdim), or pages (num_pages, page_size, nheads_k,
            headdim) with `block_table`, of any page_size.
        v_cache: shaped as k_cache, with its own headdim_v.
        k: new keys, (batch, seqlen_new, nheads_k, headdim), appended in place at `cache_seqlens`;
            packed with `cu_seqlens_k_new`.
        v: new values, with k.
        rotary_cos: (positions, rotary_dim / 2); rotates k by its positions from `cache_seqlens` on,
            and q likewise with causal or a window, else all of q by the first position. It needs k.
        rotary_sin: shaped as rotary_cos.
        cache_seqlens: int or int32 (batch,), keys of each sequence before the new ones; None: the
            cache is full.
        cache_batch_idx: int32 (batch,), the cache row of each sequence; not with pages. New keys
            must not share a place: on a GPU any of them may be stored.
        cache_leftpad: int32 (batch,), the first row of each sequence; not with pages.
        block_table: int32 (batch, pages); `page_table` is a synonym.
        rotary_seqlens: int32 (batch,), replaces cache_seqlens for rotary positions.
        k_descale: fp32 scales for a float8_e4m3fn or int8 cache, as in `tilewise.attention`; for
            new keys as in `tilewise.cache.append`.
        v_descale: as k_descale, for v_cache.
        out: written in place and returned.

    The other arguments are those of `flash_attn_func`. `max_seqlen_q`, the upper bound of query
    lengths, is as in `tilewise.attention`: it lets packed chunks take faster kernels. `num_splits`,
    `scheduler_metadata`, `pack_gqa` and `sm_margin` have no effect: keys are split as in
    `tilewise.attention` with `split_size=None`.

    Returns:
        out, or (out, lse) with `return_softmax_lse`, lse (batch, nheads, seqlen_q) or (nheads,
        total_q); -inf for a row without keys.

    Raises:
        ArgumentError: an argument is wrong.
        NotImplementedError: qv or q_descale is given, or a tensor requires grad.
    """
    if unknown:
        raise unexpected("tilewise.flash_attn_with_kvcache", unknown)
    hints = num_splits, pack_gqa, sm_margin
    entry = addresses = append = keep = None
    longest = 0 if max_seqlen_q is None else step_bound(max_seqlen_q)
    if max_seqlen_q is not None and getattr(cu_seqlens_q, "is_cpu", False):
        values.check_longest({"max_seqlen_q": max_seqlen_q}, (cu_seqlens_q,), used=(None,))
    place = block_table if page_table is None else page_table
    table_name = "block_table" if page_table is None else "page_table"
    has_new = not (k is v is rotary_cos is rotary_sin is cu_seqlens_k_new is rotary_seqlens is None)
    is_moved = not (cache_batch_idx is cache_leftpad is None)
    has_kernels = not (has_new and isinstance(k_cache, Tensor) and k_cache.is_cpu)
    has_kernels = has_kernels or append_ops.interpreter_is_on()
    is_compiled = torch.compiler.is_dynamo_compiling()
    may_be_known = (page_table is None or block_table is None) and not is_compiled
    if may_be_known and isinstance(cache_seqlens, Tensor) and cache_seqlens.ndim == 1:
        tensors = q, k_cache, v_cache, place, cache_seqlens, cu_seqlens_q
        tensors = *tensors, alibi_slopes, learnable_sink, k_descale, v_descale, out
        plain = "flash_attn_with_kvcache", causal, softmax_scale, softcap, return_softmax_lse
        plain = *plain, attention_chunk, invariance.is_on, longest, rotary_interleaved, *hints
        if has_new:
            tensors = *tensors, k, v, rotary_cos, rotary_sin, cu_seqlens_k_new, rotary_seqlens
            tensors = *tensors, cache_batch_idx, cache_leftpad
        is_plain = qv is q_descale is None and type(attention_chunk) is int
        if is_plain and has_kernels and (has_new or not is_moved):
            entry, addresses = find(
                tensors, plain=plain, window=window_size, checks_values=not has_new
            )
        if entry is not None and entry.call is not None:
            step, has_lse, names = entry.call, return_softmax_lse, WORDS_OF[table_name]
            results = launch_step(step, tensors, addresses=addresses, has_lse=has_lse, words=names)
            if results is not None:
                return results if return_softmax_lse else results[0]
    queries: Any = {"q": q, "qv": qv, "cu_seqlens_q": cu_seqlens_q, "out": out}
    caches: Any = {"k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens}
    moved = {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    tables = {"block_table": block_table, "page_table": page_table}
    scales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    new: Any = {"k": k, "v": v, "cu_seqlens_k_new": cu_seqlens_k_new}
    rotary: Any = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    rotary = {**rotary, "rotary_seqlens": rotary_seqlens, "rotary_interleaved": rotary_interleaved}
    scores: Any = {"softmax_scale": softmax_scale, "softcap": softcap, "alibi_slopes": alibi_slopes}
    band: Any = {"causal": causal, "window_size": window_size, "attention_chunk": attention_chunk}
    arguments = {**queries, **caches, **moved, **tables, **scales, **new, **rotary}
    arguments = {**arguments, **scores, **band, "learnable_sink": learnable_sink}
    if is_compiled and not invariance.is_on:
        has_more = not (qv is q_descale is k_descale is v_descale is out is None)
        if not has_more and fits_node((q, k_cache, v_cache), window_size):
            returned: Any = {"max_seqlen_q": max_seqlen_q, "return_softmax_lse": return_softmax_lse}
            return paths.traced("flash_attn_with_kvcache", **arguments, **returned)
    check_kinds(arguments)
    check_hints(num_splits, pack_gqa, sm_margin)
    inputs = q, k, v
    q, k, v = with_contiguous_rows((("q", q), ("k", k), ("v", v)))
    if torch._C._is_any_autocast_enabled():
        q, k, v = autocast(q, k, v=v, cache=k_cache)
    if not (q is inputs[0] and k is inputs[1] and v is inputs[2]):
        entry = None  # what is launched is another
    if max_seqlen_q is not None:
        check_bounds(max_seqlen_q)
        longest = longest_of(max_seqlen_q)
    if cu_seqlens_q is not None:
        check_form("cu_seqlens_q", cu_seqlens_q, q=q)
        values.check_starts("cu_seqlens_q", cu_seqlens_q, q.shape[0], "queries")
    table, batch = place, batch_of(q, cu_seqlens_q)
    before = lengths_before(arguments, batch, table_name)
    causal = causal is True or check_flag("causal", causal)
    return_softmax_lse = check_flag("return_softmax_lse", return_softmax_lse)
    rotary_interleaved = check_flag("rotary_interleaved", rotary_interleaved)
    if rotary_cos is not None:
        new_keys.check_rotation(q, cos=rotary_cos, sin=rotary_sin)
    if cache_batch_idx is not None:
        place, table_name = cache_batch_idx.unsqueeze(1), "cache_batch_idx"
    chunk = check_chunk(attention_chunk)
    numbers = Numbers(softmax_scale, softcap, causal=causal, window=window_size)
    window = numbers.sides("window_size")
    sides = within_chunk(numbers, chunk).sides("window_size") if chunk else window
    numbers = numbers._replace(window=sides)
    last_key = values.last_read(q, cu_seqlens_q, left=sides[0])
    used, fewest = before, None
    if k is not None:
        used, fewest = lengths_after(before, k, cu_seqlens_k_new)
    counted = before if used is None else used
    names = (WORDS_OF if k is None else WITH_NEW)[table_name]
    values.check_reach(k_cache, place, counted, words=names, least=fewest, read=last_key)
    if cache_leftpad is not None and used is not None:
        values.check_leftpad(cache_leftpad, used)
    is_traced = check_memory(arguments, has_new=k is not None)
    extras = Extras(alibi_slopes, learnable_sink, seqused_k=counted, cu_seqlens_q=cu_seqlens_q)
    cached = Cached(q, k_cache, v_cache, page_table=place, extras=extras, longest=longest)
    cached = cached._replace(k_descale=k_descale, v_descale=v_descale)
    cached = cached._replace(entry=None if has_new or chunk else entry)
    rows = None if cache_batch_idx is None else place
    mask = mask_of_chunks(chunk) if chunk else None
    if k is not None:
        arguments |= dict(q=q, k=k, v=v, rotary_interleaved=rotary_interleaved, causal=causal)
        arguments |= dict(before=before, table=table, rows=rows, is_at_first=window == (-1, -1))
        call = record_of(AppendedCall, arguments)
        if rotary_cos is not None:
            new_keys.check_positions(call)
        if is_traced:
            scalars = _checked(cached, out, numbers, mask=mask).scalars
            arguments |= dict(softmax_scale=scalars.scale, softcap=scalars.softcap)
            arguments |= dict(window_size=window, attention_chunk=chunk, cache_seqlens=before)
            result, lse = new_keys.attend_traced(call, arguments | dict(max_seqlen_q=longest))
            return (result, lse) if return_softmax_lse else result
        if has_kernels:  # which are given `out` and the others unchanged
            cached = _checked(cached, out, numbers, mask=mask)
            is_kept = entry is not None and not chunk
            cached, keep = new_keys.append_new(cached, call, used=used, is_kept=is_kept)
        else:
            append = functools.partial(new_keys.append_apart, call=call, used=used)
    elif cache_leftpad is not None:
        cached = new_keys.without_padding(cached, rows=rows, leftpad=cache_leftpad)
    is_checked = k is not None and has_kernels
    result, lse = _attend(cached, out, numbers, mask, append, is_checked)
    if entry is not None and keep is not None and cached.entry.call is not None:
        entry.call = keep(cached.entry.call)
    return (result, lse) if return_softmax_lse else result


def _checked(cached: Cached, out: Tensor | None, numbers: Numbers, mask: FlatMods | None) -> Cached:
    """The checked call of a `Cached`, of which `_attend` will refuse nothing."""
    cached = check_cached(cached, numbers, mask_mod=mask, words=WORDS)
    check_outputs(cached, out, layout="bshd", words=WORDS)
    check_run(cached, out)
    return cached


def _attend(
    cached: Cached,
    out: Tensor | None,
    numbers: Numbers,
    mask: FlatMods | None,
    append: Callable[[Cached], Cached] | None,
    is_checked: bool,
) -> tuple[Tensor, Tensor]:
    """Attention with a KV cache, relaunched where its signature is cached, else checked: the entry
    of the caller's arguments, if there is one, or an entry of its own. New keys are appended
    between check and launch: a call that is refused writes nothing.
    """
    addresses, tensors = None, (*cached.tensors, out)
    if mask is None and cached.entry is None:
        plain = "cache", *numbers[:-1], invariance.is_on, cached.longest  # but the window
        entry, addresses = find(tensors, plain=plain, window=numbers.window, checks_values=True)
        cached = cached._replace(entry=entry)
    step = None if cached.entry is None else cached.entry.call
    if append is not None:
        if step is None:
            cached, is_checked = _checked(cached, out, numbers, mask=mask), True
        cached = append(cached)
        addresses, tensors = None, (*cached.tensors, out)
    if step is not None:
        results = launch_step(step, tensors, addresses=addresses, has_lse=True)
        if results is not None:
            return results
    if not is_checked:
        cached = check_cached(cached, numbers, mask_mod=mask, words=WORDS)
    return attend_cached(cached, out, layout="bshd", words=WORDS)
