"""Host side of appends: one launch, whatever the lengths, and whatever attention reads of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton

from ...tile.quantize import LIMITS
from ..common.alignment import ALIGNMENT
from ..common.append_step import AppendStep
from ..common.cached import TENSORS, Append, AppendedCall
from ..common.relaunch import Launched, Launches, distinct_views
from .append import (
    ROWS_PER_PROGRAM,
    SEQUENCES_PER_GROUP,
    NewKeys,
    Prologue,
    Widths,
    cache_append_kernel,
)
from .decode_launch import SplitPlan, cache_of, run, strided_of

Tensor = torch.Tensor
QUERY_ELEMENTS = 2048  # that a program rotates


def append(new: Append, is_kept: bool = False) -> AppendStep | None:
    """Writes k and v to the caches; rotary tables rotate k first. Returns how it is done again,
    where that is to be kept.
    """
    if not (new.k_cache.numel() and new.k.numel()):
        return None
    if is_kept:
        new = new.of_tensors(distinct_views(new.tensors))
    plan = plan_of(new)
    launched = run(plan, new.k.device)
    return step_of(plan, launched, new, new.tensors) if is_kept else None


def prepare(call: AppendedCall, is_kept: bool) -> tuple[Prologue, AppendStep | None]:
    """The append of a call, and what attention reads of it."""
    new, prologue = call.append, prologue_of(call)
    plan = plan_of(new, call, prologue)
    launched = run(plan, new.k.device)
    if not is_kept:
        return prologue, None
    return prologue, step_of(plan, launched, new, call[:TENSORS], prologue.parts)


def step_of(
    plan: SplitPlan,
    launched: Launched,
    new: Append,
    row: Sequence[Tensor | None],
    parts: Sequence[Tensor] = (),
) -> AppendStep | None:
    """The launch for other tensors; None where it may not be done again."""
    cache = plan.args[1]
    by_bits = {id(new.k_cache): cache.k.ptr, id(new.v_cache): cache.v.ptr}
    tensors = [by_bits.get(id(x), x) for x in row if x is not None]
    launches = Launches()
    launches.record([launched], (*tensors, *parts), new.k)
    if launches.relaunches is None:
        return None
    places = {id(by_bits.get(id(x), x)) for x in new.written}
    written = [n for n, x in enumerate(tensors) if id(x) in places]
    return AppendStep(launches, tensors, written, parts)


def rotated_dims(new: Append) -> int:
    """Half of them; 0 where nothing is rotated."""
    return 0 if new.rotary is None or not new.rotary.cos.numel() else new.rotary.cos.shape[1]


def prologue_of(call: AppendedCall) -> Prologue:
    """The kernel's arguments for what attention reads, in new memory."""
    q, batch = call.q, call.before.shape[0]
    shapes = {"used": (tuple(call.before.shape), torch.int32)}
    if rotated_dims(call.append):
        shapes["q"] = tuple(q.shape), q.dtype
    if call.leftpad is not None:
        shapes["table"] = (batch, call.k_cache.shape[1]), torch.int32
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values()]
    starts = list(itertools.accumulate((-(-n // ALIGNMENT) * ALIGNMENT for n in sizes), initial=0))
    memory = q.new_empty(starts[-1], dtype=torch.uint8)
    parts = {
        name: memory[start : start + size].view(dtype).view(shape)
        for start, size, (name, (shape, dtype)) in zip(starts, sizes, shapes.items())
    }
    leftpad, rows = map(_contiguous, (call.leftpad, call.rows))
    written = parts["used"], leftpad, None if leftpad is None else rows, parts.get("table")
    if "q" not in parts:
        return Prologue(None, None, None, 0, 0, *written)
    q, rotated, starts = strided_of(q), strided_of(parts["q"]), _contiguous(call.cu_seqlens_q)
    return Prologue(q, rotated, starts, call.q.shape[:-2].numel(), call.q.shape[-3], *written)


def plan_of(
    new: Append, call: AppendedCall | None = None, prologue: Prologue | None = None
) -> SplitPlan:
    """A program for each new key, then those that prepare what attention reads."""
    k, v, rotary = new.k, new.v, new.rotary
    total = k.shape[:-2].numel()
    used, starts = (_contiguous(x) for x in (new.seqused_k, new.cu_seqlens_q))
    if k.dim() == 3 and starts is None:  # keys by slots alone
        used = None
    batch = k.shape[0] if starts is None else starts.shape[0] - 1
    half = rotated_dims(new)
    cos = sin = None
    if rotary is not None and half:
        cos, sin = map(_contiguous, rotary[:2])
    positions = 0 if cos is None else cos.shape[0]
    before, base = (None, None) if call is None else (call.before, call.rotary_seqlens)
    keys = NewKeys(
        *(strided_of(k), strided_of(v), used, starts, _contiguous(new.slots)),
        *(batch, k.shape[-3], cos, sin, positions),
        before=_contiguous(before),
        rotary_seqlens=_contiguous(base) if half else None,
    )
    nheads_k, headdim, headdim_v = *k.shape[-2:], v.shape[-1]
    sizes = nheads_k, headdim, headdim_v
    is_interleaved = rotary is not None and bool(rotary.interleaved)
    padded = [triton.next_power_of_2(n) for n in sizes]
    has_bytes = new.k_cache.dtype != k.dtype
    limit = LIMITS[new.k_cache.dtype] if has_bytes else 0.0
    widths = Widths(*sizes, *padded, half, is_interleaved, limit)
    caches = new.k_cache, new.v_cache
    if new.k_cache.dtype == torch.float8_e4m3fn:  # written by its bits
        caches = [x.view(torch.uint8) for x in caches]
    cache = cache_of(*caches, new.page_table, new.k_descale, new.v_descale)
    programs = total
    if call is not None and prologue is not None:
        widths = widths._replace(PREPARES=True)
        programs += triton.cdiv(batch, SEQUENCES_PER_GROUP.value)
        if prologue.table is not None:
            programs += batch * triton.cdiv(new.k_cache.shape[1], ROWS_PER_PROGRAM.value)
        if prologue.q is not None:
            nheads = call.q.shape[-2]
            block = max(1, min(triton.next_power_of_2(nheads), QUERY_ELEMENTS // padded[1]))
            programs += prologue.total_q * triton.cdiv(nheads, block)
            of_q: dict[str, Any] = dict(NHEADS_Q=nheads, BLOCK_Q=block)
            widths = widths._replace(AT_FIRST=call.is_at_first, **of_q)
    # Products and their sum are rounded apart, as `tile.rotary.rotate` and the CPU round them
    args = keys, cache, prologue, total
    return SplitPlan(cache_append_kernel, programs, args, dict(WIDTHS=widths), is_fused=False)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.is_contiguous() else x.contiguous()
