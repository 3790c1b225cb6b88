"""The fuzzer's cases of a KV cache: a sample in `make test`, more in `make test-all`, on a GPU."""

import dataclasses

import pytest
import torch
from helpers import overflow
from helpers.tiers import sample

import tilewise

from .cached_cases import CACHED_LANES, as_chunk, cached_case
from .cached_inputs import LARGEST, _stored
from .cached_run import run_cached

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
FEW = {"cpu-cpu": 20, "portable-cpu": 2, "hopper-cpu": 2}
MORE = {"cpu-cpu": 1000, "portable-cpu": 100, "hopper-cpu": 150}
ON_A_GPU = {"hopper-cuda": 300, "portable-cuda": 200}
CHUNK = 50


def check(name, seeds, changed=lambda case: case):
    outcomes = [run_cached(changed(cached_case(seed, CACHED_LANES[name]))) for seed in seeds]
    failed = [str(outcome) for outcome in outcomes if outcome.faults]
    assert not failed, "\n" + "\n".join(failed)


@pytest.mark.parametrize("name", FEW)
def test_a_sample(name):
    check(name, range(FEW[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "first"), [(name, first) for name in MORE for first in range(0, MORE[name], CHUNK)]
)
def test_more(name, first):
    check(name, range(1000 + first, 1000 + min(first + CHUNK, MORE[name])))


@pytest.mark.parametrize("seeds", sample([range(2), range(100, 160)], range(2)))
def test_chunks(seeds):
    """Of many queries, which Hopper's forward of training takes where their keys lie so."""
    check("hopper-cpu", seeds, as_chunk)


LOOKS = [(name, look) for name in ON_A_GPU for look in range(CACHED_LANES[name].looks)]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "look"), LOOKS)
def test_on_a_gpu(name, look):
    """The cases of one look, which are served by the same few kernels."""
    if name == "hopper-cuda" and not IS_HOPPER:
        pytest.skip("needs a Hopper GPU")
    seeds = range(look, ON_A_GPU[name], CACHED_LANES[name].looks)
    check(name, seeds)
    if name == "hopper-cuda":
        check(name, seeds[:3], as_chunk)


@pytest.mark.parametrize("kept", ["e4m3", "int8"])
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_what_8_bits_cannot_hold_is_saturated(kept, scales, monkeypatch):
    """It neither wraps nor is it NaN, whatever torch's cast does."""
    overflow.before_2_13(monkeypatch)
    case = cached_case(0, CACHED_LANES["cpu-cpu"])
    look = dataclasses.replace(case.look, kept=kept, scales=scales)
    case = dataclasses.replace(case, look=look)
    x = torch.linspace(-6, 6, 97).expand(2, case.look.nheads_k, 97)
    codes = _stored(case, [x], torch.Generator())[0][0].float()
    assert (codes.diff() >= 0).all() and codes.aminmax() == (-LARGEST[kept], LARGEST[kept])


def large_lse(**asked):
    out, lse = tilewise.attention(**asked)
    return out, lse + 1e-3


def large_out(**asked):
    out, lse = tilewise.attention(**asked)
    return 1.02 * out, lse


def mates(**asked):
    """An ulp or so that the lengths of all sequences decide."""
    out, lse = tilewise.attention(**asked)
    return out, lse * (1 + asked["seqused_k"].sum() % 5 * 2**-23)


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "caught"), [(large_lse, 14), (large_out, 14), (mates, 5)])
def test_planted_errors_are_caught(mutant, caught):
    """So that finding none means something: of 30 cases a third has nothing to be wrong."""
    cases = (cached_case(seed, CACHED_LANES["cpu-cpu"]) for seed in range(30))
    assert sum(bool(run_cached(x, mutant).faults) for x in cases) >= caught
