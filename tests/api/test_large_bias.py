"""Rows whose whole bias is one huge negative number, a mask as a bias: values and gradients are
those of torch's own math, whose P is 1 / n in the backward as in the forward.
"""

import contextlib
import itertools
import random

import pytest
import torch
from helpers.tiers import sample_rows

import tilewise
from tilewise import dispatch
from tilewise.problem import NO_EXTRAS, Scalars, describe
from tilewise.testing import use_emulator, use_interpreter

MODES = {"cpu": contextlib.nullcontext, "portable": use_interpreter, "hopper": use_emulator}
HUGE = -1e4, -65504.0, -1e9, torch.finfo(torch.bfloat16).min, torch.finfo(torch.float32).min
KINDS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Of the largest number: P and dS are rounded to 16 bits once, and so are results
ERRORS = {"fp32": 1e-5, "fp16": 2.0**-9, "bf16": 2.0**-6}
CASES = [
    *itertools.product(("cpu", "portable"), ["fp32"], HUGE, (False, True)),
    *[("hopper", kind, HUGE[2 * n], n > 0) for n, kind in ((1, "fp16"), (2, "bf16"))],
    *itertools.product(["hopper"], ("fp16", "bf16"), HUGE, (False, True)),
]
FAST = CASES[:20:2] + CASES[11:20:4] + CASES[20:22]


def by_torch(q, k, v, bias, sinks):
    """The formula in fp32, scores in one matrix: out, and lse."""
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5 + bias
    if sinks is not None:
        s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    p = torch.softmax(s, -1)[..., : k.shape[1]]
    m = s.detach().amax(-1, keepdim=True)  # torch's gradient of logsumexp is by an lse as large
    return torch.einsum("bhqk,bkhd->bqhd", p, v), torch.logsumexp(s - m, -1) + m[..., 0]


def added(bias, batches, heads):
    """The bias as a score function."""
    return lambda s, b, h, i, j: s + bias[b * batches, h * heads, i, j]


def drawn(rng, is_hopper, huge):
    """q, k, v and a bias in which rows and keys are hidden."""
    batch, seqlen_q = rng.choice((1, 2)), rng.choice((3, 40))
    seqlen_k, headdim = rng.choice((7, 150) if is_hopper else (1, 7, 50)), 64 if is_hopper else 16
    q = torch.randn(batch, seqlen_q, 2, headdim)
    k, v = torch.randn(2, batch, seqlen_k, 2, headdim).unbind(0)
    bias = torch.randn(rng.choice((1, batch)), rng.choice((1, 2)), seqlen_q, seqlen_k)
    masked = torch.rand(seqlen_q) < 0.6
    masked[0] = True
    bias[:, :, masked] = huge  # whole rows
    bias[..., torch.rand(seqlen_k) < 0.3] = huge  # and keys
    bias[:, :, 1, :-2] = huge  # all of a row's blocks but the last
    return q, k, v, bias


@pytest.mark.parametrize("backend, kind, huge, by_score", sample_rows(CASES, *FAST))
def test_masked_rows(backend, kind, huge, by_score):
    """out, lse and all gradients, the one of the bias also as of a captured tensor."""
    rng = random.Random(f"{huge} {by_score}")
    torch.manual_seed(0)
    for _ in range(4 if backend == "cpu" else 1):
        q, k, v, bias = drawn(rng, backend == "hopper", huge)
        sinks = None if by_score or rng.random() < 0.5 else torch.randn(2)
        leaves = [x.to(KINDS[kind]).requires_grad_() for x in (q, k, v)]
        leaves.append(bias.requires_grad_())
        options = dict(bias=bias, sinks=sinks)
        if by_score:
            options = dict(score_mod=added(bias, *(int(n > 1) for n in bias.shape[:2])))
        with MODES[backend]():
            outputs = tilewise.attention(*leaves[:3], backend=backend, return_lse=True, **options)
            douts = [torch.randn_like(x) for x in outputs]
            grads = torch.autograd.grad(outputs, leaves, douts)
        exact = [x.detach().float().requires_grad_() for x in leaves]
        expected = by_torch(*exact, sinks)
        theirs = torch.autograd.grad(expected, exact, [x.float() for x in douts])
        for mine, right in zip((*outputs, *grads), (*expected, *theirs)):
            most = max(1, right.abs().amax())
            assert ((mine - right).abs() / most).amax() <= ERRORS[kind], (huge, mine.shape)


@pytest.mark.parametrize("backend", MODES)
def test_rows_without_keys_beside_large_ones(backend):
    """They have gradients of 0, where the other rows' softmax is computed again."""
    torch.manual_seed(0)
    q, k, v = (x.half().requires_grad_() for x in torch.randn(3, 1, 5, 1, 64).unbind(0))
    bias = torch.randn(1, 1, 5, 5)
    bias[:, :, 1], bias[:, :, 2] = -torch.inf, HUGE[2]
    leaves = q, k, v, bias.requires_grad_()
    with MODES[backend]():
        out, lse = tilewise.attention(q, k, v, bias=bias, return_lse=True, backend=backend)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert lse[0, 0, 1] == -torch.inf and not out[0, 1].any()
    assert all(x.isfinite().all() for x in grads)
    assert not grads[0][0, 1].any() and not grads[3][0, 0, 1].any()


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
