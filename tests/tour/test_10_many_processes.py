"""Lesson 10: what it prints, its kernel against the formula, and its processes."""

import pytest
import torch
from tour.lessons import helper

import tilewise

NAME = "10_many_processes"
pictures = helper(NAME, "pictures")
pytestmark = pytest.mark.slow


@pytest.fixture
def ran(lesson):
    return lesson(NAME)


def test_it_says_what_it_checked_and_draws(ran):
    assert "contiguous: tiles of each rank [10, 26, 42, 58]" in ran.printed
    assert "zigzag    : tiles of each rank [34, 34, 34, 34]" in ran.printed
    assert "exercises of lesson 10: empty 1 2." in ran.printed
    assert "stream:     0 of 38400 numbers differ, by 0.0e+00" in ran.printed
    assert [path.stem for path in ran.pictures] == ["10_tiles"]


def test_figures_are_those_of_the_prose(ran):
    work = tilewise.distributed.contiguous(1024, 4).work(causal=True)
    assert round(max(work) / sum(work) * 4, 1) == 1.7
    assert ran.module.same == {"stream": True, "heads": True, "ring": False}


@pytest.mark.parametrize("rows", [1, 32, 45])
def test_the_kernel_merges_as_the_library_does(ran, rows):
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    state, part = ((draw(rows, 16), 200 * draw(rows)) for _ in range(2))
    packed = ((out[:, None], lse[None]) for out, lse in (state, part))
    out, lse = tilewise.merge_states(*(x for pair in packed for x in pair))
    ran.module.fold(state, part)
    torch.testing.assert_close(state[0], out[:, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(state[1], lse[0], rtol=1e-6, atol=1e-6)


def test_a_query_without_keys_stays_empty(ran):
    """No key in either, none in the first, none in the second."""
    none = float("-inf")
    state = torch.tensor([[0.0] * 16, [0.0] * 16, [3.0] * 16]), torch.tensor([none, none, 2.0])
    part = torch.tensor([[0.0] * 16, [5.0] * 16, [0.0] * 16]), torch.tensor([none, 4.0, none])
    ran.module.fold(state, part)
    assert state[0][:, 0].tolist() == [0.0, 5.0, 3.0] and state[1].tolist() == [none, 4.0, 2.0]


def test_an_error_of_a_process_is_the_lessons():
    inputs = torch.randn(3, 1, 8, 2, 16).unbind(0)
    with pytest.raises(RuntimeError, match="bitwise=False"):
        pictures.on_ranks(2, inputs, {"ring": dict(method="ring")})


def test_what_a_gpu_would_time_runs(ran):
    calls = pictures.calls(ran.module.fold, seqlen=32)
    assert list(calls) == pictures.NAMES
    assert calls["attention to a shard"]().shape == (1, 32, 16, 128)
    calls["fold"]()
