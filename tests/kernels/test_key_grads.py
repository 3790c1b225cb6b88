"""Gradients of keys in fp32, to be added up: what the kernels of 16-bit tensors round."""

import contextlib

import pytest
import torch
from helpers.tiers import sample_rows

import tilewise
from tilewise.ops import attention as ops
from tilewise.problem import Call, Extras, Saved, Scalars, describe
from tilewise.testing import use_emulator, use_interpreter

MODES = {"hopper": use_emulator, "portable": use_interpreter, "cpu": contextlib.nullcontext}
STARTS = 0, 70, 71, 211  # two blocks of keys in the last one


def gradients(backend, saved, extras, scalars, is_exact, deterministic=False):
    problem = describe(*saved[2:5], extras, scalars, "bottom_right", deterministic)
    problem = problem._replace(has_fp32_key_grads=is_exact)
    return ops.run_backward(Call(problem, scalars, backend), saved, extras)


CASES = [(x, headdim, n) for n in ("batch", "packed") for headdim in (64, 128, 80) for x in MODES]
FAST = [x for x in CASES if x[0] == "cpu"]
FAST += [("hopper", 80, "batch"), ("portable", 64, "packed")]


@pytest.mark.parametrize("backend, headdim, rows", sample_rows(CASES, *FAST))
def test_they_are_those_of_16_bits_before_these_are_rounded(backend, headdim, rows):
    is_packed = rows == "packed"
    draw = torch.Generator().manual_seed(headdim)

    def randn(heads):
        batch = 1 if is_packed else 2
        return torch.randn(batch, STARTS[-1], heads, headdim, generator=draw).bfloat16()

    q, k, v, dout = randn(4), randn(2), randn(2), randn(4)
    extras, lengths = Extras(), {}
    if is_packed:
        starts = torch.tensor(STARTS, dtype=torch.int32)
        extras = Extras(cu_seqlens_q=starts, cu_seqlens_k=starts)
        lengths = dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
    scalars = Scalars(headdim**-0.5, right=0)
    given = (x[0] for x in (q, k, v)) if is_packed else (q, k, v)
    out, lse = tilewise.attention(*given, causal=True, return_lse=True, **lengths)
    saved = Saved(dout, None, q, k, v, *((out[None], lse[None]) if is_packed else (out, lse)))
    with MODES[backend]():
        rounded = gradients(backend, saved, extras, scalars, False)
        exact = gradients(backend, saved, extras, scalars, True)
    assert exact.dq.dtype == torch.bfloat16
    for name in ("dk", "dv"):
        x, expected = getattr(exact, name), getattr(rounded, name)
        assert x.dtype == torch.float32 and expected.dtype == torch.bfloat16
        if backend == "cpu" and not is_packed:  # by torch's own kernel, which rounds them
            torch.testing.assert_close(x, expected.float(), rtol=0.02, atol=0.02)
        else:
            assert torch.equal(x.bfloat16(), expected), name
            assert backend == "cpu" or not torch.equal(x, expected.float()), name
