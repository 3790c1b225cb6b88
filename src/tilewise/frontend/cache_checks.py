"""Argument validation of calls with a KV cache: returns a `Cached` or raises an ArgumentError."""

from __future__ import annotations

from typing import Any

import torch

from .. import dispatch
from ..errors import ArgumentError
from ..kernels.common.cached import Cached
from ..mods.compilers import share_batch
from ..mods.flatten import modifiers_of
from ..mods.masks import Predicate
from ..problem import Extras, Scalars
from ..tile import split_kv
from ..tile.paging import batch_of, capacity
from ..tile.quantize import is_one_byte
from . import invariance
from .checks import check_optional, check_starts, knows_values
from .descale_checks import check_cache_dtypes, check_descale, check_query_dtype
from .qkv import DTYPES, check_device, check_kind, check_tensor, check_tensors
from .scalars import Window, as_int, band, check_causal, check_layout, check_numbers

Tensor = torch.Tensor


LENGTHS = "seqused_k", "page_table"  # and tables, as `tilewise.attention` calls them


def is_cached(
    k: Tensor, page_table: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> bool:
    """Whether k and v are a KV cache: pages, of 8 bits, or rows of a batch with packed queries."""
    if page_table is not None:
        return True
    if is_one_byte(k):  # or a cache of 8 bits
        return True
    if cu_seqlens_q is None or cu_seqlens_k is not None:
        return False
    return isinstance(k, Tensor) and k.dim() == 4


NOT_SERVED = {
    "seqused_q": "let cu_seqlens_q say how many queries each sequence has",
    "cu_seqlens_k": "pass k and v as (batch, seqlen_k, nheads_k, headdim) or as pages, and their "
    "lengths as seqused_k",
    "bias": "pass a mask_mod or alibi_slopes",
    "block_mask": "pass its mask as mask_mod",
    "score_mod": "pass softcap or alibi_slopes",
    "dropout_p": "leave it out",
}


def refuse_beside_cache(others: tuple[object, ...], backend: str | None) -> None:
    """Refuses what a call with a cache does not take, in the order of NOT_SERVED, unless it is
    None.
    """
    for (name, remedy), value in zip(NOT_SERVED.items(), others):
        if value is not None:
            raise NotImplementedError(
                f"{name} with a cache, split_size or out is not supported: {remedy}"
            )
    if backend is not None:
        dispatch.check_backend(backend)


def check_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor | None,
    lengths: tuple[Tensor | None, Tensor | None],
    score_args: tuple[Tensor | None, Tensor | None, Predicate | None],
    numbers: tuple[bool | str, float | None, Window, float | None, int | None],
    layout: str,
    descales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Cached:
    """`lengths` are seqused_k and cu_seqlens_q; `score_args` alibi_slopes, sinks and mask_mod;
    `numbers` causal, scale, window, softcap and split_size; `descales` are those of k and of v.
    """
    seqused_k, cu_seqlens_q = lengths
    slopes, sinks, mask_mod = score_args
    causal, scale, window, softcap, split_size = numbers
    q, k, v = _in_order(q, k, v, cu_seqlens_q, layout)
    share_batch(k, v)
    if cu_seqlens_q is None:
        share_batch(q, k if page_table is None else page_table, seqused_k)
    _check_shapes(q, k, v, cu_seqlens_q)
    if check_causal(causal) != "bottom_right":
        raise ArgumentError(
            f"causal={causal!r} with a cache: the queries are the last ones of their sequence, so "
            "it must be False, True or 'bottom_right'"
        )
    extras = Extras(slopes, sinks, seqused_k, None, cu_seqlens_q)
    sides = band(window, causal is not False)
    _check_lengths(q, k, page_table, extras)
    batch = batch_of(q, cu_seqlens_q)
    modifiers = modifiers_of(mask_mod, None, None, (batch, q.shape[-2], 0, 0))
    extras = extras._replace(captured=modifiers.captured)
    _check_learned(q, batch, extras)
    named = zip(("k_descale", "v_descale"), descales, (("k", k), ("v", v)))
    scales = [check_descale(*each, batch, layout) for each in named]
    scalars = Scalars(*check_numbers(scale, softcap, q.shape[-1], q.dtype), *sides)
    size = check_split_size(split_size, q.shape[-2] // k.shape[2])
    cached = Cached(q, k, v, page_table, extras, scalars, size, modifiers.mods.mask)
    cached = cached._replace(k_descale=scales[0], v_descale=scales[1])
    check_cached_values(cached)
    return cached


def check_cached_values(cached: Cached, names: tuple[str, str] = LENGTHS) -> None:
    """Checks lengths and pages, where values may be read; `names` as in `check_reach`."""
    starts, q, left = cached.extras.cu_seqlens_q, cached.q, cached.scalars.left
    if starts is not None and knows_values(starts):
        check_starts("cu_seqlens_q", starts, q.shape[0], "queries")
    keys = cached.k, cached.page_table, cached.extras.seqused_k
    check_reach(*keys, names=names, read=last_read(q, starts, left))


def _in_order(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    check_layout(layout)
    is_packed = cu_seqlens_q is not None
    if is_packed and layout != "bshd":
        raise ArgumentError(
            f"layout={layout!r}: packed queries are (total_q, nheads, headdim), so leave it out"
        )
    for name, x, dims in (("q", q, 3 if is_packed else 4), ("k", k, 4), ("v", v, 4)):
        check_tensor(name, x)
        if x.dim() != dims:
            shape = "(total_q, nheads, headdim)" if dims == 3 else "of 4 dimensions"
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)}: with a cache"
                f"{' and cu_seqlens_q' if is_packed else ''} it must be {shape}"
            )
    if layout == "bshd":
        return q, k, v
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None) -> None:
    """The checks of `check_tensors` but that of the batch, which pages do not have."""
    if k.shape[0] != v.shape[0]:
        raise ArgumentError(
            f"k has {k.shape[0]} pages or rows and v has {v.shape[0]}: they must be equal"
        )
    q = q.unsqueeze(0) if cu_seqlens_q is not None else q
    dtype = None
    if check_cache_dtypes(k, v):
        check_query_dtype(q, k)
        dtype = k.dtype
    is_compiled = torch.compiler.is_compiling()  # then q may be of no size that is known
    q = _rows(q, k) if is_compiled or not q.shape[0] else q[:1].expand(k.shape[0], -1, -1, -1)
    check_tensors(q, k, v, dtype=dtype)


