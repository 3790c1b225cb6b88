"""The fuzzer's cases of FP8 products: some in `make test`, more in `make test-all`, on a GPU."""

import dataclasses

import pytest
import torch

from tilewise import attention

from .fp8_cases import LOOKS, fp8_case, run_fp8

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
FEW = {"cpu-cpu": 30, "portable-cpu": 1, "hopper-cpu": 2}
MORE = {"cpu-cpu": 300, "portable-cpu": 30, "hopper-cpu": 100}
ON_A_GPU = {"hopper-cuda": 200, "portable-cuda": 100}
CHUNK = 50
MUTANTS = 12  # cases of each error that is planted


def check(lane, seeds):
    faults = [run_fp8(fp8_case(seed, lane)) for seed in seeds]
    assert not any(faults), "\n" + "\n    ".join(line for lines in faults for line in lines)


@pytest.mark.parametrize("lane", FEW)
def test_a_sample(lane):
    check(lane, range(FEW[lane]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lane", "first"), [(lane, first) for lane in MORE for first in range(0, MORE[lane], CHUNK)]
)
def test_more(lane, first):
    check(lane, range(1000 + first, 1000 + min(first + CHUNK, MORE[lane])))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lane", "look"), [(lane, look) for lane in ON_A_GPU for look in range(LOOKS)]
)
def test_on_a_gpu(lane, look):
    """The cases of one look, which are served by the same few kernels."""
    if lane == "hopper-cuda" and not IS_HOPPER:
        pytest.skip("needs a Hopper GPU")
    check(lane, range(look, ON_A_GPU[lane], LOOKS))


@pytest.mark.parametrize("packed", [False, True])
def test_quantising_rounds_no_value(packed):
    """Of few keys, too, whose largest value would be any number."""
    few = dict(form="quantized", features=(), queries=(2, 2), spare=0, left=None, right=None)
    few |= dict(keys=(1, 2) if packed else (1, 1), packed=packed, layout="bshd")
    few |= dict(headdim=16, headdim_v=16)
    cases = (dataclasses.replace(fp8_case(seed, "cpu-cpu"), **few) for seed in range(30))
    faults = [line for x in cases for line in run_fp8(x)]
    assert not faults, "\n".join(faults)


def scores(*inputs, scale, **asked):
    return attention(*inputs, scale=1.001 * scale, **asked)


def out(*inputs, **asked):
    found, lse = attention(*inputs, **asked)
    return 1.03 * found, lse


def window(*inputs, window, **asked):
    left, right = window
    return attention(*inputs, window=(None if left is None else left + 1, right), **asked)


def lengths(*inputs, seqused_k, **asked):
    return attention(*inputs, seqused_k=(seqused_k - 1).clamp(min=0), **asked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "feature"), [(scores, None), (out, None), (window, "window"), (lengths, "used")]
)
def test_planted_errors_are_caught(mutant, feature):
    """So that finding none means something: a few cases have nothing that the error changes."""
    cases = (fp8_case(seed, "cpu-cpu") for seed in range(1000))
    cases = [x for x in cases if feature in (None, *x.features) and sum(x.keys)]
    if mutant is window:
        cases = [x for x in cases if x.left is not None and x.left < max(x.keys) // 2]
    caught = sum(bool(run_fp8(x, mutant)) for x in cases[:MUTANTS])
    assert caught >= MUTANTS - 3
