"""Answers to the exercises of lesson 03, and their checks."""

import torch
import triton
import triton.language as tl

from . import DEVICE, Exercises, expect, here
from .pictures_03 import scores

exercises = Exercises("03")


@triton.jit
def lse_kernel(x, lse, columns, BLOCK: tl.constexpr):
    """lse = m + log(l) of each row, by powers of two of the row times log2(e)."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64) * columns
    m_i = -float("inf")
    l_i = 0.0
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        block = tl.load(x + row + offs, mask=offs < columns, other=-float("inf"))
        # in attention the scale of the scores has this factor: it is free
        block = block * LOG2E
        m_new = tl.maximum(m_i, tl.max(block, 0))
        l_i = l_i * tl.exp2(m_i - m_new) + tl.sum(tl.exp2(block - m_new), 0)
        m_i = m_new
    tl.store(lse + tl.program_id(0), (m_i + tl.log2(l_i)) / LOG2E)


@exercises.check(1, lse_kernel)
def check_lse(kernel):
    """Launches `kernel(x, lse, columns, BLOCK)` on the lesson's rows."""
    for columns in (1000, 255, 1):
        x = scores(columns)
        lse = torch.zeros(4, device=DEVICE)
        here(kernel)[(4,)](x, lse, columns, BLOCK=256)
        expect(lse, torch.logsumexp(x.double(), 1), f"{columns} columns", atol=1e-4)
    return "the four rows of the lesson, at three lengths"


@triton.jit
def weighted_sum_kernel(x, v, out, columns, BLOCK: tl.constexpr, D: tl.constexpr):
    """out = softmax(x) @ v, a row a program, in one pass.

    Every term of acc has a factor exp(x_i - m), as every term of l_i does. So acc
    is multiplied by the same alpha, and divided by l_i once, at the end.
    """
    row = tl.program_id(0).to(tl.int64) * columns
    offs_d = tl.arange(0, D)
    m_i = -float("inf")
    l_i = 0.0
    acc = tl.zeros((D,), tl.float32)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        inside = offs < columns
        block = tl.load(x + row + offs, mask=inside, other=-float("inf"))
        values = tl.load(
            v + offs[:, None] * D + offs_d[None, :], mask=inside[:, None], other=0.0
        )
        m_new = tl.maximum(m_i, tl.max(block, 0))
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(block - m_new)
        l_i = l_i * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(p[:, None] * values, 0)
        m_i = m_new
    tl.store(out + tl.program_id(0) * D + offs_d, acc / l_i)


@exercises.check(2, weighted_sum_kernel)
def check_weighted_sum(kernel):
    """Launches `kernel(x, v, out, columns, BLOCK, D)` and compares with fp64."""
    for columns in (1000, 128, 5):
        x, v = scores(columns), torch.randn(columns, 16, device=DEVICE)
        out = torch.zeros(4, 16, device=DEVICE)
        here(kernel)[(4,)](x, v, out, columns, BLOCK=128, D=16)
        exact = torch.softmax(x.double(), 1) @ v.double()
        expect(out, exact, f"{columns} columns", atol=1e-5)
    return "one row of attention in one pass, no probability stored"
