"""bfloat16 and fp8 in the interpreter are torch's, bit for bit."""

import pytest
import torch
import triton
import triton.language as tl

from tilewise.testing import interpret

LOW = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@triton.jit
def copy_kernel(src, dst, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = offs < n
    x = tl.load(src + offs, mask=keep)
    tl.store(dst + offs, x.to(dst.dtype.element_ty), mask=keep)


def copied(x, dtype):
    out = torch.empty(x.shape, dtype=dtype)
    interpret(copy_kernel)[(1,)](x, out, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
    return out


def floats(limit):
    scales = 2.0 ** torch.arange(-20, 20).float()
    x = torch.cat([torch.randn(50, 40) * scales, scales[None], -scales[None]]).flatten()
    edges = torch.tensor([0.0, -0.0, 0.12376, 1.00390625, 1.01171875, 448.0, limit, -limit])
    return torch.cat([x, edges]).clamp(-limit, limit)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_casts_to_low_precision_are_torchs(dtype):
    x = floats(torch.finfo(dtype).max)
    assert torch.equal(copied(x, dtype).float(), x.to(dtype).float())


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_casts_from_every_low_precision_value_are_torchs(dtype):
    wide = dtype.itemsize == 2
    bits = torch.arange(2**16 if wide else 2**8).to(torch.int16 if wide else torch.int8)
    x = bits.view(dtype)
    torch.testing.assert_close(copied(x, torch.float32), x.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.float64], ids=str)
def test_bfloat16_to_and_from_other_types(dtype):
    x = torch.tensor([-300.0, -2.5, 0.0, 1.0, 77.7, 1e4])
    assert torch.equal(copied(x.bfloat16(), dtype), x.bfloat16().to(dtype))
    assert torch.equal(copied(x.to(dtype), torch.bfloat16), x.to(dtype).bfloat16())


def test_a_cast_to_fp8_saturates():
    x = torch.tensor([1e6, -1e6, float("inf")])
    assert copied(x, torch.float8_e4m3fn).tolist() == [448.0, -448.0, 448.0]


@triton.jit
def arithmetic_kernel(x, y, out, N: tl.constexpr):
    offs = tl.arange(0, N)
    a, b = tl.load(x + offs), tl.load(y + offs)
    tl.store(out + offs, a + b)
    tl.store(out + N + offs, a * b - 1.5)
    tl.store(out + 2 * N + offs, tl.maximum(a, b))
    tl.store(out + 3 * N + offs, tl.where(a < b, a, -b))
    tl.store(out + 4 * N + offs, tl.abs(a))


def test_bfloat16_arithmetic_rounds_each_step():
    x, y = torch.randn(2, 64).bfloat16()
    out = torch.empty(5, 64, dtype=torch.bfloat16)
    interpret(arithmetic_kernel)[(1,)](x, y, out, N=64)
    expected = [x + y, x * y - 1.5, torch.maximum(x, y), torch.where(x < y, x, -y), x.abs()]
    assert torch.equal(out, torch.stack(expected))


@triton.jit
def dot_kernel(a, b, c, N: tl.constexpr):
    offs = tl.arange(0, N)
    tile = offs[:, None] * N + offs[None, :]
    acc = tl.dot(tl.load(a + tile), tl.load(b + tile))
    tl.store(c + tile, acc.to(c.dtype.element_ty))


@pytest.mark.parametrize("dtype", [*LOW, torch.float32], ids=str)
def test_a_dot_is_rounded_once(dtype):
    """To float32, so that a row's bits do not depend on where in its tile it is."""
    a, b = torch.randn(2, 32, 32).to(dtype)
    c = torch.empty(32, 32)
    interpret(dot_kernel)[(1,)](a, b, c, N=32)
    assert torch.equal(c, (a.double() @ b.double()).float())


@triton.jit
def maximum_kernel(x, out, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out + offs, tl.maximum(tl.load(x + offs), 0.0))


def test_maximum_drops_nan_as_a_gpu_does():
    out = torch.empty(2)
    interpret(maximum_kernel)[(1,)](torch.tensor([float("nan"), -1.0]), out, N=2)
    assert out.tolist() == [0.0, 0.0]
