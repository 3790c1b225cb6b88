"""A decode step launched past Triton: what its addresses point to is held until the launch. No GPU:
the kernel is a function.
"""

import weakref

import pytest
import torch

from tilewise.kernels.common import decode_step
from tilewise.kernels.common.operand import Operand, Provided
from tilewise.kernels.common.program import Launch, Program
from tilewise.kernels.common.workspace import Workspace


@pytest.fixture
def made(monkeypatch):
    """References to the tensors that a step makes, none of which keeps its tensor alive."""
    found = []

    def of_room(shape, stride, dtype):
        x = torch.empty_strided(shape, stride, dtype=dtype)
        found.append(weakref.ref(x))
        return x

    monkeypatch.setattr(decode_step, "allocator_of", lambda device: of_room)
    monkeypatch.setattr(decode_step, "may_relaunch", lambda index: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return found


@pytest.mark.parametrize("has_lse", [True, False])
def test_partial_states_and_counters_are_held_until_the_launch(made, has_lse):
    """Else counters that a capture makes, or that grow, could get the memory of the states."""
    alive, rows = [], []

    def counters(device, index, stream):
        x = torch.zeros(64, dtype=torch.int32)
        made.append(weakref.ref(x))
        return x

    def launch(stream, row):
        rows.append(row)
        alive.extend(x() is not None for x in made)

    q, lse, work = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1), Workspace(torch.device("cpu"))
    states = [work.add(f"state {n}", (n,)) for n in (1024, 8, 8)]
    args = dict(states=tuple(states), counters=Provided("counters", counters))
    args |= {name: Operand(name, x.shape, x.dtype, x.device) for name, x in dict(q=q, k=q).items()}
    program = Program(["q", "k", "out", "lse"], [Launch(None, 1, args, {}, {})], work)
    program.again = [launch]
    step = decode_step.DecodeStep(program, read=[q, q], out=q, lse=lse)
    out, found = step([q, q], None, None, has_lse)
    assert (found is not None) == has_lse
    assert alive == [True] * (4 if has_lse else 3)  # out, lse, the states, the counters
    (row,) = rows
    assert len(row) == len(program.names) and row[2] == out.data_ptr()
    assert [row[n] - row[4] for n in (5, 6)] == [4096, 4608]  # states lie behind each other
