"""What `bench decode` times: the last queries of sequences, and the KV caches that they
attend to: contiguous, or in pages of any size and in no order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .lengths import sequences

Tensor = torch.Tensor
INT32 = torch.int32
COLD_BYTES = 256 << 20  # what is read between two reads of a byte, so that it is in no L2 cache


class Decode(NamedTuple):
    """A step of decoding: `seqlen_q` queries of each sequence, the last ones, beside its keys.

    `page_size` 0 is a cache without pages. `lengths` are those of a ragged batch; its seqlen_k is
    the longest.
    """

    direction: str  # "decode"
    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_k: int
    headdim: int
    headdim_v: int
    causal: bool  # bottom-right
    dtype: str
    page_size: int = 0
    lengths: str = ""

    @property
    def sequences(self) -> tuple[int, ...]:
        """How many keys each sequence has."""
        return sequences(self.lengths) if self.lengths else (self.seqlen_k,) * self.batch

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values in use."""
        row = self.nheads_k * (self.headdim + self.headdim_v)
        return sum(self.sequences) * row * getattr(torch, self.dtype).itemsize

    @property
    def flops(self) -> float:
        """2 (D + Dv) for each query head and key that it sees."""
        hidden = self.seqlen_q * (self.seqlen_q - 1) // 2  # of a sequence, by the causal mask
        pairs = sum(self.seqlen_q * keys - hidden for keys in self.sequences)
        return 2.0 * self.nheads * pairs * (self.headdim + self.headdim_v)

    @property
    def copies(self) -> int:
        """How many caches the calls rotate over, so that what is read next is in no L2 cache."""
        return max(2, -(-COLD_BYTES // self.kv_bytes))

    @property
    def sizes(self) -> str:
        """B32 S8192, or of a ragged batch zipf B64 S<=16416."""
        if self.lengths:
            return f"{self.lengths} B{self.batch} S<={self.seqlen_k}"
        return f"B{self.batch} S{self.seqlen_k}"

    def __str__(self) -> str:
        heads = f"{self.nheads}" + (f":{self.nheads_k}" if self.nheads_k != self.nheads else "")
        return f"decode {self.sizes} H{heads} D{self.headdim} {self.dtype}"


def decode(
    batch: int,
    seqlen_k: int,
    heads: tuple[int, int, int],
    *,
    lengths: str = "",
    queries: int = 1,
    page_size: int = 0,
    dtype: str = "bfloat16",
) -> Decode:
    """One step; `heads` are nheads, nheads_k, headdim. `lengths` replace batch and seqlen_k."""
    if lengths:
        each = sequences(lengths)
        batch, seqlen_k = len(each), max(each)
    nheads, nheads_k, headdim = heads
    sizes = batch, queries, seqlen_k, nheads, nheads_k, headdim, headdim
    found = Decode("decode", *sizes, True, dtype, page_size, lengths)
    if queries > min(found.sequences):
        raise ValueError(f"{queries} queries are more than a sequence of {min(found.sequences)}")
    return found


class Cache(NamedTuple):
    """Keys and values of one step, and where they lie."""

    k: Tensor  # (batch, seqlen_k, nheads_k, headdim), or pages (num_pages, page_size, ...)
    v: Tensor
    seqused_k: Tensor  # int32 (batch,)
    page_table: Tensor | None = None  # int32 (batch, pages)

    def copy(self) -> Cache:
        """The same in memory of its own, strides and all."""
        table = None if self.page_table is None else self.page_table.clone()
        return Cache(self.k.clone(), self.v.clone(), self.seqused_k.clone(), table)


def make_queries(of: Decode, device: str) -> Tensor:
    """Normal, (batch, seqlen_q, nheads, headdim)."""
    generator = torch.Generator(device=device).manual_seed(of.seqlen_q)
    shape = of.batch, of.seqlen_q, of.nheads, of.headdim
    q = torch.randn(shape, device=device, generator=generator)
    return q.to(getattr(torch, of.dtype))


def make_cache(of: Decode, device: str) -> Cache:
    """Normal keys and values without pages, the same for every number of queries."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = of.batch, of.seqlen_k, of.nheads_k, of.headdim
    k, v = (torch.empty(shape, dtype=getattr(torch, of.dtype), device=device) for _ in range(2))
    for rows in (*k, *v):  # one by one, as the draws are larger than what is kept
        rows.copy_(torch.randn(shape[1:], device=device, generator=generator))
    return Cache(k, v, torch.tensor(of.sequences, dtype=INT32, device=device))


def paged(cache: Cache, page_size: int) -> Cache:
    """The same keys in pages that lie in no order."""
    batch, room = cache.k.shape[:2]
    pages = -(-room // page_size)
    generator = torch.Generator().manual_seed(page_size)
    table = torch.randperm(batch * pages, generator=generator).view(batch, pages)
    table = table.to(cache.k.device)
    pools = []
    for x in cache[:2]:
        pool = x.new_zeros(batch * pages, page_size, *x.shape[2:])
        for row, places in zip(x, table):
            padded = torch.nn.functional.pad(row, (0, 0, 0, 0, 0, pages * page_size - room))
            pool[places] = padded.unflatten(0, (pages, page_size))
        pools.append(pool)
    return Cache(pools[0], pools[1], cache.seqused_k, table.to(INT32))


def by_head(cache: Cache) -> Cache:
    """The same, in memory (batch, nheads_k, seqlen_k, headdim), as torch keeps a cache."""
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in cache[:2])
    return cache._replace(k=k, v=v)
