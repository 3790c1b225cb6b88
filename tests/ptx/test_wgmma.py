"""wgmma against torch, with operands that Triton's compiler laid out: every swizzle, from registers
and shared memory, with K or M and N inside.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from helpers.tiers import sample_rows
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ptx import execute
from ptx.matrices import _accumulator, _to_accumulator

pytestmark = pytest.mark.slow


@gluon.jit
def product_kernel(
    a, b, d, N: gl.constexpr, K: gl.constexpr, A: gl.constexpr, B: gl.constexpr,
    A_IN_ROWS: gl.constexpr, B_IN_ROWS: gl.constexpr, FROM_REGISTERS: gl.constexpr,
    M: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """d (M, N) = a (M, K) @ b (K, N). IN_ROWS: K is inside."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    BITS: gl.constexpr = a.dtype.element_ty.primitive_bitwidth
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 256 // BITS])
    m = gl.arange(0, M, gl.SliceLayout(1, L))[:, None]
    n = gl.arange(0, N, gl.SliceLayout(1, L))[:, None]
    k = gl.arange(0, K, gl.SliceLayout(0, L))[None, :]
    left = gl.load(a + m * K + k)
    right = gl.load(b + n * K + k)  # (N, K)
    if FROM_REGISTERS:
        a_operand = gl.convert_layout(left, gl.DotOperandLayout(0, ACC, 32 // BITS))
    elif A_IN_ROWS:
        a_operand = gl.allocate_shared_memory(a.dtype.element_ty, [M, K], A, left)
    else:
        a_operand = gl.allocate_shared_memory(a.dtype.element_ty, [K, M], A, left.permute(1, 0))
        a_operand = a_operand.permute((1, 0))
    if B_IN_ROWS:
        b_operand = gl.allocate_shared_memory(b.dtype.element_ty, [N, K], B, right)
        b_operand = b_operand.permute((1, 0))
    else:
        b_operand = gl.allocate_shared_memory(b.dtype.element_ty, [K, N], B, right.permute(1, 0))
    fence_async_shared()
    zeros = gl.zeros([M, N], gl.float32, ACC)
    token = warpgroup_mma(a_operand, b_operand, zeros, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[token])
    rows = gl.arange(0, M, gl.SliceLayout(1, ACC))[:, None]
    gl.store(d + rows * N + gl.arange(0, N, gl.SliceLayout(0, ACC))[None, :], acc)


def product(a, b, layouts, *how):
    d = torch.full((len(a), len(b)), float("nan"))
    constants = len(b), a.shape[1], *layouts, *how, len(a)
    execute(product_kernel)[(1,)](a, b, d, *constants, num_warps=4)
    return d


DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
CASES = [
    (dtype, swizzle, n, a_in_rows, b_in_rows, from_registers)
    for dtype in DTYPES
    for swizzle in (32, 64, 128)
    for n in (64, 128)
    for a_in_rows in (True, False)
    for b_in_rows in (True, False)
    for from_registers in (False, True)
    if (a_in_rows and b_in_rows) or (dtype != "e4m3" and not (from_registers and not a_in_rows))
]
FAST = [
    ("bf16", 128, 128, False, False, False),
    ("f16", 64, 64, True, True, True),
    ("e4m3", 128, 64, True, True, True),
]


@pytest.mark.parametrize(
    "dtype, swizzle, n, a_in_rows, b_in_rows, from_registers", sample_rows(CASES, *FAST)
)
def test_products(dtype, swizzle, n, a_in_rows, b_in_rows, from_registers):
    dtype, k = DTYPES[dtype], 128
    bits = dtype.itemsize * 8
    a, b = torch.randn(64, k).to(dtype), torch.randn(n, k).to(dtype)
    layouts = [gl.NVMMASharedLayout(swizzle, bits, 2) for _ in "ab"]
    d = product(a, b, layouts, a_in_rows, b_in_rows, from_registers)
    exact = a.double() @ b.double().T
    # Of 8 bits products are cut to 13 bits below the largest
    limit = 2e-5 if bits == 16 else 128 * 2.0**-13 * exact.abs().max()
    assert (d - exact).abs().max() <= limit


@pytest.mark.parametrize("n", [8, 16, 32])
@pytest.mark.parametrize("m, a_in_rows", [(64, True), (128, True), (128, False), (256, False)])
def test_few_columns(m, a_in_rows, n):
    """Keys, or values transposed, by the queries or probabilities of few rows."""
    a, b = torch.randn(m, 64).bfloat16(), torch.randn(n, 64).bfloat16()
    layouts = [gl.NVMMASharedLayout(128, 16, 2)] * 2
    d = product(a, b, layouts, a_in_rows, True, False)
    assert (d - a.double() @ b.double().T).abs().max() <= 2e-5


def test_an_accumulator_there_and_back():
    registers = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
    tile = _accumulator(list(registers))
    assert tile.shape == (64, 128) and (_to_accumulator(tile) == registers).all()
    # Lane 5 of warp 1: row 16 + 1, columns 2 and 3; its third register is of the row 8 below
    assert (tile[17, 2:4] == registers[:2, 37]).all() and tile[25, 10] == registers[6, 37]


@triton.jit
def dot_kernel(a, b, d, N: tl.constexpr, K: tl.constexpr):
    """Of 16 rows, too few for wgmma: mma.sync."""
    m, n, k = tl.arange(0, 16), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + n[None, :] * K + k[:, None])
    tl.store(d + m[:, None] * N + n[None, :], tl.dot(left, right))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_products_of_a_warp(dtype):
    a, b = (torch.randn(rows, 64).to(DTYPES[dtype]) for rows in (16, 32))
    d, kernels = torch.full((16, 32), float("nan")), []
    execute(dot_kernel, edit=lambda ptx: kernels.append(ptx) or ptx)[(1,)](a, b, d, 32, 64)
    assert "mma.sync.aligned.m16n8k16" in kernels[0] and "wgmma.mma" not in kernels[0]
    torch.testing.assert_close(d, a.float() @ b.float().T, rtol=0, atol=2e-5)