def _rows(q: Tensor, k: Tensor) -> Tensor:
    return q.new_empty_strided((k.shape[0], *q.shape[1:]), q.stride())


def _check_lengths(q: Tensor, k: Tensor, page_table: Tensor | None, extras: Extras) -> None:
    """Checks the shapes of page table and lengths."""
    cu_seqlens_q, seqused_k = extras.cu_seqlens_q, extras.seqused_k
    for name, x, dims, shape in (
        ("page_table", page_table, 2, "(batch, pages)"),
        ("cu_seqlens_q", cu_seqlens_q, 1, "(batch + 1,)"),
        ("seqused_k", seqused_k, 1, "(batch,)"),
    ):
        if x is None:
            continue
        check_tensor(name, x)
        if x.dim() != dims or (name == "cu_seqlens_q" and x.shape[0] == 0):
            raise ArgumentError(f"{name} has shape {tuple(x.shape)}: it must be {shape}")
        check_kind(name, x, q, (torch.int32,))
    batch = batch_of(q, cu_seqlens_q)
    source = "q" if cu_seqlens_q is None else "cu_seqlens_q"
    rows = k if page_table is None else page_table
    for name, x in (("k" if page_table is None else "page_table", rows), ("seqused_k", seqused_k)):
        if x is not None and x.shape[0] != batch:
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)} and {source} says that there are {batch} "
                f"sequences: its first dimension must be {batch}"
            )


def last_read(q: Tensor, cu_seqlens_q: Tensor | None, left: int) -> int | Tensor | None:
    """How many of the last keys of each sequence its queries see through a window; None for all."""
    if left < 0:
        return None
    if cu_seqlens_q is None:
        return q.shape[1] + left
    return (cu_seqlens_q.diff() + left).unsqueeze(1) if knows_values(cu_seqlens_q) else None


