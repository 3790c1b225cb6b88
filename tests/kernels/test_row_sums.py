"""The sums of a block's rows are taken in the order of columns, bit for bit, whatever the order in
which a version of Triton reduces.
"""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gluon_emulator.hopper import emulate
from tilewise.kernels.hopper.layouts import accumulator, column_of, row_of
from tilewise.kernels.hopper.operands import row_sums
from tilewise.testing import build


@gluon.jit
def row_sums_kernel(p, sums, N: gl.constexpr):
    """The sums of 64 rows (64, N), in four parts."""
    layout: gl.constexpr = accumulator(N)
    rows = gl.arange(0, 64, row_of(layout))
    columns = gl.arange(0, N, column_of(layout))
    parts = row_sums(gl.load(p + rows[:, None] * N + columns[None, :]))
    rows = gl.arange(0, 64, row_of(parts.type.layout))
    threads = gl.arange(0, 4, column_of(parts.type.layout))
    gl.store(sums + rows[:, None] * 4 + threads[None, :], parts)


@pytest.mark.emulator
@pytest.mark.parametrize("n", [32, 64, 128])
def test_sums_in_order(n):
    p = torch.rand(64, n, generator=torch.Generator().manual_seed(n)).exp2()
    sums = torch.zeros(64, 4)
    emulate(row_sums_kernel)[(1,)](p, sums, N=n, num_warps=4)
    # A thread holds columns 8 i + 2 t and 8 i + 2 t + 1
    expected = torch.zeros(64, 4)
    for pair in p.view(64, n // 8, 4, 2).sum(3).unbind(1):
        expected += pair
    assert torch.equal(sums, expected)


@pytest.mark.compile
def test_no_reduction():
    """Triton is left no order to choose."""
    p, sums = torch.empty(64, 128), torch.empty(64, 4)
    assert "tt.reduce" not in build(row_sums_kernel, p, sums, N=128, num_warps=4).asm["ttgir"]
