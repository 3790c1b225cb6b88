"""Errors planted in the library's answers are caught, so that finding none means something."""

import pytest
import torch
from helpers.tiers import sample

from tilewise import attention

from .cases import case
from .lanes import LANES
from .run import run

LANE = LANES["cpu-cpu"]
TRIES, CAUGHT = 8, 6  # so many cases of those that a mutant concerns, and how many show it


class LastKeysGradient(torch.autograd.Function):
    """k, and nine tenths of its gradient at the last key."""

    @staticmethod
    def forward(ctx, k, dim):
        ctx.dim = dim
        return k.view_as(k)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad.select(ctx.dim, -1).mul_(0.9)
        return grad, None


def scale(asked):
    return attention(**asked | {"scale": 1.02 * (asked["scale"] or asked["q"].shape[-1] ** -0.5)})


def window(asked):
    left, right = asked["window"]
    return attention(**asked | {"window": (left + 1, right)})


def lse(asked):
    out, lse = attention(**asked)
    return out, lse + 1e-3


def last_key(asked):
    dim = 0 if "cu_seqlens_k" in asked else 1 if asked["layout"] == "bshd" else 2
    return attention(**asked | {"k": LastKeysGradient.apply(asked["k"], dim)})


def dropout(asked):
    return attention(**asked | {"dropout_rng": asked["dropout_rng"] + torch.tensor([0, 1])})


def slopes(asked):
    return attention(**asked | {"alibi_slopes": asked["alibi_slopes"] * 1.01})


def sinks(asked):
    return attention(**asked | {"sinks": asked["sinks"] * 0.98})


# What each plants, and the cases in which it changes anything.
MUTANTS = {
    scale: lambda x: x.values == "normal" and not x.logits,
    window: lambda x: x.left is not None and x.left < min(x.keys) - 1,
    lse: lambda x: True,
    last_key: lambda x: (
        not {"used", "mask", "window", "logits", "softcap"} & {*x.look.features}
        and not x.look.causal
        and x.values == "normal"
    ),
    dropout: lambda x: x.dropout_p >= 0.1,
    slopes: lambda x: x.look.has("slopes"),
    sinks: lambda x: x.look.has("sinks"),
}


def concerned(mutant):
    """Cases of some length that the mutant concerns, in the precision that shows most."""
    found = (case(seed, LANE) for seed in range(5000))
    return [
        x
        for x in found
        if x.look.dtype in ("float32", "float64")
        and x.look.mask != "nothing"
        and min(x.queries) > 8
        and min(x.keys) > 8
        and sum(x.queries) * x.look.nheads < 500
        and MUTANTS[mutant](x)
    ][:TRIES]


@pytest.mark.parametrize("mutant", sample(MUTANTS, lse), ids=lambda x: x.__name__)
def test_planted_errors_are_caught(mutant):
    cases = concerned(mutant)
    assert len(cases) == TRIES
    caught = [run(x, lambda **asked: mutant(asked)).faults for x in cases]
    assert not any("raised" in fault for faults in caught for fault in faults), caught
    assert sum(map(bool, caught)) >= CAUGHT
    assert not any(run(x).faults for x in cases)


def test_written_inputs_are_caught():
    """Those of a call, and the margins around them."""
    one = case(3, LANE)

    def inside(**asked):
        asked["v"].data.view(-1)[:1].add_(1.0) if asked["v"].is_contiguous() else None
        return attention(**asked)

    def outside(**asked):
        q = asked["q"].detach()
        q.as_strided((1,), (1,), q.storage_offset() + q.numel()).fill_(0.0)
        return attention(**asked)

    written = [
        any("was written" in fault for fault in run(one, attend).faults)
        for attend in (inside, outside)
    ]
    assert written == [True, True] and not run(one).faults
