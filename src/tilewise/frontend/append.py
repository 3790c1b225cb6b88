"""What a model does with its cache besides attention: new keys and values are appended to it."""

from __future__ import annotations

import os

import torch

from ..kernels.common.cached import Append
from ..ops import kv_cache as cache_ops
from ..tile.rotary import Rotary
from .append_checks import check_append, check_places
from .cache_checks import check_no_grad
from .checks import knows_values

Tensor = torch.Tensor


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
) -> None:
    """Writes new keys and values to a cache, in place.

    >>> import torch
    >>> from tilewise import cache
    >>> k_cache, v_cache = torch.zeros(2, 3, 8, 1, 4).unbind(0)  # 3 sequences of up to 8 keys
    >>> slots = torch.tensor([2, 17, -1])  # row 2 of sequence 0, row 1 of sequence 2, nowhere
    >>> cache.append(k_cache, v_cache, torch.ones(3, 1, 4), torch.ones(3, 1, 4), slots=slots)
    >>> k_cache.sum((1, 2, 3)).tolist()
    [4.0, 0.0, 4.0]

    k_cache and v_cache: (batch, seqlen_k, nheads_k, headdim), or with `page_table`, int32 (batch,
    pages), pages (num_pages, page_size, nheads_k, headdim); any strides with a contiguous last
    dimension. k and v: (batch, seqlen_new, nheads_k, headdim), or with `cu_seqlens_q`, int32 (batch
    + 1,), those of all sequences end to end, (total, nheads_k, headdim).
    seqused_k: int32 (batch,), the keys of each sequence when it has the new ones, which are its
    last: what `tilewise.attention` is told next.
    slots: int64, one for each new key, (total,) or (batch, seqlen_new): slot s is row s % page_size
    of page s // page_size (of a cache without pages, of sequence s // seqlen_k), and one below 0 is
    skipped; page_table is not read. Without them keys go where `seqused_k` and `page_table` say,
    and what has no place there is skipped. Of keys with one slot the last is kept.
    rotary: `Rotary(cos, sin, interleaved)` turns k by its positions, which count from the first key
    of its sequence; with `slots`, too, it needs `seqused_k`.

    Raises ArgumentError for a wrong argument, and NotImplementedError where one requires grad.
    """
    new = Append(k_cache, v_cache, k, v, page_table, seqused_k, cu_seqlens_q, slots, rotary)
    check_append(new)
    check_no_grad(("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v))
    if os.environ.get("TILEWISE_CHECK") == "1" and seqused_k is not None:
        if slots is None and knows_values(seqused_k):
            check_places(new, seqused_k)
    cache_ops.append(new)
