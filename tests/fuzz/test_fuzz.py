"""The fuzzer's cases: a sample in `make test`, 2,000 in `make test-all`, 1,000 on a GPU."""

import pytest
import torch

from .cases import case
from .inputs import make_inputs
from .lanes import LANES
from .refusals import may_refuse
from .run import run

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
CHUNK = 50
# How many cases of a lane `make test` computes, up to which `make test-all` goes on, and how many
# others it computes then.
FEW = {"cpu-cpu": 25, "choice-cpu": 10, "portable-cpu": 2, "hopper-cpu": 4}
SAMPLE = {"cpu-cpu": 120, "choice-cpu": 20, "portable-cpu": 6, "hopper-cpu": 10}
MORE = {"cpu-cpu": 1500, "choice-cpu": 200, "portable-cpu": 100, "hopper-cpu": 200}
ON_A_GPU = {"hopper-cuda": 500, "portable-cuda": 350, "choice-cuda": 150}


def check(lane, seeds):
    """Every case is right or, where it may be, refused; and not too many are."""
    outcomes = computed(lane, seeds)
    refused = sum(bool(outcome.refused) for outcome in outcomes)
    assert refused <= lane.refused * len(outcomes), f"{refused} of {len(outcomes)} are refused"


def computed(lane, seeds):
    """The outcomes, of which none is wrong."""
    outcomes = [run(case(seed, lane)) for seed in seeds]
    failed = [str(outcome) for outcome in outcomes if outcome.faults]
    assert not failed, "\n" + "\n".join(failed)
    return outcomes


@pytest.mark.parametrize("name", FEW)
def test_a_sample(name):
    check(LANES[name], range(FEW[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_the_whole_sample(name):
    check(LANES[name], range(SAMPLE[name]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "first"), [(name, first) for name in MORE for first in range(0, MORE[name], CHUNK)]
)
def test_more(name, first):
    check(LANES[name], range(1000 + first, 1000 + first + CHUNK))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "look"), [(name, look) for name in ON_A_GPU for look in range(LANES[name].looks)]
)
def test_on_a_gpu(name, look):
    """The cases of one look, which are served by the same few kernels."""
    if name == "hopper-cuda" and not IS_HOPPER:
        pytest.skip("needs a Hopper GPU")
    computed(LANES[name], range(look, ON_A_GPU[name], LANES[name].looks))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_few_may_be_refused_on_a_gpu(name):
    lane, refused = LANES[name], 0
    for seed in range(ON_A_GPU[name]):
        one = case(seed, lane)
        leaves = make_inputs(one).leaves
        refused += may_refuse(one, *(leaves[x] for x in "qkv"))
    assert refused <= lane.refused * ON_A_GPU[name]
