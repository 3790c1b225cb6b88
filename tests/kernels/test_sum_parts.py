"""The sum of what ranks have published, in the interpreter: the bits of additions one by one."""

import weakref

import pytest
import torch

from tilewise.kernels.portable.sum_parts import PartSums
from tilewise.testing import use_interpreter

CPU = torch.device("cpu")
KINDS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
]


def one_by_one(parts, bits, dtype):
    """What `tilewise.distributed.methods.sums` does where there is no kernel."""
    total = torch.zeros_like(parts[0])
    for rank, part in enumerate(parts):
        has_part = (bits >> rank) & 1 != 0
        total[has_part] += part[has_part]
    return total.to(dtype)


@pytest.mark.parametrize("part, dtype", KINDS)
@pytest.mark.parametrize(
    "ranks, rows, widths", [(1, 3, (8,)), (3, 70, (24, 24)), (8, 33, (96, 16)), (32, 5, (7, 300))]
)
def test_the_bits_of_one_addition_after_the_other(part, dtype, ranks, rows, widths):
    """Of all tensors, whose parts lie side by side, in one launch."""
    columns = sum(widths)
    draw = torch.Generator().manual_seed(ranks)
    before = 48  # bytes of other things in each block
    blocks = [torch.full((before + rows * columns * part.itemsize,), 255, dtype=torch.uint8)]
    blocks += [blocks[0].clone() for _ in range(ranks - 1)]
    parts = [x[before:].view(part).view(rows, columns) for x in blocks]
    for x in parts:
        size = torch.randint(-20, 20, (rows, columns), generator=draw)
        values = torch.randn(rows, columns, generator=draw, dtype=part) * 2.0**size
        x.copy_(torch.where(size == 3, -0.0, values))
    bits = torch.randint(-(2**31), 2**31, (rows,), generator=draw).to(torch.int32)
    for rank in range(ranks):  # what a rank has no part of may be anything
        parts[rank][(bits >> rank) & 1 == 0] = float("nan")
    totals = [torch.full((rows + 1, x), 7.0).to(dtype) for x in widths]
    targets = torch.randperm(rows + 1, generator=draw).to(torch.int32)
    with use_interpreter():
        of_rows = torch.stack([bits, targets[:rows]], 1)
        PartSums().add(blocks, before, part, of_rows, totals)
    found = torch.cat([x[targets[:rows].long()] for x in totals], 1)
    assert torch.equal(found.view(torch.uint8), one_by_one(parts, bits, dtype).view(torch.uint8))
    assert all((x[targets[rows].long()] == 7).all() for x in totals)


def test_blocks_that_moved():
    sums = PartSums()
    of_rows = torch.stack([torch.ones(4), torch.arange(4)], 1).to(torch.int32)
    total = torch.zeros(4, 8)
    with use_interpreter():
        for value in (1.0, 2.0):
            blocks = [torch.full((32,), value).view(torch.uint8)]
            sums.add(blocks, 0, torch.float32, of_rows, [total])
            assert (total == value).all()
    left = weakref.ref(blocks[0])
    del blocks
    assert left() is None  # an arena that grows lets go of its memory before it takes more
