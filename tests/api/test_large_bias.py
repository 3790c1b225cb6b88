"""Rows whose whole bias is one huge negative number, a mask as a bias: values and gradients are
those of torch's own math, whose P is 1 / n in the backward as in the forward.
"""

import contextlib
import random

import pytest
import torch

import tilewise
from tilewise import dispatch
from tilewise.problem import NO_EXTRAS, Scalars, describe
from tilewise.testing import use_interpreter

MODES = {"cpu": contextlib.nullcontext, "portable": use_interpreter}
HUGE = -1e4, -65504.0, -1e9, torch.finfo(torch.bfloat16).min, torch.finfo(torch.float32).min


def by_torch(q, k, v, bias, sinks):
    """The formula in fp32, scores in one matrix."""
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5 + bias
    if sinks is None:
        p = torch.softmax(s, -1)
    else:
        column = sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        p = torch.softmax(torch.cat([s, column], -1), -1)[..., :-1]
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


def added(bias, batches, heads):
    """The bias as a score function."""
    return lambda s, b, h, i, j: s + bias[b * batches, h * heads, i, j]


@pytest.mark.parametrize("backend", MODES)
@pytest.mark.parametrize("huge", HUGE, ids=lambda huge: f"{huge:.3g}")
@pytest.mark.parametrize("by_score", [False, True], ids=["bias", "score_mod"])
def test_masked_rows(backend, huge, by_score):
    rng = random.Random(f"{huge} {by_score}")
    torch.manual_seed(0)
    for _ in range(4 if backend == "cpu" else 1):
        batch, seqlen_q, seqlen_k = rng.choice((1, 2)), rng.choice((3, 40)), rng.choice((1, 7, 50))
        q = torch.randn(batch, seqlen_q, 2, 16)
        k, v = torch.randn(2, batch, seqlen_k, 2, 16).unbind(0)
        bias = torch.randn(rng.choice((1, batch)), rng.choice((1, 2)), seqlen_q, seqlen_k)
        masked = torch.rand(seqlen_q) < 0.6
        masked[0] = True
        bias[:, :, masked] = huge  # whole rows
        bias[..., torch.rand(seqlen_k) < 0.3] = huge  # and keys
        sinks = None if by_score or rng.random() < 0.5 else torch.randn(2)
        leaves = [x.requires_grad_() for x in (q, k, v, bias)]
        if by_score:
            bias, leaves = bias.detach(), leaves[:3]
            asked = dict(score_mod=added(bias, *(int(n > 1) for n in bias.shape[:2])))
        else:
            asked = dict(bias=bias, sinks=sinks)
        with MODES[backend]():
            out = tilewise.attention(q, k, v, backend=backend, **asked)
            dout = torch.randn_like(out)
            grads = torch.autograd.grad(out, leaves, dout)
        expected = by_torch(q, k, v, bias, sinks)
        theirs = torch.autograd.grad(expected, leaves, dout)
        for mine, exact in zip((out, *grads), (expected, *theirs)):
            assert (mine - exact).abs().amax() <= 1e-5 * max(1, exact.abs().amax())


@pytest.mark.parametrize("scale", [1e4, 1e7, 1e12])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_large_scores_are_finite(scale, causal):
    """On a CPU, where P is computed as the forward did: at most 1."""
    torch.manual_seed(0)
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 60, 2, 16).unbind(0))
    out = tilewise.attention(q, k, v, scale=scale, causal=causal)
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(x.isfinite().all() for x in (out, *grads))
    assert grads[2].abs().amax() < 60  # sums of dout, each of which has P up to 1


def test_fp64_on_a_gpu_is_refused_with_a_way_out():
    x = torch.empty(1, 4, 1, 16, dtype=torch.float64)
    problem = describe(x, x, x, NO_EXTRAS, Scalars(1.0), "bottom_right", False)
    assert "attention_reference" in dispatch.ask("portable", problem, torch.device("cuda"))
