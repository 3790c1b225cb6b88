"""Lesson 09: what it prints, its kernel against torch's rounding, and its pictures."""

import pytest
import torch
from tour.lessons import helper

NAME = "09_eight_bits"
pictures = helper(NAME, "pictures")


@pytest.fixture
def ran(lesson):
    return lesson(NAME)


def test_it_says_what_it_checked_and_draws(ran):
    _, said, drawn, _ = ran
    assert "largest 448, smallest above zero 0.00195312" in said
    assert "exercises of lesson 09: empty 1 2." in said
    assert [path.stem for path in drawn] == ["09_accumulators", "09_channels", "09_grid"]


def test_figures_are_those_of_the_prose(ran):
    module = ran.module
    assert 0.15 < module.found["one short accumulator"][-1] < 0.2  # a sixth
    assert max(module.found["two-level"]) < 5e-3
    normal = torch.randn(1 << 16)
    assert 0.025 < module.relative(normal.to(module.E4M3).float(), normal) < 0.028


@pytest.mark.parametrize("shift", [0, 5, 8])
def test_the_kernel_rounds_as_torch_does(ran, shift):
    s = 2 * torch.randn(7, 100, generator=torch.Generator().manual_seed(2))
    p = torch.exp(s - s.amax(1, keepdim=True)) * 2.0**shift
    expected = p.to(torch.float8_e4m3fn).float() / p.sum(1, keepdim=True)
    found = ran.module.rounded_p(s, shift)
    assert ((found - expected).abs() > 1e-6).float().mean() < 0.02  # ties of two exponentials


@pytest.mark.slow
def test_what_a_gpu_would_time_runs():
    calls = pictures.calls(seqlen=64)
    assert list(calls) == pictures.NAMES
    assert {call().shape for call in calls.values()} == {(1, 64, 16, 128)}
