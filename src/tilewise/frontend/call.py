"""The common path of all public functions: one check per signature, then one op or a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import dispatch
from ..errors import HEADS_FIRST, OURS, ArgumentError, Words
from ..kernels.common.cached import OUT, Cached
from ..ops import attention as ops
from ..ops import context_parallel as shards
from ..ops import kv_cache as cache_ops
from ..ops.autocast import cast_bias, is_any_autocast_on
from ..ops.calls import Entry, entry_of, has_lazy, resolved
from ..problem import NO_EXTRAS, NO_MODS, Call, Extras, Mods, extras_of
from ..switches import is_on
from .cache_checks import LENGTHS, check_cached_values, check_no_grad
from .checks import check, check_scores, check_values
from .qkv import check_tensor, warn_of_order
from .scalars import check_flag

Tensor = torch.Tensor


def launch(
    call: Call,
    inputs: tuple[Any, Any, Any],
    *,
    optional: Sequence[Tensor | None],
    layout: str,
    words: Words = OURS,
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a cached call, of q, k and v in `layout`; `optional` are the first
    Extras.
    """
    (q, k, v), extras, is_packed = inputs, NO_EXTRAS, call.problem.is_packed
    if is_packed:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    elif layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if call.has_extras:
        extras = extras_of(optional)
        if q.is_cpu:
            check_values(q, k, extras=extras, words=words)
    out, lse = ops.launch(call, q, k, v, extras)
    if is_packed:
        return out.squeeze(0), lse.squeeze(0)
    return out if layout == "bshd" else out.transpose(1, 2), lse


def launch_step(
    step: Any,
    tensors: tuple[Tensor | None, ...],
    addresses: list[int] | None,
    has_lse: bool,
    layout: str = "bshd",
    names: tuple[str, str] = LENGTHS,
) -> tuple[Tensor, Any] | None:
    """`out` and `lse` of a cached decode step, of `Cached.tensors`, `out` and what an append before
    it takes; None where it may not be launched now. `addresses` are those of the tensors that are
    not None, where they are known, and `names` those of lengths and page table.
    """
    shards.refuse_shards()
    out = tensors[OUT]
    if type(step) is cache_ops.Repeated:
        ordered: list[Any] = list(tensors[: OUT + 1])
        if layout == "bhsd":
            ordered = [x if x is None or x.dim() < 3 else x.transpose(1, 2) for x in ordered]
        cached = step.of_tensors(ordered[:OUT])
        check_cached_values(cached, names)
        fresh, lse = step(cached, ordered[OUT])
        return (fresh if layout == "bshd" else fresh.transpose(1, 2)) if out is None else out, lse
    if addresses is None:
        addresses = [x.data_ptr() for x in tensors if x is not None]
    results: tuple[Tensor, Any] | None = step(tensors[:OUT], addresses, out, has_lse)
    if results is None or out is not None or layout == "bshd":
        return results
    return results[0].transpose(1, 2), results[1]


def attend_cached(cached: Cached, out: Tensor | None, layout: str) -> tuple[Tensor, Tensor]:
    """A checked call with a cache, without a gradient; `out` as it was given."""
    check_no_grad([*zip(cache_ops.TENSORS, cached.tensors), ("out", out)])
    if out is None:
        out, lse = cache_ops.attention(cached)
        return out.transpose(1, 2) if layout == "bhsd" else out, lse
    return out, cache_ops.attention(cached, check_out(out, cached, layout=layout))[1]


def check_out(out: Tensor, cached: Cached, layout: str) -> Tensor:
    """`out` in the order of q."""
    check_tensor("out", out)
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
    if out.stride(-1) != 1 and out.shape[-1] != 1:
        raise ArgumentError(
            f"out has stride {out.stride(-1)} in its last dimension: it must be contiguous"
        )
    return ordered


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    extras: Extras,
    numbers: tuple[float | None, float | None, float],
    window: tuple[str, int, int],
    deterministic: bool,
    backend: str | None = None,
    mods: Mods = NO_MODS,
    is_long: bool = False,
    words: Words = OURS,
    entry: Entry | None = None,
) -> tuple[Tensor, Tensor]:
    """The common path of all public functions: autocast, one check per signature, launch. `numbers`
    are scale, softcap and dropout_p, `window` is the alignment of the diagonal and the keys left
    and right of it, `words` are the function's argument names, and `entry` is the cache entry of
    its arguments. What is not in the signature here has been checked before the lookup.
    """
    deterministic = check_flag("deterministic", deterministic)
    dispatch.check_backend(backend)
    tensors = q, k, v, *extras.tensors
    needs_dispatcher = ops.needs_dispatcher(tensors)
    if needs_dispatcher or is_any_autocast_on():
        q, k, v = ops.autocast(q, k, v)
        extras = extras._replace(bias=cast_bias(extras.bias, q))
        tensors = q, k, v, *extras.tensors
    if not needs_dispatcher and has_lazy(tensors):
        q, k, v, *optional = tensors = resolved(tensors)
        extras = extras_of(optional)
    options: Any = dict(numbers=numbers[:2], align=window[0], window=window[1:], mods=mods)
    options |= dict(deterministic=deterministic, dropout_p=numbers[2], is_long=is_long)
    if entry is None and not needs_dispatcher and may_keep(numbers):
        flags = deterministic, mods, is_long, backend
        entry = entry_of(tensors, (numbers, window, flags))
    checked = None if entry is None else entry.call  # a compiler would watch the table
    if checked is None:
        checked = check(q, k, v, extras=extras, words=words, **options)
        checked.backend = backend
        checked.needs_grad = not needs_dispatcher and ops.needs_grad(*tensors)
        if entry is not None:
            entry.call = checked
    if checked.has_extras:
        check_values(q, k, extras=extras, words=words)
    if not needs_dispatcher and is_on("TILEWISE_CHECK"):
        if words.order and words is not HEADS_FIRST and not checked.problem.is_packed:
            warn_of_order(q, k, v=v, words=words)
        if q.device.type != "cpu":
            check_scores(q, k, checked.scalars.scale, checked.scalars.softcap, words)
    return ops.attention(checked, q, k, v, extras, needs_dispatcher)


def may_keep(numbers: tuple[float | None, float | None, float]) -> bool:
    """Whether a call may be cached, as its numbers cannot change."""
    scale, softcap, dropout_p = numbers
    is_fixed = all(x is None or type(x) is float for x in (scale, softcap))
    return is_fixed and type(dropout_p) in (int, float)
