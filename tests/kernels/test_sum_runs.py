"""The parts of runs gathered by keys, in the interpreter: the bits of additions one by one."""

import pytest
import torch

from tilewise.distributed.transport.halves import Arena
from tilewise.kernels.portable.sum_runs import add_runs
from tilewise.testing import use_interpreter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rows, runs, columns", [(1, 2, (8, 8)), (37, 2, (384, 128)), (50, 3, (5, 300)), (9, 1, (16,))]
)
def test_the_bits_of_one_addition_after_the_other(rows, runs, columns, dtype):
    """Of each tensor, all of them in one launch."""
    draw = torch.Generator().manual_seed(rows)
    parts = [torch.randn(64, 1, x, generator=draw) for x in columns]
    places = torch.randint(-30, 64, (rows, runs), generator=draw).clamp_min(-1).to(torch.int32)
    for x in parts:
        x[63] = float("nan")  # what is at no place may be anything
    places[places == 63] = -1
    wide = [torch.full((2, rows, 3, x), 7.0, dtype=dtype) for x in columns]
    totals, expected = zip(*[x[:, :, 1:2] for x in wide])  # some heads of all
    with use_interpreter():
        add_runs(parts, places, None, totals)
    Arena.add_runs(None, parts, places, None, expected)
    for x, y, whole in zip(totals, expected, wide):
        assert torch.equal(x, y) and (x[(places < 0).all(1)] == 0).all()
        assert (whole[:, :, ::2] == 7).all()
    targets = torch.randperm(rows + 3, generator=draw)[:rows].to(torch.int32)
    wide = [torch.full((rows + 3, 3, x), 7.0, dtype=dtype) for x in columns]
    spread = [x[:, 1:2] for x in wide]  # rows as they are named
    with use_interpreter():
        add_runs(parts, places, targets, spread)
    others = torch.ones(rows + 3, dtype=torch.bool)
    others[targets.long()] = False
    for x, total, whole in zip(spread, totals, wide):
        assert torch.equal(x[targets.long()], total) and (whole[:, ::2] == 7).all()
        assert (x[others] == 7).all()
