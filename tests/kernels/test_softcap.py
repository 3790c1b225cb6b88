"""Softcaps of any size: a score loses no digits of its own to a cap that is far above it."""

import contextlib

import pytest
import torch
from helpers.tiers import every

import tilewise
from tilewise import scores
from tilewise.testing import use_emulator, use_interpreter
from tilewise.testing.tolerance import judge

CAPS = [0.5, 50.0, 1e3, 1e4, 1e6, 1e30]
CONTEXTS = {"cpu": contextlib.nullcontext, "portable": use_interpreter, "hopper": use_emulator}


def run(attend, given, dout, **how):
    out, lse = attend(*given, return_lse=True, **how)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, given, dout.to(out.dtype))


def check(backend, dtype, rows, headdim, **how):
    given = [torch.randn(1, rows, 1, headdim).to(dtype).requires_grad_() for _ in range(3)]
    dout = torch.randn(1, rows, 1, headdim).to(dtype)
    with CONTEXTS[backend]():
        found = run(tilewise.attention, given, dout, backend=backend, **how)
    exact = [x.detach().double().requires_grad_() for x in given]
    oracle = run(tilewise.attention_reference, exact, dout, **how)
    plain = run(tilewise.attention_reference, given, dout, upcast=False, **how)
    for name, *three in zip(("out", "lse", "dq", "dk", "dv"), found, oracle, plain):
        verdict = judge(*three)
        assert verdict.ok, f"{name}: {verdict}"


@pytest.mark.parametrize("backend", ["cpu", "portable"])
@pytest.mark.parametrize("cap", every(2, CAPS))
def test_softcaps_in_fp32(cap, backend):
    check(backend, torch.float32, 100, 32, softcap=cap)


@pytest.mark.parametrize("backend", ["cpu", "portable"])
@pytest.mark.parametrize("cap", CAPS)
def test_tanh_in_a_score_function(cap, backend):
    check(backend, torch.float32, 100, 32, score_mod=scores.softcapped(cap))


@pytest.mark.emulator
@pytest.mark.parametrize("cap", [50.0, 1e6, 1e30])
def test_tanh_in_a_score_function_on_hopper(cap):
    check("hopper", torch.bfloat16, 70, 64, score_mod=scores.softcapped(cap))
