"""Helpers that live in another module than the kernels of the tests, as a library's do."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Strided(NamedTuple):
    ptr: Any
    row: Any


class Operands(NamedTuple):
    a: Strided
    b: Strided


class Flags(NamedTuple):
    CAUSAL: Any
    SHIFT: Any


class Running(NamedTuple):
    m: Any
    l: Any  # noqa: E741


LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_pointers(x, offs_m, offs_n):
    return x.ptr + offs_m[:, None] * x.row + offs_n[None, :]


@triton.jit
def fresh(BLOCK: tl.constexpr):
    m = tl.full((BLOCK,), -float("inf"), tl.float32)
    return Running(m, tl.zeros((BLOCK,), tl.float32))


@triton.jit
def update(state, s):
    m = tl.maximum(state.m, tl.max(s, 1))
    alpha = tl.exp2((state.m - m) * LOG2E)
    p = tl.exp2(LOG2E * (s - m[:, None]))
    return Running(m, state.l * alpha + tl.sum(p, 1))
