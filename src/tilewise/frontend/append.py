"""Appends new keys and values to a KV cache."""

from __future__ import annotations

from typing import Never

import torch

from ..kernels.common.cached import Append
from ..keywords import refuses_others, unexpected
from ..ops import append as append_ops
from ..ops.calls import find
from ..ops.context_parallel import refuse_shards
from ..tile.rotary import Rotary
from .append_checks import check_append, check_places
from .cache_checks import check_no_grad

Tensor = torch.Tensor


@refuses_others("tilewise.cache.append")
def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    slots: Tensor | None = None,
    rotary: Rotary | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **unknown: Never,
) -> None:
    """Writes new keys and values to a KV cache, in place.

    Example:
        >>> import torch
        >>> from tilewise import cache
        >>> k_cache, v_cache = torch.zeros(2, 3, 8, 1, 4).unbind(0)  # 3 sequences of up to 8 keys
        >>> slots = torch.tensor([2, 17, -1])  # row 2 of sequence 0, row 1 of sequence 2, nowhere
        >>> cache.append(k_cache, v_cache, torch.ones(3, 1, 4), torch.ones(3, 1, 4), slots=slots)
        >>> k_cache.sum((1, 2, 3)).tolist()
        [4.0, 0.0, 4.0]

    Keys without a slot are skipped. A cache of float8_e4m3fn or int8 stores x / scale, rounded to
    nearest even and saturated to +-448 or +-127; int8 stores 0 for NaN.

    Args:
        k_cache: (batch, seqlen_k, nheads_k, headdim), or pages (num_pages, page_size, nheads_k,
            headdim) with `page_table`; any strides with a contiguous last dimension.
        v_cache: shaped as k_cache, with its own headdim_v.
        k: new keys, (batch, seqlen_new, nheads_k, headdim); (total, nheads_k, headdim) with
            `cu_seqlens_q`, those of all sequences end to end.
        v: new values, shaped as k, with its own headdim_v.
        seqused_k: int32 (batch,), keys per sequence including the new ones, which are its last; as
            `tilewise.attention` takes them next.
        page_table: int32 (batch, pages), the page of each block of page_size keys.
        cu_seqlens_q: int32 (batch + 1,), where the new keys of each sequence begin.
        slots: int64, (total,) or (batch, seqlen_new), instead of the places that seqused_k and
            page_table imply: slot s is row s % page_size of page s // page_size (without pages: of
            sequence s // seqlen_k); a negative one is skipped. If keys share a slot, the last is
            stored.
        rotary: `Rotary(cos, sin, interleaved)`, rotates k by its position from the first key of its
            sequence; it needs `seqused_k`, with slots, too.
        k_descale: fp32 scales for an 8-bit cache, as in `tilewise.attention`; None is 1. Shapes (),
            (nheads_k,) and (batch, nheads_k), which needs `seqused_k`, are read. A shape as k_cache
            without headdim is written: each new row and head gets its largest magnitude divided by
            448 or 127.
        v_descale: as k_descale, for v_cache.

    Raises:
        ArgumentError: an argument is wrong.
        NotImplementedError: a tensor requires grad.
    """
    if unknown:
        raise unexpected("tilewise.cache.append", unknown)
    where = page_table, seqused_k, cu_seqlens_q, slots
    new = Append(k_cache, v_cache, k, v, *where, rotary, k_descale, v_descale)
    entry = None
    if rotary is None or type(rotary) is Rotary:
        tensors = new.tensors
        entry, addresses = find(tensors, ("append", rotary is None or rotary.interleaved))
        if entry is not None and entry.call is not None:
            refuse_shards()
            if addresses is None:
                addresses = [x.data_ptr() for x in tensors if x is not None]
            if entry.call.repeats(addresses):
                return
    check_call(new)
    append_ops.append(new, entry)


def check_call(new: Append) -> None:
    """Checks all arguments but which memory is whose."""
    check_append(new)
    check_no_grad(*zip(("k_cache", "v_cache", "k", "v"), new[:4]))
    check_no_grad(("k_descale", new.k_descale), ("v_descale", new.v_descale))
    check_places(new)
