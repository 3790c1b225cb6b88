"""Elements of 8 bits: all codes, and rounding as torch has it."""

import math

import pytest
import torch
import triton
import triton.language as tl

from tilewise.testing import interpret
from tilewise.tile import quantize as plain
from tilewise.tile.fp8 import dequantize, quantize

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
CODES = torch.arange(256, dtype=torch.int16).to(torch.uint8)


@triton.jit
def dequantize_kernel(codes, out, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out + offs, dequantize(tl.load(codes + offs), out.dtype.element_ty))


@triton.jit
def quantize_kernel(x, scale, out, N: tl.constexpr, IS_INT: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(out + offs, quantize(tl.load(x + offs), scale, IS_INT))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("view", [E4M3, INT8, torch.uint8])
def test_all_codes_are_exact(dtype, view):
    out = torch.empty(256, dtype=dtype)
    interpret(dequantize_kernel)[(1,)](CODES.view(view), out, N=256)
    expected = CODES.view(E4M3 if view == torch.uint8 else view).double()
    assert torch.equal(out.double().nan_to_num(7.0), expected.nan_to_num(7.0))
    assert expected.isnan().sum() == (0 if view == INT8 else 2)


def numbers():
    """Halves between codes, beside them, beyond the ends, tiny ones, and random ones."""
    codes = CODES[:127].view(E4M3).float()
    halves = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([halves.nextafter(torch.tensor(x)) for x in (0.0, math.inf)])
    ints = torch.arange(-130, 131) / 2
    some = torch.tensor([0.0, 1e-30, 447.9, 448.1, 464.0, 465.0, 1e30, math.inf, math.nan])
    x = torch.cat([codes, halves, near, some, ints, torch.randn(300) * 50])
    x = torch.cat([x, -x])
    return torch.nn.functional.pad(x, (0, 2048 - len(x)))


@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_rounding(dtype, scale):
    x, is_int = numbers(), dtype == INT8
    out = torch.empty(2048, dtype=INT8 if is_int else torch.uint8)
    interpret(quantize_kernel)[(1,)](x, scale, out, N=2048, IS_INT=is_int)
    found, expected = out.view(dtype).float(), plain.quantize(x, torch.tensor(scale), dtype).float()
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(found.nan_to_num(7.0).signbit(), expected.nan_to_num(7.0).signbit())
    assert found.nan_to_num(0.0).abs().max() == plain.LIMITS[dtype]


@pytest.mark.parametrize("dtype", [E4M3, INT8])
def test_codes_stay_what_they_are(dtype):
    """quantize is the inverse of dequantize, and takes the largest of a row to the limit."""
    codes = CODES.view(dtype)[CODES != 0x80] if dtype == INT8 else CODES.view(dtype)
    scale = torch.rand(()) + 0.1
    back = plain.quantize(plain.dequantize(codes, scale, torch.float64), scale.double(), dtype)
    assert torch.equal(back.float().nan_to_num(7.0), codes.float().nan_to_num(7.0))
    x = torch.randn(5, 3, 16)
    x[0, 0], x[1, 1, 3], x[2, 2] = 0.0, math.nan, 1e-41
    scales = plain.row_scales(x, dtype)
    stored = plain.quantize(x, scales.unsqueeze(-1), dtype).float()
    assert scales[0, 0] == plain.SMALLEST and scales[1, 1].isnan() and (stored[0, 0] == 0).all()
    whole = scales[3:].isfinite()
    assert whole.all() and (stored[3:].abs().amax(-1) == plain.LIMITS[dtype]).all()
