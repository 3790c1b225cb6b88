"""What is drawn: a function of the seed, as often as the documentation says."""

import dataclasses
import shlex

import pytest

from tilewise.features import OPTIONS

from . import __main__ as command
from . import cached_cases
from .cases import FEATURES, case
from .formulas import MASKS, SCORES
from .functions import LEARNED, READS
from .functions import MASKS as TRACED_MASKS
from .functions import SCORES as TRACED_SCORES
from .lanes import LANES

MANY = range(600)
lanes = pytest.mark.parametrize("lane", LANES.values(), ids=LANES)


@lanes
def test_a_case_is_a_function_of_its_seed(lane):
    assert [case(seed, lane) for seed in range(50)] == [case(seed, lane) for seed in range(50)]
    assert len({case(seed, lane) for seed in range(50)}) == 50
    with pytest.raises(dataclasses.FrozenInstanceError):
        case(0, lane).seed = 3


@lanes
def test_half_of_the_cases_and_more_have_no_softcap(lane):
    """A cap bounds the scores, and so hides what is wrong with large ones."""
    capped = sum(case(seed, lane).look.has_softcap for seed in MANY)
    assert len(MANY) / 20 <= capped <= len(MANY) / 2


@pytest.mark.parametrize("drawn", [FEATURES, cached_cases.FEATURES], ids=["calls", "caches"])
def test_options_of_the_table_are_drawn(drawn):
    assert {"slopes" if name == "alibi" else name for name in OPTIONS} <= set(drawn)


@pytest.mark.parametrize("lane", [x for x in LANES.values() if not x.looks], ids=lambda x: x.name)
def test_each_feature_is_drawn(lane):
    looks = [case(seed, lane).look for seed in MANY]
    for feature in FEATURES:
        assert sum(look.has(feature) for look in looks) >= len(MANY) / 25, feature
    for flag in ("causal", "packed", "lse_grad", "deterministic"):
        assert sum(bool(getattr(look, flag)) for look in looks) >= len(MANY) / 12, flag
    assert {look.dtype for look in looks} == set(lane.dtypes)
    assert sum(not look.features for look in looks) >= len(MANY) / 25


def test_looks_are_few_on_a_gpu():
    """Each is a compilation; the two kinds of kernels still meet every feature."""
    for name in ("hopper-cuda", "portable-cuda"):
        looks = [case(seed, LANES[name]).look for seed in range(LANES[name].looks)]
        assert {feature for look in looks for feature in look.features} == set(FEATURES)
    for lane in LANES.values():
        if lane.device == "cuda":
            assert len({case(seed, lane).look for seed in MANY}) <= lane.looks
            assert len({(x := case(seed, lane)).queries + x.keys for seed in MANY}) > 300


def test_every_pair_has_two_halves():
    assert MASKS.keys() == TRACED_MASKS.keys()
    assert SCORES.keys() == TRACED_SCORES.keys()
    assert READS.keys() <= MASKS.keys() | SCORES.keys()
    assert set(LEARNED) <= READS.keys()


@pytest.mark.parametrize("name", ["cpu-cpu", "choice-cpu"])
def test_a_case_prints_what_repeats_it(name, monkeypatch, capsys):
    one = next(x for seed in MANY if not (x := case(seed, LANES[name])).look.packed)
    monkeypatch.setattr("sys.argv", shlex.split(one.command.partition(" -m ")[2]))
    assert command.main() == 0
    assert str(one) in capsys.readouterr().out
