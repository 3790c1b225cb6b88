"""Argument validation of calls with a KV cache: returns a `Cached` or raises an ArgumentError."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..errors import ArgumentError
from ..features import FEATURES, FLOATS
from ..kernels.common.cached import Cached
from ..mods.compilers import share_batch
from ..problem import Extras, Scalars
from ..tile.paging import batch_of, capacity
from ..tile.quantize import LIMITS, is_one_byte
from . import paths
from .checks import check_optional, check_starts, knows_values
from .invariance import check_split_size
from .qkv import check_device, check_kind, check_tensor, check_tensors
from .scalars import Window, band, check_causal, check_layout, check_numbers

Tensor = torch.Tensor
KINDS = " or ".join(str(dtype).removeprefix("torch.") for dtype in LIMITS)
LENGTHS = "seqused_k", "page_table"  # and tables, as `tilewise.attention` calls them


def is_cached(
    k: Tensor, page_table: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> bool:
    """Whether k and v are a KV cache: pages, of 8 bits, or rows of a batch with packed queries."""
    if page_table is not None or is_one_byte(k):
        return True
    if cu_seqlens_q is None or cu_seqlens_k is not None:
        return False
    return isinstance(k, Tensor) and k.dim() == 4


def check_cached(
    cached: Cached,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    split_size: int | None = None,
    mask_mod: Callable[..., Any] | None = None,
    layout: str = "bshd",
) -> Cached:
    """The checked call of a `Cached` that has the caller's tensors alone."""
    page_table, extras = cached.page_table, cached.extras
    seqused_k, cu_seqlens_q = extras.seqused_k, extras.cu_seqlens_q
    q, k, v = _in_order(cached.q, cached.k, v=cached.v, cu_seqlens_q=cu_seqlens_q, layout=layout)
    share_batch(k, v)
    if cu_seqlens_q is None:
        share_batch(q, k if page_table is None else page_table, seqused_k)
    _check_shapes(q, k, v, cu_seqlens_q)
    if check_causal(causal) != "bottom_right":
        raise ArgumentError(
            f"causal={causal!r} with a cache: the queries are the last ones of their sequence, so "
            "it must be False, True or 'bottom_right'"
        )
    left, right = band(window, causal is not False)
    _check_lengths(q, k, page_table=page_table, extras=extras)
    batch = batch_of(q, cu_seqlens_q)
    modifiers = paths.modifiers_of(mask_mod, None, None, (batch, q.shape[-2], 0, 0))
    extras = extras._replace(captured=modifiers.captured)
    for name, x in zip(Extras._fields[:2], extras[:2]):
        if x is not None:
            check_tensor(name, x)
            check_optional(name, x, q=q, batch=batch, count=f"{batch} sequences")
    for x in extras.captured:
        check_device("mask_mod has a tensor", x, of="q", q=q, remark=" (Mask.to)", verb="")
    k_descale = check_descale("k_descale", cached.k_descale, ("k", k), batch, layout)
    v_descale = check_descale("v_descale", cached.v_descale, ("v", v), batch, layout)
    scale, softcap = check_numbers(scale, softcap, headdim=q.shape[-1], dtype=q.dtype)
    scalars = Scalars(scale, softcap, left=left, right=right)
    cached = cached._replace(q=q, k=k, v=v, k_descale=k_descale, v_descale=v_descale)
    cached = cached._replace(extras=extras, scalars=scalars, mask=modifiers.mods.mask)
    cached = cached._replace(split_size=check_split_size(split_size, q.shape[-2] // k.shape[2]))
    check_cached_values(cached)
    return cached


def check_cached_values(cached: Cached, names: tuple[str, str] = LENGTHS) -> None:
    """Checks lengths and pages, where values may be read; `names` as in `check_reach`."""
    starts, q, left = cached.extras.cu_seqlens_q, cached.q, cached.scalars.left
    if starts is not None and knows_values(starts):
        check_starts("cu_seqlens_q", starts, q.shape[0], "queries")
    used, read = cached.extras.seqused_k, last_read(q, starts, left=left)
    check_reach(cached.k, cached.page_table, seqused_k=used, names=names, read=read)


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
    if is_compiled or not q.shape[0]:
        q = q.new_empty_strided((k.shape[0], *q.shape[1:]), q.stride())
    else:
        q = q[:1].expand(k.shape[0], -1, -1, -1)
    check_tensors(q, k, v=v, dtype=dtype)


def _check_lengths(q: Tensor, k: Tensor, page_table: Tensor | None, extras: Extras) -> None:
    """Checks the shapes of page table and lengths."""
    cu_seqlens_q, seqused_k = extras.cu_seqlens_q, extras.seqused_k
    tables = ("page_table", page_table), ("cu_seqlens_q", cu_seqlens_q), ("seqused_k", seqused_k)
    for name, x in tables:
        if x is None:
            continue
        check_tensor(name, x)
        shape, dtypes = FEATURES[name].shapes[0], FEATURES[name].dtypes
        if x.dim() != len(shape) or (name == "cu_seqlens_q" and x.shape[0] == 0):
            sizes = ", ".join(shape) + "," * (len(shape) == 1)
            raise ArgumentError(f"{name} has shape {tuple(x.shape)}: it must be ({sizes})")
        check_kind(name, x, q=q, dtypes=dtypes)
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


def check_cache_dtypes(k: Tensor, v: Tensor, words: tuple[str, str] = ("k", "v")) -> bool:
    """Whether k and v are a cache of 8 bits."""
    if not (is_one_byte(k) or is_one_byte(v)):
        return False
    for name, x in zip(words, (k, v)):
        if is_one_byte(x) and x.dtype not in LIMITS:
            raise NotImplementedError(
                f"{name}.dtype is {x.dtype}: 8-bit caches are {KINDS}; tilewise.cache.append "
                "writes such a cache"
            )
    if k.dtype != v.dtype:
        raise ArgumentError(
            f"{words[0]}.dtype is {k.dtype} and {words[1]}.dtype is {v.dtype}: a cache has one "
            "dtype, so quantise both, or none"
        )
    return True


def check_query_dtype(q: Tensor, k: Tensor, name: str = "q") -> None:
    """The dtype of q, or of new keys, with a cache of 8 bits."""
    if q.dtype not in FLOATS:
        raise ArgumentError(
            f"{name}.dtype is {q.dtype}: with a KV cache of {k.dtype} it must be bfloat16, float16 "
            "or (on the CPU) float32 or float64"
        )


def check_descale(
    name: str, x: Tensor | None, cache: tuple[str, Tensor], batch: int | None, layout: str = "bshd"
) -> Tensor | None:
    """Scales of a cache (pages or batch, rows, nheads_k, ...), those by row in its order. `batch`
    is None where nothing says which sequence a key is of.
    """
    if x is None:
        return None
    check_tensor(name, x)
    of, stored = cache
    if stored.dtype not in LIMITS:
        raise ArgumentError(
            f"{name} with {of} of {stored.dtype}: only caches of {KINDS} have scales, so leave it "
            "out"
        )
    check_kind(name, x, q=stored, dtypes=(torch.float32,), of=of)
    nheads_k = stored.shape[2]
    ordered = x.transpose(1, 2) if layout == "bhsd" and x.dim() == 3 else x
    shapes = [(), (nheads_k,), stored.shape[:-1]]
    if batch is not None:
        shapes.insert(2, (batch, nheads_k))
    if tuple(ordered.shape) not in [tuple(shape) for shape in shapes]:
        rows = tuple(stored.shape[:-1])
        rows = (rows[0], rows[2], rows[1]) if layout == "bhsd" else rows
        accepted = [*map(str, shapes[:-1]), f"{rows}, that of {of} without its last dimension"]
        raise ArgumentError(
            f"{name} has shape {tuple(x.shape)}: it must be {' or '.join(accepted)}; expand() it"
        )
    return ordered


def check_no_grad(named: Iterable[tuple[str, Tensor | None]]) -> None:
    """Refuses tensors that require a gradient."""
    for name, x in named:
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name}.requires_grad: a call with a cache has no gradient, because the cache is "
                "written in place; call under torch.no_grad(), detach() it, or train with plain "
                "k and v, without page_table and out"
            )
