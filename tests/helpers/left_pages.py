"""Calls over a cache in pages, and the same after a window has left pages behind."""

import torch

from .caches import paged, sequences
from .eight_bits import DTYPES, POISON, quantised


def arguments(queries, lengths, page_size, dtype=torch.bfloat16, heads=(4, 2), headdims=(64, 64)):
    """Of a call with packed queries; caches of 8 bits have scales of rows."""
    if dtype in DTYPES.values():
        x = quantised(queries, lengths, dtype, "row", heads, headdims)
        return dict(q=torch.cat(x.s.q), **x.cache(page_size))
    s = sequences(queries, lengths, heads, headdims, dtype)
    cache = dict(zip(("k", "v", "page_table"), paged(s, page_size)))
    return dict(q=torch.cat(s.q), **cache, seqused_k=s.lengths, cu_seqlens_q=s.starts)


def in_batch(at):
    """The same call of sequences that have as many queries each."""
    at = dict(at, q=at["q"].unflatten(0, (len(at["seqused_k"]), -1)))
    del at["cu_seqlens_q"]
    return at


def leave(at, left):
    """The same call when pages that a window of `left` has left behind are poisoned, and their
    entries say anything.
    """
    at = {name: x.clone() for name, x in at.items()}
    page_size, lengths = at["k"].shape[1], at["seqused_k"]
    if "cu_seqlens_q" in at:
        firsts = lengths - at["cu_seqlens_q"].diff() - left
    else:
        firsts = lengths - at["q"].shape[1] - left
    for entries, first in zip(at["page_table"], firsts.tolist()):
        count = max(0, first) // page_size
        for name in at.keys() & {"k", "v", "k_descale", "v_descale"}:
            at[name][entries[:count].long()] = POISON.get(at[name].dtype, float("nan"))
        entries[:count:3], entries[1:count:3] = -1, 2**31 - 1
    return at
