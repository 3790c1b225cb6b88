"""Lesson 06: its kernel against torch, whatever the lengths, and its pictures of schedules."""

import pytest
import torch
from helpers.tiers import sample
from tour.lessons import helper

from tilewise.testing import build, stats, use_interpreter
from tilewise.testing.schedule import tiles

NAME = "06_varlen"


@pytest.fixture
def ran(lesson):
    return lesson(NAME)


def test_it_says_what_it_checked_and_draws(ran):
    _, said, pictures, _ = ran
    assert "tile 9: sequence 1, head 1, block 2" in said
    assert "tile 12: 3 ends are before it, so sequence 3; what is left is 2 = 0 * 4 + 2" in said
    assert {path.name for path in pictures} == {"06_tiles.png", "06_timelines.png"}


LENGTHS = {"one": [5], "empty ones": [0, 17, 0, 0, 33], "exact blocks": [32, 64], "many": [3] * 40}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("longest_first", sample([False, True], True))
@pytest.mark.parametrize("name", LENGTHS)
def test_the_kernel_visits_every_tile_once(ran, name, longest_first, dynamic):
    module, _, _, _ = ran
    lengths = LENGTHS[name]
    v = torch.randn(sum(lengths), 2, 16)
    out, taken_by = module.running_mean(v, lengths, 3, dynamic, longest_first, block=32)
    means = [x.cumsum(0) / torch.arange(1, len(x) + 1)[:, None, None] for x in v.split(lengths)]
    assert (out - torch.cat(means)).abs().max() < 1e-5
    count = len(list(tiles(lengths, 2, 32)))
    assert (taken_by[:count] >= 0).all() and (taken_by[count:] == -1).all()
    if not dynamic:
        assert taken_by[:count].tolist() == [tile % 3 for tile in range(count)]


def test_timelines_are_those_of_the_prose(ran):
    module, said, _, _ = ran
    ends = module.done
    assert ends["dynamic, longest first"] < ends["dynamic"] < ends["static"]
    assert "no schedule is done before 134" in said
    assert ends["dynamic, longest first"] <= 135


@pytest.mark.slow
def test_what_a_gpu_would_time_runs(ran, monkeypatch):
    module, _, _, _ = ran
    small = {"zipf": (40, 3, 9), "prefill-chat": (20, 7)}
    pictures = helper(NAME, "pictures")
    monkeypatch.setattr(pictures, "SETS", small)
    calls = pictures.schedules(module.launcher)
    assert list(calls) == list(pictures.WAYS)
    results = [call()[0].float() for call in calls.values()]
    assert len(results) == 4 and all(torch.equal(x, results[0]) for x in results)
    calls = pictures.batches(module.cumulative)
    assert list(calls) == pictures.FORMS
    with use_interpreter():
        portable = calls.pop("packed, portable")()
    padded, alone, packed = (call() for call in calls.values())
    joined = torch.cat([x[0] for x in alone]).float()
    for other in (portable, packed, torch.cat([x[:n] for x, n in zip(padded, (20, 7))])):
        assert (other.float() - joined).abs().max() < 0.05


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_its_kernel_compiles(ran, dynamic):
    v, numbers = torch.empty(64, 2, 32, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int32)
    kinds = dict(D=32, BLOCK=64, DYNAMIC=dynamic, LONGEST_FIRST=True)
    sizes = (100, 2, 2, 10)
    built = build(ran.module.mean_kernel, v, v, numbers, numbers, numbers, *sizes, **kinds)
    assert stats(built)["spill_stores"] == 0
