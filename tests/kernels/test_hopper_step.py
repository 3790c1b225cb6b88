"""A decode step launched past Triton: what its addresses point to is held until the launch. No GPU:
the kernel is a function.
"""

import weakref
from types import SimpleNamespace

import pytest
import torch

from tilewise.kernels.hopper.decode import launch


@pytest.fixture
def made(monkeypatch):
    """References to the tensors that a step makes, none of which keeps its tensor alive."""
    found, new_empty = [], torch.Tensor.new_empty

    def noted(make):
        def noting(*args, **options):
            x = make(*args, **options)
            found.append(weakref.ref(x))
            return x

        return noting

    monkeypatch.setattr(torch.Tensor, "new_empty", noted(new_empty))
    monkeypatch.setattr(launch, "counters_of", noted(launch.counters_of))
    monkeypatch.setattr(launch, "may_relaunch", lambda index: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return found


def test_partial_states_and_counters_are_held_until_the_launch(made):
    """Else counters that a capture makes, or that grow, could get the memory of the states."""
    alive = []

    def kernel(*args):
        alive.extend(x() is not None for x in made)

    step = launch.DecodeStep.__new__(launch.DecodeStep)
    step.kernel, step.constants = kernel, ()
    step.args = SimpleNamespace(filled=lambda row: (row,))
    step.described = SimpleNamespace(at=lambda index, address: ())
    step.device, step.index = torch.device("cpu"), 0
    step.out = step.lse = (1, 8)
    step.floats, step.counters = [1024, 8, 8], 64
    step([torch.zeros(1, 8) for _ in range(4)], None)
    assert alive == [True] * 4  # out, lse, the states, the counters
