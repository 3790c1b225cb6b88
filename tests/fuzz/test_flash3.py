"""FlashAttention-3's own cases of a KV cache, against the oracle: 30 for each backend."""

import contextlib

import pytest
import torch

from tilewise.testing import use_emulator, use_interpreter

from .flash3_cases import flash3_case, run_flash3

CASES = 30
FEW = {"cpu": 6, "portable": 2, "hopper": 2}
ON_CPU = {"cpu": contextlib.nullcontext, "portable": use_interpreter, "hopper": use_emulator}


def check(backend, numbers):
    for number in numbers:
        with ON_CPU[backend]():
            faults = run_flash3(flash3_case(number, "cpu"))
        assert not faults, "\n".join(faults)


@pytest.mark.parametrize("backend", FEW)
def test_a_sample(backend):
    check(backend, range(FEW[backend]))


@pytest.mark.slow
@pytest.mark.parametrize("backend", FEW)
def test_all(backend):
    check(backend, range(FEW[backend], CASES))


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(CASES))
def test_on_a_gpu(number):
    faults = run_flash3(flash3_case(number, "cuda"))
    assert not faults, "\n".join(faults)
    torch.cuda.empty_cache()


def test_queries_before_the_first_key_are_drawn():
    for device in ("cpu", "cuda"):
        cases = [flash3_case(number, device) for number in range(CASES)]
        assert sum(case.starts_before_keys for case in cases) >= CASES / 3
        assert sum(case.starts_before_keys and case.chunk > 0 for case in cases) >= CASES / 6
