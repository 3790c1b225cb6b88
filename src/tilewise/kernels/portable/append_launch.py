"""Host side of `cache.append`: one launch, whatever the lengths."""

from __future__ import annotations

import torch
import triton

from ...tile.quantize import LIMITS
from ..common.cached import Append
from .append import NewKeys, Widths, cache_append_kernel
from .decode_launch import SplitPlan, cache_of, run, strided_of

Tensor = torch.Tensor


def append(new: Append) -> None:
    """Writes k and v to the caches; rotary tables rotate k first."""
    if new.k_cache.numel() and new.k.numel():
        run(plan_of(new), new.k.device)


def plan_of(new: Append) -> SplitPlan:
    """A program for each new key."""
    k, v, rotary = new.k, new.v, new.rotary
    total = k.shape[:-2].numel()
    used, starts = (_contiguous(x) for x in (new.seqused_k, new.cu_seqlens_q))
    if k.dim() == 3 and starts is None:  # keys by slots alone
        used = None
    batch = k.shape[0] if starts is None else starts.shape[0] - 1
    cos, sin = (None, None) if rotary is None else map(_contiguous, rotary[:2])
    half = 0 if cos is None else cos.shape[1]
    positions = 0 if cos is None else cos.shape[0]
    if half * positions == 0:  # nothing is rotated
        cos, sin, half = None, None, 0
    keys = NewKeys(
        *(strided_of(k), strided_of(v), used, starts, _contiguous(new.slots)),
        *(batch, k.shape[-3], cos, sin, positions),
    )
    nheads_k, headdim, headdim_v = *k.shape[-2:], v.shape[-1]
    sizes = nheads_k, headdim, headdim_v
    is_interleaved = rotary is not None and bool(rotary.interleaved)
    padded = (triton.next_power_of_2(n) for n in sizes)
    has_bytes = new.k_cache.dtype != k.dtype
    limit = LIMITS[new.k_cache.dtype] if has_bytes else 0.0
    widths = Widths(*sizes, *padded, half, is_interleaved, limit)
    caches = new.k_cache, new.v_cache
    if new.k_cache.dtype == torch.float8_e4m3fn:  # written by its bits
        caches = [x.view(torch.uint8) for x in caches]
    cache = cache_of(*caches, new.page_table, new.k_descale, new.v_descale)
    return SplitPlan(cache_append_kernel, total, (keys, cache, total), dict(WIDTHS=widths))


def _contiguous(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.is_contiguous() else x.contiguous()
