"""A row that sees no key has out 0 whatever V holds, in the kernels for the CPU and in plain torch,
and in those for GPUs if V is finite, or its sequence has no keys.

Which rows these are is what the log-sum-exp without sinks says of a V of numbers.
"""

import functools
import itertools
import math

import pytest
import torch

import tilewise
from tilewise.sparse import create_block_mask
from tilewise.testing import use_emulator, use_interpreter

INT32 = torch.int32
HEADS, HEADS_K, PAGE = 4, 2, 16
LENGTHS = (40, 32), (9, 144), (6, 1104)  # the last ones are several blocks, and spans, of keys
DTYPES = torch.float32, torch.bfloat16
SINKS = torch.tensor([0.5, -2.0, 9.0, -math.inf])
BACKENDS = {
    "cpu": functools.partial(tilewise.attention, backend="cpu"),
    "reference": tilewise.attention_reference,
    "reference, same dtype": functools.partial(tilewise.attention_reference, upcast=False),
}


def sees(b, h, q_idx, kv_idx):
    """Rows of 3 sorts: without keys, with the last keys alone, and with all of them."""
    return (q_idx % 3 != 0) & ((q_idx % 3 == 1) | (kv_idx > 20))


def hides(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx % 3 != 0, score, -math.inf)


def ints(*values):
    return torch.tensor(values, dtype=INT32)


def bias_of(lengths):
    bias = torch.randn(1, HEADS, *lengths)
    bias[:, 0, ::3], bias[:, 1, 1::3] = -math.inf, -math.inf
    return dict(bias=bias)


def blocks_of(lengths):
    return dict(block_mask=create_block_mask(sees, None, None, *lengths, BLOCK_SIZE=16))


DENSE = {
    "causal": lambda n: dict(causal=True),
    "causal, cap": lambda n: dict(causal=True, softcap=5.0),
    "window": lambda n: dict(causal="top_left", window=(3, 0)),
    "alibi": lambda n: dict(causal=True, alibi_slopes=torch.rand(HEADS)),
    "mask": lambda n: dict(mask_mod=sees),
    "mask, window": lambda n: dict(mask_mod=sees, window=(5, 3)),
    "dropout": lambda n: dict(mask_mod=sees, dropout_p=0.5, dropout_rng=torch.tensor([3, 1])),
    "score": lambda n: dict(score_mod=hides),
    "bias": bias_of,
    "block mask": blocks_of,
    "no keys": lambda n: dict(seqused_k=ints(0, n[1] - 3)),
}
PAGED = {
    "pages": lambda n: dict(causal=True),
    "pages, mask": lambda n: dict(mask_mod=sees),
    "pages, window": lambda n: dict(window=(20, 0), mask_mod=sees, softcap=5.0),
}
PACKED = {
    "packed": lambda n: dict(causal=True),
    "packed, mask": lambda n: dict(mask_mod=sees),
    "packed, none": lambda n: dict(seqused_k=ints(0, n[1] - 7)),
}


def draw(name, lengths, dtype, headdim=16):
    """q, k, v and options of two sequences."""
    q = torch.randn(2, lengths[0], HEADS, headdim).to(dtype)
    k, v = torch.randn(2, 2, lengths[1], HEADS_K, headdim).to(dtype).unbind(0)
    if name in DENSE:
        return q, k, v, DENSE[name](lengths)
    if name in PACKED:
        starts = [ints(0, n - n // 4, 2 * n) for n in lengths]
        packed = dict(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
        return *(x.flatten(0, 1) for x in (q, k, v)), PACKED[name](lengths) | packed
    k, v = (x.reshape(-1, PAGE, HEADS_K, headdim) for x in (k, v))
    used = dict(seqused_k=ints(5, lengths[1] - 1))
    return q, k, v, PAGED[name](lengths) | used | dict(page_table=pages_of(len(k)))


def pages_of(n):
    return torch.arange(n, dtype=INT32).flip(0).view(2, -1).contiguous()


@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*DENSE, *PAGED, *PACKED])
def test_out_is_0(name, backend, has_sinks):
    attend, some = BACKENDS[backend], 0
    cases = itertools.product(LENGTHS, DTYPES, (math.nan, math.inf, -math.inf))
    for lengths, dtype, value in cases:
        q, k, v, options = draw(name, lengths, dtype)
        attend = functools.partial(BACKENDS[backend], return_lse=True, **options)
        is_empty = (attend(q, k, v)[1] == -math.inf).movedim(-2, -1)
        if has_sinks:
            attend = functools.partial(attend, sinks=SINKS)
        out, lse = attend(q, k, torch.full_like(v, value))
        assert torch.equal(lse, attend(q, k, v)[1])
        assert out[is_empty].eq(0).all()
        assert not out[~is_empty].isfinite().any() or name == "dropout"
        some += int(is_empty.sum())
    assert some


def test_a_span_without_keys_is_nothing():
    """Of a cache: what the keys hold that a row's mask hides, a span at a time, is not read."""
    q, k, v = torch.randn(1, 3, 2, 8), *torch.randn(2, 1, 2000, 2, 8)
    lengths = dict(seqused_k=ints(2000), page_table=ints(0)[None])
    options = dict(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx >= 1024, **lengths)
    expected = tilewise.attention(q, k, v, backend="cpu", **options)
    v[:, :1024] = math.nan
    assert torch.equal(tilewise.attention(q, k, v, backend="cpu", **options), expected)


KERNELS = {"portable": use_interpreter, "hopper": use_emulator}


@pytest.mark.parametrize("name", ["causal", "mask", "no keys", "pages", "packed", "packed, none"])
@pytest.mark.parametrize("backend", KERNELS)
def test_kernels_for_gpus(name, backend):
    """LSE is that of any V; out is 0 of a finite V, and of any in a sequence without keys."""
    q, k, v, options = draw(name, LENGTHS[0], torch.bfloat16, headdim=64)
    attend = functools.partial(tilewise.attention, q, k, backend=backend, return_lse=True)
    with KERNELS[backend](), torch.no_grad():
        out, lse = attend(v, **options)
        nan_out, nan_lse = attend(torch.full_like(v, math.nan), **options)
    is_empty = (lse == -math.inf).movedim(-2, -1)
    assert torch.equal(nan_lse, lse) and is_empty.any() and out[is_empty].eq(0).all()
    if name in ("no keys", "packed, none"):
        assert nan_out[is_empty].eq(0).all()
