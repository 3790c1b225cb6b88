"""Rows of packed tensors behind cu_seqlens[-1]: padding that no kernel may leave as it found it."""

import contextlib
import math
import random

import pytest
import torch
from helpers.caches import contiguous, sequences

import tilewise
from tilewise.testing import use_emulator, use_interpreter
from tilewise.testing.inputs import poisoned

BF16 = torch.bfloat16
MODES = {"cpu": contextlib.nullcontext, "portable": use_interpreter, "hopper": use_emulator}


@pytest.mark.parametrize("backend", MODES)
@pytest.mark.parametrize("split_size", [128, 4096], ids=["pieces", "whole"])
def test_queries_over_a_cache(backend, split_size):
    """out is 0 there and lse -inf; in the caller's `out=` rows stay as they are. Bits of the others
    are those of a call without a tail.
    """
    rng = random.Random(split_size)
    for has_out in (False, True):
        queries = [rng.choice((0, 1, 3)) for _ in range(3)] + [rng.choice((0, 2))]
        s = sequences(queries, [140, 9, 0, 20], (2, 1), (64, 64), dtype=BF16)
        tail, total = rng.choice((1, 5, 19)), sum(queries)
        q = torch.cat([*s.q, torch.full((tail, 2, 64), math.nan, dtype=BF16)])
        out = torch.full_like(q, 7.0) if has_out else None
        options = dict(seqused_k=s.lengths, cu_seqlens_q=s.starts, split_size=split_size)
        options |= dict(causal=True, backend=backend, return_lse=True)
        k, v = contiguous(s.k), contiguous(s.v)
        with MODES[backend](), poisoned():
            found, lse = tilewise.attention(q, k, v, out=out, **options)
            expected, lse_expected = tilewise.attention(q[:total], k, v, **options)
        assert torch.equal(found[:total], expected) and torch.equal(lse[:, :total], lse_expected)
        assert (found[total:] == (7 if has_out else 0)).all(), (queries, tail, has_out)
        assert (lse[:, total:] == -math.inf).all(), (queries, tail, has_out)


@pytest.mark.parametrize("backend", ["cpu", "portable"])
def test_packed_sequences(backend):
    """out and all gradients are 0 and lse -inf, also where what lies there is NaN."""
    rng = random.Random(backend)
    for _ in range(3 if backend == "cpu" else 1):
        lengths = [[rng.choice((0, 1, 20, 40)) for _ in range(3)] for _ in "qk"]
        tails = rng.choice((1, 70)), rng.choice((0, 5, 40))
        starts = [torch.tensor([0, *x], dtype=torch.int32).cumsum(0).int() for x in lengths]
        totals = [sum(x) for x in lengths]
        shapes = [(totals[0], 4), (totals[1], 2), (totals[1], 2), (totals[0], 4)]
        tensors = [torch.randn(*shape, 16) for shape in shapes]
        behind = [tails[0], tails[1], tails[1], tails[0]]
        padded = [
            torch.cat([x, x.new_full((n, *x.shape[1:]), math.nan)]) for x, n in zip(tensors, behind)
        ]
        results = []
        with MODES[backend](), poisoned():
            for *leaves, dout in (padded, tensors):
                leaves = [x.clone().requires_grad_() for x in leaves]
                options = dict(cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], backend=backend)
                out, lse = tilewise.attention(*leaves, causal=True, return_lse=True, **options)
                grads = torch.autograd.grad(out, leaves, dout)
                results.append((out.detach(), *grads, lse.T.detach()))
        for n, (mine, expected) in enumerate(zip(*results)):
            total = len(expected)
            torch.testing.assert_close(mine[:total], expected)
            nothing = -math.inf if n == 4 else 0
            assert (mine[total:] == nothing).all(), (n, lengths, tails)


@pytest.mark.parametrize("backend", MODES)
def test_no_sequences(backend):
    """cu_seqlens of [0], with rows: all of them are padding; `out=` stays as it is."""
    starts, dtype = torch.zeros(1, dtype=torch.int32), BF16 if backend == "hopper" else None
    options = dict(cu_seqlens_q=starts, return_lse=True, backend=backend)
    for keys in (0, 7):
        leaves = [torch.full((n, 2, 64), math.nan, dtype=dtype) for n in (5, keys, keys)]
        leaves = [x.requires_grad_() for x in leaves]
        with MODES[backend](), poisoned():
            out, lse = tilewise.attention(*leaves, cu_seqlens_k=starts, **options)
            grads = torch.autograd.grad(out, leaves, torch.randn_like(out))
        assert all((x == 0).all() for x in (out, *grads)) and (lse == -math.inf).all()
    q, cache = leaves[0].detach(), torch.zeros(0, 64, 2, 64, dtype=dtype)
    for given in (None, torch.full_like(q, 7)):
        with MODES[backend](), poisoned():
            out, lse = tilewise.attention(
                q, cache, cache, seqused_k=starts[1:], out=given, **options
            )
        assert (out == (0 if given is None else 7)).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("headdim_v", [64, 160])
def test_no_sequences_in_fp8(smooth, headdim_v):
    """The same of quantising and of FP8 products, with gradients."""
    starts = torch.zeros(1, dtype=torch.int32)
    lengths = dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
    for keys in (0, 7):
        sizes = (5, 64), (keys, 64), (keys, headdim_v)
        leaves = [torch.ones(n, 2, d, dtype=BF16, requires_grad=True) for n, d in sizes]
        with poisoned():
            x = tilewise.quantize(*leaves, smooth=smooth, **lengths)
            out, lse = tilewise.attention(x, backward="bf16", return_lse=True, **lengths)
            grads = torch.autograd.grad(out, leaves, torch.randn_like(out))
            raw = tilewise.attention(x.q, x.k, torch.zeros(keys, 2, headdim_v).to(x.q), **lengths)
        assert x.scales.k.shape == (0, 2) and x.v_t.shape == (2, headdim_v, 0)
        assert all((t == 0).all() for t in (out, raw, *grads)) and (lse == -math.inf).all()
