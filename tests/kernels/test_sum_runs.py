"""The parts of runs gathered by keys, in the interpreter: the bits of additions one by one."""

import pytest
import torch

from tilewise.distributed.transport.halves import Arena
from tilewise.kernels.portable.sum_runs import add_runs
from tilewise.testing import use_interpreter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, runs, columns", [(1, 2, 8), (37, 2, 384), (50, 3, 5), (9, 1, 16)])
def test_the_bits_of_one_addition_after_the_other(rows, runs, columns, dtype):
    draw = torch.Generator().manual_seed(rows)
    parts = torch.randn(64, 1, columns, generator=draw)
    places = torch.randint(-30, 64, (rows, runs), generator=draw).clamp_min(-1).to(torch.int32)
    parts[63] = float("nan")  # what is at no place may be anything
    places[places == 63] = -1
    wide = torch.full((2, rows, 3, columns), 7.0, dtype=dtype)
    total, expected = wide[:, :, 1:2]  # some heads of all
    with use_interpreter():
        add_runs(parts, places, None, total)
    Arena.add_runs(None, parts, places, None, expected)
    assert torch.equal(total, expected) and (total[(places < 0).all(1)] == 0).all()
    assert (wide[:, :, ::2] == 7).all()
    targets = torch.randperm(rows + 3, generator=draw)[:rows].to(torch.int32)
    wide = torch.full((rows + 3, 3, columns), 7.0, dtype=dtype)
    spread = wide[:, 1:2]  # rows as they are named
    with use_interpreter():
        add_runs(parts, places, targets, spread)
    assert torch.equal(spread[targets.long()], total) and (wide[:, ::2] == 7).all()
    others = torch.ones(rows + 3, dtype=torch.bool)
    others[targets.long()] = False
    assert (spread[others] == 7).all()
