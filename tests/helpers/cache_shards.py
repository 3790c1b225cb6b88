"""Sequences whose keys lie on several ranks, in pages of any order, and calls over them."""

import contextlib
import itertools
import unittest.mock

import torch

import tilewise.distributed as td

from .caches import INT32, contiguous, sequences

PIECE, PAGE = 16, 8
# Lengths of sequences, queries, and arguments; fewer keys than ranks have pieces, and none
CASES = {
    "one query": ((70, 5, 0, 33), 1, dict(causal=True)),
    "several queries": ((70, 9, 4, 33), 4, dict(causal=True)),
    "sinks": ((70, 5, 0, 129), 2, dict(causal=True, sinks=True)),
    "a window": ((200, 5, 33, 64), 3, dict(window=(20, 0))),
    "both sides": ((90, 17, 33, 64), 3, dict(window=(25, 1), softcap=3.0, scale=0.4)),
    "full": ((90, 17, 33, 16), 3, dict()),
    "one head": ((90, 17, 33, 16), 2, dict(causal=True, heads=(4, 1))),
    "spans": ((1700, 900), 2, dict(causal=True, piece=1040)),  # of 512 keys, and one of 16
    "fp16": ((200, 5, 33, 64), 3, dict(causal=True, dtype=torch.float16)),
}


def made(name, device="cpu"):
    """The sequences of a case, its queries, its arguments and the keys of a rank's pieces."""
    lengths, queries, asked = CASES[name]
    asked = dict(asked)
    piece = asked.pop("piece", PIECE)
    heads, dtype = asked.pop("heads", (4, 2)), asked.pop("dtype", torch.float32)
    if device != "cpu":
        dtype = torch.bfloat16
    s = sequences([queries] * len(lengths), lengths, heads, (16, 24), dtype)
    s = s._make([x.to(device) for x in part] for part in s)
    if asked.get("sinks"):
        asked["sinks"] = s.q[0].new_ones(heads[0])
    return s, torch.stack(s.q), asked, piece


def shuffled(shards, lengths, seed):
    """A table of pages in any order for a rank's keys, and how many there are; NaN else."""
    by_rank = [
        [-(-int(n) // PAGE) for n in shards.lengths(lengths, r)] for r in range(shards.ranks)
    ]
    counts = by_rank[shards.rank]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    widest = max(itertools.chain(*by_rank), default=0)  # ranks' tables are as wide
    table = torch.full((len(counts), widest + 1), -1, dtype=INT32)
    for b, n in enumerate(counts):
        for i in range(n):
            table[b, i] = order.pop()
    return table, sum(counts) + 2


def filled(shards, s, chunks=3):
    """A rank's pages, to which all keys were appended in some chunks of the whole sequences."""
    table, pages = shuffled(shards, s.lengths, shards.rank)
    table, lengths = table.to(s.k[0].device), s.lengths.to(s.k[0].device)
    k_cache, v_cache = (x[0].new_full((pages, PAGE, *x[0].shape[1:]), float("nan")) for x in s[1:])
    k, v = contiguous(s.k, fill=0.0), contiguous(s.v, fill=0.0)
    for row, n in enumerate(s.lengths.tolist()):
        ends = [0, *((n - 1) * (i + 1) // chunks for i in range(chunks))]
        for a, b in itertools.pairwise(ends):
            if a < b:
                new = [x[row : row + 1, a:b] for x in (k, v)]
                where = dict(seqused_k=lengths[row : row + 1] - n + b)
                shards.append(k_cache, v_cache, *new, page_table=table[row : row + 1], **where)
    # The last key of all, or none of a sequence without keys
    place = (lengths.long() - 1).clamp(min=0).view(-1, 1, 1, 1)
    last = [x.gather(1, place.expand(-1, 1, *x.shape[2:])) for x in (k, v)]
    shards.append(k_cache, v_cache, *last, seqused_k=lengths, page_table=table)
    return k_cache, v_cache, table


class Apart(td.CacheShards):
    """One rank's shards in a process of no group: what it sends, and what it makes of all."""

    def __init__(self, piece, ranks, rank):
        super().__init__(piece, 1)
        self.ranks, self.rank, self.is_planned = ranks, rank, False
        self.agreement = unittest.mock.MagicMock()
        self.sent, self.received = None, None

    def _gather(self, sent):
        self.sent = sent
        if self.received is None:
            raise EOFError
        return self.received


def attend_apart(attend, s, piece, ranks):
    """`attend(shards, k_cache, v_cache, page_table)` of each rank in turn, and what the first makes
    of what all have sent.
    """
    shards = [Apart(piece, ranks, rank) for rank in range(ranks)]
    caches = [filled(x, s) for x in shards]
    for x, (k, v, table) in zip(shards, caches):
        with contextlib.suppress(EOFError):
            attend(x, k, v, table)
    shards[0].received = torch.stack([x.sent for x in shards])
    return attend(shards[0], *caches[0])
