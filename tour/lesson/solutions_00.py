"""Answers to the exercises of lesson 00, and their checks."""

import torch
import triton
import triton.language as tl

from . import DEVICE, Exercises, expect, here

exercises = Exercises("00")


def sectors_from(first, stride, itemsize):
    """Sectors of a warp whose thread i reads element first + i * stride."""
    return len({(first + i * stride) * itemsize // 32 for i in range(32)})


@exercises.check(1, sectors_from)
def check_sectors(answer):
    """Compares `answer(first, stride, itemsize)` with counts made by hand."""
    by_hand = {
        (0, 1, 4): 4,
        (0, 3, 2): 6,
        (5, 1, 2): 3,
        (8, 1, 4): 4,
        (1, 8, 4): 32,
    }
    for (first, stride, itemsize), count in by_hand.items():
        what = (
            f"{itemsize} bytes per element, from element {first}, stride {stride}"
        )
        expect(answer(first, stride, itemsize), count, what)
    return "fp16 with a stride of 3: 6 sectors; from element 5 without a stride, 3"


@triton.jit
def strided_write_kernel(x, out, n, stride, BLOCK: tl.constexpr):
    """out[i * stride] = x[i], for n elements.

    A sector that is written in part must be merged with what memory holds, so a
    strided write costs at least as much as a strided read.
    """
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < n
    tl.store(out + offs * stride, tl.load(x + offs, mask=inside), mask=inside)


@exercises.check(2, strided_write_kernel)
def check_strided_write(kernel):
    """Launches `kernel(x, out, n, stride, BLOCK)`; checks all of out."""
    for n, stride in ((1000, 7), (256, 1), (3, 2)):
        x = torch.randn(n, device=DEVICE)
        out = torch.full((n * stride,), -1.0, device=DEVICE)
        expected = out.clone()
        expected[::stride] = x
        here(kernel)[(triton.cdiv(n, 256),)](x, out, n, stride, BLOCK=256)
        expect(out, expected, f"{n} elements, stride {stride}")
    return "every stride-th element is written, and no other"
