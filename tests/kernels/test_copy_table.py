"""Many copies of rows in one launch, in the interpreter."""

import pytest
import torch

from tilewise.distributed.transport.copies import copy_one_by_one
from tilewise.kernels.common.row_table import Rows, Table
from tilewise.kernels.portable.copy_table import copy_table
from tilewise.testing import use_interpreter

CPU = torch.device("cpu")


def copied(copies, sources, targets):
    table = Table(copies)
    addresses = [[x.data_ptr() for x in tensors] for tensors in (sources, targets)]
    assert table.serves([*addresses[0], *addresses[1]])
    with use_interpreter():
        copy_table(table, *addresses, CPU)


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_several_tensors(seed):
    draw = torch.Generator().manual_seed(seed)

    def number(most):
        return int(torch.randint(1, most, (), generator=draw))

    sources = [torch.randn(1 << 14, generator=draw) for _ in range(3)]
    targets = [torch.zeros(1 << 16) for _ in range(4)]
    copies, ends = [], [0] * 4
    for i in range(9):  # into places that lie apart
        rows, width = number(40), 16 * number(50)
        step, target = width + 16 * number(3), i % 4
        pitch = 16 * number((1 << 16) // 16 // rows - width // 16 // rows)
        first = 16 * number(8) if first_fits(rows, pitch, width) else 0
        copies.append(Rows(i % 3, first, pitch, target, ends[target], step, rows, width))
        ends[target] += rows * step
    assert max(ends) <= 4 << 16
    copies.insert(4, Rows(0, 0, 16, 0, 0, 16, 0, 16))  # of no rows
    copied(copies, sources, targets)
    expected = [torch.zeros_like(x) for x in targets]
    copy_one_by_one(Table(copies), sources, expected)
    for x, y in zip(targets, expected):
        assert torch.equal(x, y) and x.any()


def first_fits(rows, pitch, width):
    return (rows - 1) * pitch + width + 128 <= 4 << 14


def test_rows_that_are_no_multiple_of_16_bytes():
    table = Table([Rows(0, 8, 32, 0, 0, 32, 2, 16)])
    assert not table.serves((0, 0))
    table = Table([Rows(0, 16, 32, 0, 0, 32, 2, 16)])
    assert table.serves((0, 32)) and not Table([]).serves((0, 32))
    assert not table.serves((4, 32))
    x = torch.arange(24, dtype=torch.uint8)
    into = torch.zeros(24, dtype=torch.uint8)
    copy_one_by_one(Table([Rows(0, 1, 7, 0, 2, 5, 3, 4)]), [x], [into])
    assert into.tolist() == [0, 0, 1, 2, 3, 4, 0, 8, 9, 10, 11, 0, 15, 16, 17, 18] + [0] * 8