def check_reach(
    k: Tensor,
    page_table: Tensor | None,
    seqused_k: Tensor | None,
    *,
    names: tuple[str, str] = LENGTHS,
    least: list[int] | None = None,
    read: int | Tensor | None = None,
) -> None:
    """Checks that every key in use has a slot, in an existing page, where values may be read:
    `names` are those of lengths and table, `least` the fewest keys of each sequence, and `read` how
    many of its last ones are read, None for all.
    """
    tensors = [x for x in (seqused_k, page_table) if x is not None]
    if not tensors or not all(map(knows_values, tensors)):
        return
    if page_table is not None and page_table.shape[:1] != tensors[0].shape[:1]:
        return  # a wrong shape has its own error
    room, of_used, of_table = capacity(k, page_table), *names
    lengths = [room] * len(tensors[0]) if seqused_k is None else seqused_k.tolist()
    if any(n < m or n > room for n, m in zip(lengths, least or [0] * len(lengths))):
        place = f"k has {room} rows per sequence"
        if page_table is not None:
            place = (
                f"{of_table} has {page_table.shape[1]} pages of {k.shape[1]} keys per sequence, "
                f"room for {room} keys"
            )
        fewest = "0" if not any(least or ()) else f"as many as new keys, {least}"
        raise ArgumentError(
            f"{of_used}={lengths}: it must be at least {fewest}, and {place}: widen it, or shorten "
            "the sequences"
        )
    if page_table is None:
        return
    entry = torch.arange(page_table.shape[1], device=page_table.device)
    is_wrong = (page_table < 0) | (page_table >= k.shape[0])
    used = torch.tensor(lengths, device=entry.device).unsqueeze(1)
    is_wrong &= entry * k.shape[1] < used
    if read is not None:
        is_wrong &= (entry + 1) * k.shape[1] > used - read
    if bool(is_wrong.any()):
        row, column = is_wrong.nonzero()[0].tolist()
        raise ArgumentError(
            f"{of_table}[{row}, {column}] is {int(page_table[row, column])}, a page that the "
            f"{lengths[row]} keys in use reach: it must be at least 0 and below the number of "
            f"pages, {k.shape[0]}"
        )


def _check_learned(q: Tensor, batch: int, extras: Extras) -> None:
    nheads, count = q.shape[-2], f"{batch} sequences"
    for name, x, shapes, dtypes in (
        ("alibi_slopes", extras.alibi_slopes, [(nheads,), (batch, nheads)], (torch.float32,)),
        ("sinks", extras.sinks, [(nheads,)], DTYPES),
    ):
        if x is not None:
            check_tensor(name, x)
            check_optional(name, x, q, shapes, dtypes, count)
    for x in extras.captured:
        check_device("mask_mod has a tensor", x, "q", q, " (Mask.to)", verb="")


def check_split_size(split_size: Any, group: int) -> int:
    """The keys of a piece; 0 where nothing asks for pieces."""
    if split_size is None:
        return split_kv.default_split_size(group) if invariance.is_on else 0
    size = as_int(split_size)
    if size is None or size < 1:
        raise ArgumentError(
            f"split_size={split_size!r}: it must be an int of at least 1, or None for the default"
        )
    return size


def check_out(out: Tensor, cached: Cached, layout: str) -> Tensor:
    """`out` in the order of q."""
    check_tensor("out", out)
    shape = (*cached.q.shape[:-1], cached.v.shape[3])
    ordered = out.transpose(1, 2) if layout == "bhsd" and out.dim() == 4 else out
    if tuple(ordered.shape) != tuple(shape):
        asked = (shape[0], shape[2], shape[1], shape[3]) if layout == "bhsd" else shape
        raise ArgumentError(f"out has shape {tuple(out.shape)}: it must be {tuple(asked)}")
    if out.dtype != cached.q.dtype or out.device != cached.q.device:
        raise ArgumentError(
            f"out is {out.dtype} on {out.device}: it must be {cached.q.dtype} on "
            f"{cached.q.device}, as q"
        )
    if out.stride(-1) != 1 and out.shape[-1] != 1:
        raise ArgumentError(
            f"out has stride {out.stride(-1)} in its last dimension: it must be contiguous"
        )
    return ordered


def check_no_grad(*tensors: tuple[str, Tensor | None]) -> None:
    """Refuses tensors that require a gradient."""
    for name, x in tensors:
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name}.requires_grad: a call with a cache has no gradient, because the cache is "
                "written in place; call under torch.no_grad(), detach() it, or train with plain "
                "k and v, without page_table and out"
            )
