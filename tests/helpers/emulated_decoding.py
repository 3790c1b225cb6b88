"""Calls of Hopper's decode kernel in the emulator, and what they are held to."""

import math

import torch

import tilewise
from tilewise.testing import use_emulator
from tilewise.testing.tolerance import assert_within

from .caches import contiguous, paged, sequences

QUERIES, LENGTHS = [1, 3, 0, 6], [300, 64, 5, 401]
HEADS, HEADDIMS, BF16 = (4, 2), (64, 64), torch.bfloat16
FEATURES = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=(150, 3)),
    "softcap": dict(causal=True, scale=0.7, softcap=3.0),
    "alibi": dict(causal=True, alibi_slopes=torch.tensor([0.5, 0.1, 0.02, 0.01])),
    "sinks": dict(causal=True, sinks=torch.tensor([1.0, -math.inf, 0.0, 4.0])),
    "mask": dict(mask_mod=lambda b, h, q_idx, kv_idx: ((q_idx - kv_idx) % 3 != h) | (b == 1)),
}


def drawn(queries=QUERIES, lengths=LENGTHS, heads=HEADS, headdims=HEADDIMS, dtype=BF16):
    return sequences(queries, lengths, heads, headdims, dtype)


def run(s, page_size=16, seed=0, attend=tilewise.attention, cast=None, split_size=128, **options):
    table, k, v = None, contiguous(s.k), contiguous(s.v)
    if page_size is not None:
        k, v, table = paged(s, page_size, seed)
    q = torch.cat(s.q)
    if cast is not None:
        q, k, v = q.to(cast), k.to(cast), v.to(cast)
    at = dict(page_table=table, seqused_k=s.lengths, cu_seqlens_q=s.starts)
    if attend is not tilewise.attention:
        return attend(q, k, v, return_lse=True, **at, **options)
    options |= dict(split_size=split_size, backend="hopper")
    with use_emulator(seed):
        return attend(q, k, v, return_lse=True, **at, **options)


def check(s, found, page_size=None, **options):
    reference = tilewise.attention_reference
    oracle = run(s, page_size, attend=reference, cast=torch.float64, **options)
    plain = run(s, page_size, attend=reference, upcast=False, **options)
    for name, mine, exact, rough in zip(("out", "lse"), found, oracle, plain):
        assert_within(mine, exact, rough, name)


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
