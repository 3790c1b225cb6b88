"""Addresses of the keys of a KV cache.

A cache is (batch, seqlen_k, nheads_k, headdim), or with a page table, int32 (batch, pages), a pool
of pages (num_pages, page_size, nheads_k, headdim): key j of sequence b is row j % page_size of page
page_table[b, j // page_size]. Entries of pages past the last key are not read.
"""

from __future__ import annotations

import itertools

import torch

Tensor = torch.Tensor


def capacity(k: Tensor, page_table: Tensor | None) -> int:
    """The capacity of a sequence, in keys."""
    if page_table is None:
        return k.shape[1]
    return page_table.shape[1] * k.shape[1] if k.shape[0] else 0


def batch_of(q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    """The number of sequences."""
    return q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1


def lengths_of(
    k: Tensor, page_table: Tensor | None, seqused_k: Tensor | None, batch: int
) -> list[int]:
    """The keys of each sequence, at most its capacity."""
    room = capacity(k, page_table)
    if seqused_k is None:
        return [room] * batch
    return [min(max(n, 0), room) for n in seqused_k.tolist()]


def queries_of(q: Tensor, cu_seqlens_q: Tensor | None) -> list[Tensor]:
    """Views (seqlen_q, nheads, headdim) of each sequence of q, or of what is laid out so."""
    if cu_seqlens_q is None:
        return list(q.unbind(0))
    starts = [min(max(n, 0), q.shape[0]) for n in cu_seqlens_q.tolist()]
    return [q[start:stop] for start, stop in itertools.pairwise(starts)]


def gather(x: Tensor, page_table: Tensor | None, row: int, first: int, last: int) -> Tensor:
    """Keys or values [first, last) of a sequence, (last - first, nheads_k, headdim)."""
    if page_table is None:
        return x[row, first:last]
    if last <= first:
        return x[:0, 0]
    page_size = x.shape[1]
    start = first // page_size
    pages = page_table[row, start : -(-last // page_size)].clamp(0, max(0, x.shape[0] - 1))
    rows = x.index_select(0, pages).flatten(0, 1)
    return rows[first - start * page_size : last - start * page_size]
