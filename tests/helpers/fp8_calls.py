"""Inputs of FP8 calls through the public functions."""

import torch

import tilewise
from tilewise.kernels.common.quantized import FP8

INT32 = torch.int32
SLOPES = torch.tensor([0.3, 0.1, 0.7, 0.2])
SINKS = torch.tensor([0.3, 2.0, -1.0, 0.0])
FEATURES = {
    "plain": {},
    "causal": dict(causal=True),
    "top left": dict(causal="top_left"),
    "window": dict(window=(40, 7)),
    "softcap": dict(causal=True, softcap=2.0),
    "alibi": dict(causal=True, alibi_slopes=SLOPES),
    "sinks": dict(causal=True, sinks=SINKS),
    "seqused": dict(causal=True, seqused_k=torch.tensor([90, 0], dtype=INT32)),
    "scale": dict(scale=0.3),
}


def tensors(batch=2, seqlen_q=70, seqlen_k=150, heads=(4, 2), headdims=(32, 16), seed=0, k_mean=1):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    q = draw(batch, seqlen_q, heads[0], headdims[0])
    k, v = (draw(batch, seqlen_k, heads[1], d) for d in headdims)
    return q, k + k_mean, v + 1


def eight(*given):
    return [x.to(FP8) for x in given or tensors()]


def starts(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(INT32)


def exactly(given, descales=(1.0, 1.0, 1.0), **options):
    given = [x.double() * s for x, s in zip(given, descales)]
    return tilewise.attention_reference(*given, return_lse=True, **options)


def assert_near(found, exact, rtol=1e-5):
    for mine, theirs in zip(found, exact):
        torch.testing.assert_close(mine.double(), theirs, rtol=rtol, atol=rtol)


def bits(x):
    return x.view(torch.int8) if x.dtype == FP8 else x


def assert_same(x, y):
    """Two Quantized, bit for bit."""
    for mine, theirs in zip((*x[:3], *x.scales, *x[4:6]), (*y[:3], *y.scales, *y[4:6])):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(bits(mine), bits(theirs))
    assert (x.v_drift is None) == (y.v_drift is None)
    assert x.v_drift is None or x.v_drift == y.v_drift
