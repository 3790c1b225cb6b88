"""New keys and values into a cache, on the CPU: where each goes, then one indexed write."""

from __future__ import annotations

import torch

from ...tile.quantize import by_row, quantize, row_scales
from ...tile.rotary import rotate
from ..common.appended import Append

Tensor = torch.Tensor


def append(new: Append) -> None:
    """Writes k and v to the caches; positions turn k first."""
    k, v = new.k, new.v
    if k.numel() == 0 and v.numel() == 0:
        return
    sequence, position = None, None
    scales = new.k_descale, new.v_descale
    are_by_sequence = any(scale is not None and scale.dim() == 2 for scale in scales)
    if new.slots is None or new.rotary is not None or are_by_sequence:
        sequence, position = positions(new)
    if new.rotary is not None:
        k = rotate(k, new.rotary, positions=position.view(k.shape[:-2]))
    slots = new.slots
    if slots is None:
        slots = _slots(new, sequence, position=position)
    _write(new, k.flatten(0, -3), v=v.flatten(0, -3), slots=slots.flatten(), sequence=sequence)


def positions(new: Append) -> tuple[Tensor, Tensor]:
    """The sequence of each new key, and its position there; below 0 where it belongs to none."""
    if new.cu_seqlens_q is None:
        batch, seqlen = new.k.shape[:2]
        sequence = torch.arange(batch, device="cpu").repeat_interleave(seqlen)
        row = torch.arange(seqlen, device="cpu").repeat(batch)
        return sequence, new.seqused_k.long()[sequence] - seqlen + row
    starts = new.cu_seqlens_q.long()
    row = torch.arange(new.k.shape[0], device="cpu")
    sequence = torch.searchsorted(starts[1:], row, right=True)
    is_in = sequence < len(starts) - 1
    if not len(starts) - 1:
        return sequence, torch.full_like(row, -1)
    sequence = sequence.clamp(max=len(starts) - 2)
    ends = starts[1:][sequence]
    return sequence, torch.where(is_in, new.seqused_k.long()[sequence] - ends + row, -1)


def _slots(new: Append, sequence: Tensor, position: Tensor) -> Tensor:
    """Where the key of each position goes, -1 for nowhere."""
    num_pages, page_size = new.k_cache.shape[:2]
    table = new.page_table
    if table is None:
        has_place = (position >= 0) & (position < page_size)
        return torch.where(has_place, sequence * page_size + position, -1)
    has_place = (position >= 0) & (position < table.shape[1] * page_size)
    entry = (position // max(page_size, 1)).clamp(0, max(table.shape[1] - 1, 0))
    if table.numel() == 0 or page_size == 0:
        return torch.full_like(position, -1)
    page = table[sequence, entry].long()
    has_place &= (page >= 0) & (page < num_pages)
    return torch.where(has_place, page * page_size + position % page_size, -1)


def _write(new: Append, k: Tensor, v: Tensor, slots: Tensor, sequence: Tensor | None) -> None:
    """Rows (total, nheads_k, headdim) to their slots; of equal slots the last is kept."""
    num_pages, page_size = new.k_cache.shape[:2]
    slots, order = slots.sort(stable=True)
    is_last = torch.ones_like(slots, dtype=torch.bool)
    is_last[:-1] = slots[1:] != slots[:-1]
    is_kept = is_last & (slots >= 0) & (slots < num_pages * page_size)
    slots, order = slots[is_kept], order[is_kept]
    if len(slots):
        slot = slots // page_size, slots % page_size
        rows = None if sequence is None else sequence[order]
        for cache, x, scale in (
            (new.k_cache, k[order], new.k_descale),
            (new.v_cache, v[order], new.v_descale),
        ):
            if cache.dtype != x.dtype:
                x, cache = _quantized(x, scale, rows, slot, cache.dtype), cache.view(torch.int8)
            cache.index_put_(slot, x)


def _quantized(
    x: Tensor,
    scale: Tensor | None,
    sequence: Tensor | None,
    slot: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """The bytes of rows; writes their scales where each row has its own."""
    if by_row(scale):
        row_scale = row_scales(x, dtype)
        scale.index_put_(slot, row_scale)
        scale = row_scale
    elif scale is not None and scale.dim() == 2:
        scale = scale[sequence]
    scale = torch.ones((), device="cpu") if scale is None else scale
    return quantize(x, scale.unsqueeze(-1), dtype=dtype).view(torch.int8)
