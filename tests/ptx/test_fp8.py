"""The Hopper forward in FP8, instruction by instruction: against fp64."""

import pytest
import torch
from helpers import fp8
from helpers.tiers import sample_rows

from ptx import executing
from tilewise.kernels import hopper
from tilewise.testing import use_emulator

LIMIT, LSE_LIMIT = 3e-2, 2e-3  # as tests/kernels/test_hopper_fp8.py has them

CASES = {
    "64": (([130], [300], fp8.Heads(2, 2, 64, 64)), {}, {}),
    "128": (([130], [300], fp8.Heads(2, 2, 128, 128)), {}, {}),
    "256": (([70], [200], fp8.Heads(1, 1, 256, 256)), {}, {}),
    "64 causal": (([200], [200], fp8.Heads(2, 1, 64, 64)), dict(causal=True), {}),
    "128 causal": (([140], [200], fp8.Heads(2, 1, 128, 128)), dict(causal=True), {}),
    "256 causal": (([150], [150], fp8.Heads(1, 1, 256, 256)), dict(causal=True), {}),
    "192 and 128": (([70], [200], fp8.Heads(1, 1, 192, 128)), {}, {}),
    "window": (([200], [200], fp8.Heads(1, 1, 64, 64)), dict(window=(70, 10)), {}),
    "softcap": (([70], [200], fp8.Heads(1, 1, 64, 64)), dict(softcap=3.0), {}),
    "few queries": (([3, 3], [280, 280], fp8.Heads(8, 2, 64, 64)), dict(causal=True), {}),
    "packed": (
        *(([5, 130, 0, 9], [7, 129, 3, 0], fp8.Heads(2, 2, 64, 64)), dict(causal=True)),
        dict(packed=True),
    ),
    "packed 128": (([5, 130], [7, 129], fp8.Heads(2, 2, 128, 128)), {}, dict(packed=True)),
    "unused keys": (
        *(([150, 150], [129, 0], fp8.Heads(2, 2, 128, 128)), dict(causal=True)),
        dict(spare=70),
    ),
    "mean of v": (([130], [200], fp8.Heads(2, 2, 128, 128)), {}, dict(mean=3.0, v_mean=True)),
    "256 and its mean": (
        *(([70], [200], fp8.Heads(1, 1, 256, 256)), {}),
        dict(mean=1.0, v_mean=True),
    ),
    "256 causal and its mean": (
        *(([70], [200], fp8.Heads(1, 1, 256, 256)), dict(causal=True)),
        dict(mean=1.0, v_mean=True),
    ),
    "256 that drifts": (
        *(([150], [150], fp8.Heads(1, 1, 256, 256)), dict(causal=True)),
        dict(mean=1.0, v_mean=True, v_drift=513.0),
    ),
}


@pytest.mark.parametrize(
    "name, seed", sample_rows([(name, seed) for name in CASES for seed in (None, 1)], ("64", None))
)
def test_against_fp64(name, seed, monkeypatch):
    lengths, options, how = CASES[name]
    call = fp8.normal_call(*lengths, **how)
    with executing(monkeypatch, seed=seed), use_emulator():
        out, lse = fp8.run(hopper, call, **options)
    exact, exact_lse = fp8.reference(call, **options)
    assert fp8.error_of(out, exact) < LIMIT
    assert fp8.lse_error(lse, exact_lse) < LSE_LIMIT


HALVES = {
    "full": (([70], [200], fp8.Heads(1, 1, 256, 256)), {}, {}),
    "causal": (([150], [150], fp8.Heads(1, 1, 256, 256)), dict(causal=True), {}),
    "softcap": (([70], [200], fp8.Heads(1, 1, 128, 192)), dict(softcap=3.0), {}),
    "few queries": (([3, 3], [280, 280], fp8.Heads(8, 2, 64, 256)), dict(causal=True), {}),
    "packed": (
        *(([5, 130, 0], [7, 200, 3], fp8.Heads(2, 2, 64, 256)), dict(causal=True)),
        dict(packed=True),
    ),
    "unused keys": (
        *(([150, 150], [129, 0], fp8.Heads(1, 1, 64, 256)), dict(causal=True)),
        dict(spare=70),
    ),
    "mean of 1": (([70], [400], fp8.Heads(1, 1, 64, 256)), {}, dict(mean=1.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("seed", [None, 1])
def test_in_halves_against_fp64(name, seed, monkeypatch):
    lengths, options, how = HALVES[name]
    call = fp8.normal_call(*lengths, **how)
    with executing(monkeypatch, seed=seed), use_emulator():
        out, lse = fp8.run(hopper, call, **options)
    exact, exact_lse = fp8.reference(call, **options)
    assert fp8.error_of(out, exact) < (5e-3 if how.get("mean") else LIMIT)
    assert fp8.lse_error(lse, exact_lse) < LSE_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_of_16_bits(dtype, monkeypatch):
    (queries, keys, heads), options, _ = CASES["128 causal"]
    call = fp8.normal_call(queries, keys, heads)
    with executing(monkeypatch), use_emulator():
        out, _ = fp8.run(hopper, call, out_dtype=dtype, **options)
    assert out.dtype == dtype
    assert fp8.error_of(out, fp8.reference(call, **options)[0]) < LIMIT


VALUES = {
    "64": (([140], [300], fp8.Heads(2, 1, 64, 64)), {}, {}),
    "128 causal": (([200], [300], fp8.Heads(2, 1, 128, 128)), dict(causal=True), {}),
    "unused keys": (([70, 70], [129, 0], fp8.Heads(2, 1, 128, 80)), {}, dict(spare=70)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("seed", [1, 2])
def test_values_transposed_beside_the_matmuls(name, seed, monkeypatch):
    """The bits are those of V^T that was there before."""
    lengths, options, how = VALUES[name]
    call = fp8.normal_call(*lengths, **how)
    with executing(monkeypatch, seed=seed), use_emulator():
        expected = fp8.run(hopper, call, **options)
        beside = fp8.forward_of(hopper, call, transposes=True, **options)
        found = beside(call.quantized._replace(v_t=call.v), call.extras)
    assert found[0].equal(expected[0]) and found[1].equal(expected[1])
