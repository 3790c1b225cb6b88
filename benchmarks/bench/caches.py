"""The KV caches that `bench decode` times: contiguous, or in pages of any size and in no order."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch

from tilewise.explain.steps import DTYPES, INT32, Decode
from tilewise.tile.quantize import quantize, row_scales
from tilewise.tile.rotary import Rotary, rotate

Tensor = torch.Tensor
CHECKED = 256  # queries of a sequence whose results are held to fp64
COLD_BYTES = 256 << 20  # what is read between two reads of a byte, so that it is in no L2 cache
MOST_COPIES = 128  # a graph holds one call for each


def copies_of(of: Decode) -> int:
    """How many caches the calls rotate over, so that what is read next is in no L2 cache,
    unless caches are so small that MOST_COPIES fit there.
    """
    return min(max(2, -(-COLD_BYTES // of.kv_bytes)), MOST_COPIES)


def is_cold(of: Decode) -> bool:
    """Whether so many are more than an L2 cache holds."""
    return 2 * copies_of(of) * of.kv_bytes >= COLD_BYTES


class New(NamedTuple):
    """The keys and values that a step appends, and the tables that rotate them."""

    k: Tensor  # (batch, seqlen_q, nheads_k, headdim)
    v: Tensor
    rotary: Rotary
    seqused_k: Tensor  # int32 (batch,): the keys before

    def positions(self) -> Tensor:
        """Where each new key is in its sequence, (batch, seqlen_q)."""
        return self.seqused_k[:, None] + torch.arange(self.k.shape[1], device=self.k.device)


class Cache(NamedTuple):
    """Keys and values of one step, and where they lie."""

    k: Tensor  # (batch, seqlen_k, nheads_k, headdim), or pages (num_pages, page_size, ...)
    v: Tensor
    seqused_k: Tensor  # int32 (batch,)
    page_table: Tensor | None = None  # int32 (batch, pages)
    k_descale: Tensor | None = None  # of 8 bits: (nheads_k,), or as k without headdim
    v_descale: Tensor | None = None
    new: New | None = None

    def copy(self) -> Cache:
        """A copy in memory of its own, strides and all."""
        return Cache._make(x.clone() if isinstance(x, Tensor) else x for x in self)


def make_queries(of: Decode, device: str) -> Tensor:
    """Normal, (batch, seqlen_q, nheads, headdim), with a chunk (queries, nheads, headdim)."""
    generator = torch.Generator(device=device).manual_seed(of.seqlen_q)
    rows = (of.batch, of.seqlen_q) if of.chunk < 0 else (sum(of.queries),)
    shape = *rows, of.nheads, of.headdim
    q = torch.randn(shape, device=device, generator=generator)
    return q.to(getattr(torch, of.dtype))


def starts_of(of: Decode, device: str) -> Tensor | None:
    """Where packed queries begin; None without a chunk."""
    if of.chunk < 0:
        return None
    return torch.tensor([0, *of.queries], device=device).cumsum(0, dtype=INT32)


def queries_of(of: Decode, x: Tensor, row: int) -> Tensor:
    """The last queries of a sequence, CHECKED at most, (1, queries, nheads, headdim)."""
    if of.chunk < 0:
        return x[row : row + 1, -CHECKED:]
    stop = sum(of.queries[: row + 1])
    return x[stop - min(of.queries[row], CHECKED) : stop].unsqueeze(0)


def make_cache(of: Decode, device: str) -> Cache:
    """Normal keys and values without pages, the same for every number of queries."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = of.batch, of.seqlen_k, of.nheads_k, of.headdim
    k, v = (torch.empty(shape, dtype=getattr(torch, of.dtype), device=device) for _ in range(2))
    for rows in (*k, *v):  # one by one, as the draws are larger than what is kept
        rows.copy_(torch.randn(shape[1:], device=device, generator=generator))
    return Cache(k, v, torch.tensor(of.sequences, dtype=INT32, device=device))


def paged(cache: Cache, page_size: int) -> Cache:
    """A cache of the same keys in pages that lie in no order."""
    batch, room = cache.k.shape[:2]
    pages = -(-room // page_size)
    generator = torch.Generator().manual_seed(page_size)
    table = torch.randperm(batch * pages, generator=generator).view(batch, pages)
    table = table.to(cache.k.device)

    def pool_of(x: Tensor) -> Tensor:
        pool = torch.empty(batch * pages * page_size, *x.shape[2:], dtype=x.dtype, device=x.device)
        pool = pool.unflatten(0, (batch * pages, page_size))
        pool.view(torch.uint8).zero_()
        for row, places in zip(x, table):
            whole = room // page_size
            pool[places[:whole]] = row[: whole * page_size].unflatten(0, (whole, page_size))
            if whole < pages:
                pool[places[whole], : room - whole * page_size] = row[whole * page_size :]
        return pool

    scales = {
        name: x if x is None or x.dim() == 1 else pool_of(x)
        for name, x in (("k_descale", cache.k_descale), ("v_descale", cache.v_descale))
    }
    pools = dict(k=pool_of(cache.k), v=pool_of(cache.v), page_table=table.to(INT32))
    return cache._replace(**pools, **scales)


def appending(cache: Cache, of: Decode) -> Cache:
    """The cache without its last keys, which are new; a cache without pages of one length each."""
    count, half = of.seqlen_q, of.headdim // 2
    before = cache.seqused_k - count
    rows = before.long()[:, None] + torch.arange(count, device=before.device)
    batch = torch.arange(of.batch, device=before.device)[:, None]
    frequencies = 10_000.0 ** -(torch.arange(half, device=before.device) / half)
    angles = torch.arange(of.seqlen_k, device=before.device)[:, None] * frequencies
    cos, sin = (table.to(cache.k.dtype) for table in (angles.cos(), angles.sin()))
    new = New(cache.k[batch, rows], cache.v[batch, rows], Rotary(cos, sin, False), before.to(INT32))
    return cache._replace(new=new)


def appended(q: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
    """Rotated queries, and what a cache without pages holds when its new keys are in it."""
    new = cast(New, cache.new)
    k, positions = cache.k.clone(), new.positions()
    rows = torch.arange(len(k), device=k.device)[:, None]
    k[rows, positions] = rotate(new.k, new.rotary, positions=positions)
    return rotate(q, new.rotary, positions=positions), cache._replace(k=k, new=None)


def quantised(cache: Cache, kind: str) -> Cache:
    """A cache without pages in 8 bits, one of KINDS, with a scale for each head or row."""
    name, _, by_row = kind.partition(":")
    dtype = DTYPES[name]
    codes, scales = [], []
    for x in cache[:2]:
        scale = row_scales(x, dtype)
        scale = scale if by_row else scale.amax((0, 1))
        code = torch.empty(x.shape, dtype=dtype, device=x.device)
        for at, rows in enumerate(x):  # one by one: what they pass through has 32 bits
            code[at] = quantize(rows, (scale[at] if by_row else scale).unsqueeze(-1), dtype)
        codes.append(code)
        scales.append(scale)
    return cache._replace(k=codes[0], v=codes[1], k_descale=scales[0], v_descale=scales[1])


def by_head(cache: Cache) -> Cache:
    """A cache in memory (batch, nheads_k, seqlen_k, headdim), as torch keeps a cache."""
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in cache[:2])
    return cache._replace(k=k, v=v)
