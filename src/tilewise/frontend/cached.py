"""Calls with a KV cache: what they check, and how they reach their operator or a cached step."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import OURS, ArgumentError, Words
from ..features import refuse_gradients
from ..kernels.common.cached import OUT, READ_NAMES, Cached
from ..mods.compilers import share_batch
from ..ops import context_parallel as shards
from ..ops import kv_cache as cache_ops
from ..ops.autocast import autocast
from ..problem import Extras
from ..tile.paging import batch_of
from ..tile.quantize import is_one_byte
from . import checks, paths
from .invariance import check_split_size
from .scalars import Numbers, check_causal, check_numbers
from .values import check_cached_values

Tensor = torch.Tensor


def is_cached(
    k: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> bool:
    """Whether k and v are a KV cache: pages, of 8 bits, or rows of a batch with packed queries."""
    if page_table is not None or is_one_byte(k):
        return True
    if cu_seqlens_q is None or cu_seqlens_k is not None:
        return False
    return isinstance(k, Tensor) and k.dim() == 4


def check_cached(
    cached: Cached,
    numbers: Numbers,
    *,
    split_size: int | None = None,
    mask_mod: Any = None,
    layout: str = "bshd",
    words: Words = OURS,
    is_cache: bool = True,
) -> Cached:
    """The checked call of a `Cached` that has the caller's tensors alone. Autocast casts keys that
    are no cache, and queries to the dtype of one.
    """
    table, extras = cached.page_table, cached.extras
    starts = extras.cu_seqlens_q
    is_packed = starts is not None
    q, k, v = checks.in_order(cached.q, cached.k, cached.v, layout, is_packed, has_cache=True)
    q, k, v = autocast(q, k, v=v, cache=k if is_cache else None)
    if starts is None:
        share_batch(q, k if table is None else table, extras.seqused_k)
    rank4 = q if starts is None else q.unsqueeze(0)
    checks.check_tensors(rank4, k, v=v, words=words, has_cache=True)
    if check_causal(numbers.causal) != "bottom_right":
        raise ArgumentError(
            f"causal={numbers.causal!r} with a cache: the queries are the last ones of their "
            "sequence, so it must be False, True or 'bottom_right'"
        )
    batch = check_table(q, k, page_table=table, extras=extras, words=words)
    modifiers = paths.modifiers_of(mask_mod, None, None, (batch, q.shape[-2], 0, 0))
    extras = extras._replace(captured=modifiers.captured)
    checks.check_extras(q, k, extras=extras, words=words, has_cache=True)
    like: Any = dict(batch=batch, cache=layout)
    k_descale = checks.check_descale("k_descale", cached.k_descale, k, of=words.k, **like)
    v_descale = checks.check_descale("v_descale", cached.v_descale, v, of=words.v, **like)
    scalars = check_numbers(numbers, q, words=words)
    cached = cached._replace(q=q, k=k, v=v, k_descale=k_descale, v_descale=v_descale)
    cached = cached._replace(extras=extras, scalars=scalars, mask=modifiers.mods.mask)
    cached = cached._replace(split_size=check_split_size(split_size, q.shape[-2] // k.shape[2]))
    check_cached_values(cached)
    return cached


def check_table(
    q: Tensor, k: Tensor, page_table: Tensor | None, extras: Extras, words: Words = OURS
) -> int:
    """Shapes of page table and lengths; returns the number of sequences."""
    starts, seqused_k = extras.cu_seqlens_q, extras.seqused_k
    for name, x in (("page_table", page_table), ("cu_seqlens_q", starts), ("seqused_k", seqused_k)):
        if x is not None:
            checks.check_form(name, x, q=q)
    batch, source = batch_of(q, starts), "q" if starts is None else "cu_seqlens_q"
    rows = (words.k, k) if page_table is None else (words.page_table, page_table)
    for name, x in (rows, (words.seqused_k, seqused_k)):
        if x is not None and x.shape[0] != batch:
            raise ArgumentError(
                f"{name} has shape {tuple(x.shape)} and {source} says that there are {batch} "
                f"sequences: its first dimension must be {batch}"
            )
    return batch


def launch_step(
    step: Any,
    tensors: tuple[Tensor | None, ...],
    addresses: list[int] | None,
    has_lse: bool,
    layout: str = "bshd",
    words: Words = OURS,
) -> tuple[Tensor, Any] | None:
    """`out` and `lse` of a cached decode step, of `Cached.tensors`, `out` and what an append before
    it takes; None where it may not be launched now. `addresses` are those of the tensors that are
    not None, where they are known.
    """
    shards.refuse_shards()
    out = tensors[OUT]
    if type(step) is cache_ops.Repeated:
        ordered: list[Any] = list(tensors[: OUT + 1])
        if layout == "bhsd":
            ordered = [x if x is None or x.dim() < 3 else x.transpose(1, 2) for x in ordered]
        cached = step.of_tensors(ordered[:OUT])
        check_cached_values(cached, words)
        fresh, lse = step(cached, ordered[OUT], words)
        return (fresh if layout == "bshd" else fresh.transpose(1, 2)) if out is None else out, lse
    if addresses is None:
        addresses = [x.data_ptr() for x in tensors if x is not None]
    results: tuple[Tensor, Any] | None = step(tensors[:OUT], addresses, out, has_lse)
    if results is None or out is not None or layout == "bshd":
        return results
    return results[0].transpose(1, 2), results[1]


def attend_cached(
    cached: Cached, out: Tensor | None, layout: str, words: Words = OURS
) -> tuple[Tensor, Tensor]:
    """A checked call with a cache, without a gradient; `out` as it was given."""
    ordered = check_outputs(cached, out, layout=layout, words=words)
    if out is None:
        out, lse = cache_ops.attention(cached)
        return out.transpose(1, 2) if layout == "bhsd" else out, lse
    return out, cache_ops.attention(cached, ordered)[1]


def train_cached(cached: Cached, deterministic: bool, layout: str) -> tuple[Tensor, Tensor]:
    """A checked call without a cache whose keys are summed in pieces, with gradients."""
    refuse_gradients("slopes", [("alibi_slopes", cached.extras.alibi_slopes)])
    out, lse = cache_ops.train(cached, deterministic)
    return out.transpose(1, 2) if layout == "bhsd" else out, lse


def check_outputs(
    cached: Cached, out: Tensor | None, layout: str, words: Words = OURS
) -> Tensor | None:
    """`out`, if given, in the order of q; refuses gradients."""
    names = [getattr(words, name, name) for name in READ_NAMES]
    refuse_gradients("cached", [*zip(names, cached.tensors), ("out", out)])
    if out is None:
        return None
    checks.check_tensor("out", out)
    shape = (*cached.q.shape[:-1], cached.v.shape[3])
    ordered = out.transpose(1, 2) if layout == "bhsd" and out.dim() == 4 else out
    if tuple(ordered.shape) != tuple(shape):
        expected = (shape[0], shape[2], shape[1], shape[3]) if layout == "bhsd" else shape
        raise ArgumentError(f"out has shape {tuple(out.shape)}: it must be {tuple(expected)}")
    if out.dtype != cached.q.dtype or out.device != cached.q.device:
        raise ArgumentError(
            f"out is {out.dtype} on {out.device}: it must be {cached.q.dtype} on "
            f"{cached.q.device}, as q"
        )
    checks.check_rows([("out", out)])
    return ordered
