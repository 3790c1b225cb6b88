"""cp.async in the emulator: when copies land, and the fence before a matmul reads them."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gluon_emulator.hopper import HopperError, emulate
from tilewise.testing import build

copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

pytestmark = pytest.mark.emulator


@gluon.jit
def square_kernel(a, c, rows, WAIT: gl.constexpr, FENCE: gl.constexpr):
    """c = A A, of the first `rows` rows of a 64 x 64 matrix; the others are zeros."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], TILE)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=128)
    row = gl.arange(0, 64, gl.SliceLayout(1, COPY))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    copy_async(tile, a + row * 64 + column, mask=row + column * 0 < rows)
    async_copy.mbarrier_arrive(full, increment_count=False)
    if WAIT:
        mbarrier.wait(full, 0)
    if FENCE:
        fence_async_shared()
    acc = warpgroup_mma(tile, tile, gl.zeros([64, 64], gl.float32, ACC), is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if not WAIT:
        mbarrier.wait(full, 0)
    r = gl.arange(0, 64, gl.SliceLayout(1, ACC))[:, None]
    gl.store(c + r * 64 + gl.arange(0, 64, gl.SliceLayout(0, ACC))[None, :], acc)


@pytest.mark.parametrize("rows", [64, 20])
def test_copies_are_read_after_their_barrier_and_a_fence(rows):
    a = torch.randn(64, 64).half()
    a[rows:] = torch.nan
    whole = a.float().nan_to_num(0.0)
    for seed in range(9):
        c = torch.empty(64, 64)
        emulate(square_kernel, seed)[(1,)](a, c, rows, WAIT=True, FENCE=True)
        torch.testing.assert_close(c, whole @ whole, rtol=1e-5, atol=1e-5)
        emulate(square_kernel, seed)[(1,)](a, c, rows, WAIT=True, FENCE=False)
        assert c.isnan().any()


def test_what_is_read_before_it_landed_is_poison():
    a, found = torch.randn(64, 64).half(), []
    for seed in range(9):
        c = torch.empty(64, 64)
        emulate(square_kernel, seed)[(1,)](a, c, 64, WAIT=False, FENCE=True)
        found.append(bool(c.isnan().any()))
    assert any(found)


@gluon.jit
def unfinished_kernel(a):
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], TILE)
    row = gl.arange(0, 64, gl.SliceLayout(1, COPY))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    copy_async(tile, a + row * 64 + column)


def test_a_program_must_not_end_before_its_copies_land():
    with pytest.raises(HopperError, match="copies in flight"):
        emulate(unfinished_kernel, 1)[(1,)](torch.zeros(64, 64).half())


@pytest.mark.compile
def test_that_kernel_is_true_gluon():
    compiled = build(
        square_kernel, torch.zeros(64, 64).half(), torch.zeros(64, 64), 20,
        on="sm90", WAIT=True, FENCE=True,
    )  # fmt: skip
    assert compiled.asm["ptx"].count("cp.async.cg.shared.global") > 0
