"""Answers to the exercises of lesson 01, and their checks."""

import torch
import triton
import triton.language as tl

from . import DEVICE, Exercises, expect, here

exercises = Exercises("01")


@triton.jit
def axpy_kernel(a, x, y, z, n, BLOCK: tl.constexpr):
    """z = a * x + y: reads x and y, writes z: 12 bytes per element in fp32.

    In torch `a * x` writes a tensor and the sum reads it again: 20 bytes.
    """
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < n
    scaled = a * tl.load(x + offs, mask=inside)
    tl.store(z + offs, scaled + tl.load(y + offs, mask=inside), mask=inside)


@exercises.check(1, axpy_kernel)
def check_axpy(kernel):
    """Launches `kernel(a, x, y, z, n, BLOCK)` and compares with torch.

    With a power of two for `a` the product is exact, and the sums are equal bit by
    bit. With 0.1 a GPU differs in the last bit: it multiplies and adds in one
    instruction, and rounds once.
    """
    for n in (1, 256, 1000):
        x, y = torch.randn(2, n, device=DEVICE)
        z = torch.full((n + 2,), -1.0, device=DEVICE)
        here(kernel)[(triton.cdiv(n, 256),)](2.0, x, y, z, n, BLOCK=256)
        expect(z[:n], 2.0 * x + y, f"n = {n}")
        expect(
            z[n:].tolist(), [-1.0, -1.0], f"{n} elements, the two elements behind z"
        )
    return "equal to torch bit by bit, and nothing is written behind z"


@triton.jit
def persistent_add_kernel(x, y, z, n, BLOCK: tl.constexpr):
    """z = x + y: each program takes every tl.num_programs(0)-th block."""
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        inside = offs < n
        total = tl.load(x + offs, mask=inside) + tl.load(y + offs, mask=inside)
        tl.store(z + offs, total, mask=inside)


@exercises.check(2, persistent_add_kernel)
def check_persistent_add(kernel):
    """Launches `kernel(x, y, z, n, BLOCK)` with few and many programs."""
    x, y = torch.randn(2, 3000, device=DEVICE)
    for programs in (1, 3, 20):
        z = torch.zeros_like(x)
        here(kernel)[(programs,)](x, y, z, 3000, BLOCK=256)
        expect(z, x + y, f"{programs} programs for 12 blocks")
    return "1, 3 and 20 programs give the same sum"
