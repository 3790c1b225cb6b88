"""Errors of one rank at each step of a call."""

import pytest
import torch.distributed as dist
from helpers.interrupts import ALL, METHODS, interrupted
from helpers.processes import run

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)


@pytest.mark.parametrize(
    "kind, most, names", [("cpu", 5, list(METHODS)), ("interpreter", 3, ["stream"])]
)
def test_some_lines(kind, most, names):
    run(interrupted, 2, 5, most, kind, names)


def test_every_line_before_a_barrier_is_launched():
    """One launch publishes and meets: where a rank did not launch it, none takes what it left in
    its memory before for what it has published.
    """
    run(interrupted, 2, 5, ALL, "interpreter", ["heads"], "DeviceBarrier._signal")


@pytest.mark.slow
@pytest.mark.parametrize("kind, most", [("cpu", ALL), ("interpreter", 150)])
@pytest.mark.parametrize("name", METHODS)
def test_every_line(name, kind, most):
    run(interrupted, 2, 6, most, kind, [name])
