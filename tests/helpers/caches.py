"""Caches for tests: sequences of given lengths, contiguous and in pages of any size and order."""

from typing import NamedTuple

import torch

INT32 = torch.int32


class Sequences(NamedTuple):
    """What a cache holds, sequence by sequence, and the last queries of each."""

    q: list[torch.Tensor]  # (seqlen_q, nheads, headdim)
    k: list[torch.Tensor]  # (seqlen_k, nheads_k, headdim)
    v: list[torch.Tensor]

    @property
    def lengths(self):
        return torch.tensor([len(x) for x in self.k], dtype=INT32)

    @property
    def starts(self):
        return torch.tensor([0, *(len(x) for x in self.q)], dtype=INT32).cumsum(0, dtype=INT32)


def sequences(queries, lengths, heads=(4, 2), headdims=(16, 16), dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(n, nheads, headdim):
        return torch.randn(n, nheads, headdim, generator=generator).to(dtype)

    q = [draw(n, heads[0], headdims[0]) for n in queries]
    k = [draw(n, heads[1], headdims[0]) for n in lengths]
    v = [draw(n, heads[1], headdims[1]) for n in lengths]
    return Sequences(q, k, v)


def contiguous(xs, room=None, fill=float("nan")):
    """(batch, seqlen_k, nheads_k, headdim), `fill` where nothing is."""
    room = max(map(len, xs)) if room is None else room
    cache = xs[0].new_full((len(xs), room, *xs[0].shape[1:]), fill)
    for row, x in zip(cache, xs):
        row[: len(x)] = x
    return cache


def paged(s, page_size, seed=0, fill=float("nan"), unused=(-1, 2**31 - 1), spare=3):
    """k and v in pages of any order, and the table; all that is not in use is poisoned."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-len(x) // page_size) for x in s.k]
    order = torch.randperm(sum(counts) + spare, generator=generator).tolist()
    table = torch.tensor(unused, dtype=INT32).repeat(len(counts), max(counts) + 2)
    pools = [x[0].new_full((len(order), page_size, *x[0].shape[1:]), fill) for x in (s.k, s.v)]
    for b, n in enumerate(counts):
        for i in range(n):
            page = table[b, i] = order.pop()
            for pool, x in zip(pools, (s.k[b], s.v[b])):
                rows = x[i * page_size : (i + 1) * page_size]
                pool[page, : len(rows)] = rows
    return *pools, table
