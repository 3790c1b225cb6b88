"""A decode step launched past Triton: what its addresses point to is held until the launch. No GPU:
the kernel is a function.
"""

import weakref

import pytest
import torch

from tilewise.kernels.common import decode_step
from tilewise.kernels.hopper.decode import launch


@pytest.fixture
def made(monkeypatch):
    """References to the tensors that a step makes, none of which keeps its tensor alive."""
    found = []

    def noted(make):
        def noting(*args, **options):
            x = make(*args, **options)
            found.append(weakref.ref(x))
            return x

        return noting

    empty = noted(torch.empty_strided)
    of_room = lambda shape, stride, dtype: empty(shape, stride, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(decode_step, "allocator_of", lambda device: of_room)
    monkeypatch.setattr(launch, "counters_of", noted(launch.counters_of))
    monkeypatch.setattr(decode_step, "may_relaunch", lambda index: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return found


@pytest.mark.parametrize("has_lse", [True, False])
def test_partial_states_and_counters_are_held_until_the_launch(made, has_lse):
    """Else counters that a capture makes, or that grow, could get the memory of the states."""
    alive = []

    def call(stream, row):
        alive.extend(x() is not None for x in made)

    q, lse = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1)
    states = [torch.zeros(n) for n in (1024, 8, 8)]
    step = launch.DecodeStep.__new__(launch.DecodeStep)
    decode_step.DecodeStep.__init__(step, q.device, read=[q], out=q, lse=lse, states=states)
    step.call, step.moved, step.counters = call, lambda which, address: address, 64
    found = step([q, q, q], None, None, has_lse)
    assert (found[1] is not None) == has_lse
    assert alive == [True] * (4 if has_lse else 3)  # out, lse, the states, the counters
