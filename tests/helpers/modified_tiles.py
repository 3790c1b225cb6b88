"""One tile of scores through a generated mask or score function: by kernels of both dialects in the
interpreter and the emulator, and by torch.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.mods import Mask, evaluate
from tilewise.mods.codegen import captured_of, function_of
from tilewise.testing import emulate, interpret

ROWS, COLUMNS = 16, 32


class Mods(NamedTuple):
    """As in a kernel's FEATURES: a function, or None."""

    MASK_MOD: Any = None
    SCORE_MOD: Any = None
    PRECISION: str = "ieee"


@triton.jit
def modified(s, b, h, q_idx, k_idx, captured, FEATURES: tl.constexpr):
    """Called from both dialects, as the functions of `tilewise.tile` are."""
    if FEATURES.SCORE_MOD is not None:
        s = FEATURES.SCORE_MOD(s, b, h, q_idx, k_idx, captured)
    if FEATURES.MASK_MOD is not None:
        s = tl.where(FEATURES.MASK_MOD(b, h, q_idx, k_idx, captured), s, float("-inf"))
    return s


@triton.jit
def triton_kernel(
    x,
    out,
    b,
    h,
    q_start,
    k_start,
    captured,
    FEATURES: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    TURNED: tl.constexpr,
):
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    offs = rows * N + columns
    s = tl.load(x + offs)
    if TURNED:  # keys down, queries across
        s = modified(s, b, h, q_start + columns, k_start + rows, captured, FEATURES)
    else:
        s = modified(s, b, h, q_start + rows, k_start + columns, captured, FEATURES)
    tl.store(out + offs, tl.broadcast_to(s, (M, N)))


@gluon.jit
def gluon_kernel(
    x,
    out,
    b,
    h,
    q_start,
    k_start,
    captured,
    FEATURES: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    TURNED: gl.constexpr,
):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    offs = rows * N + columns
    s = gl.load(x + offs)
    if TURNED:
        s = modified(s, b, h, q_start + columns, k_start + rows, captured, FEATURES)
    else:
        s = modified(s, b, h, q_start + rows, k_start + columns, captured, FEATURES)
    gl.store(out + offs, s + gl.zeros([M, N], gl.float32, layout=LAYOUT))


def features_of(mod):
    function = function_of(mod.key)
    return Mods(MASK_MOD=function) if isinstance(mod, Mask) else Mods(SCORE_MOD=function)


def arguments(mod, b=1, h=2, q_start=0, k_start=0, turned=False):
    """Of a launch: what is given, and constants. Outputs start as NaN."""
    x = torch.randn(ROWS, COLUMNS)
    given = (x, torch.full_like(x, math.nan), b, h, q_start, k_start, captured_of(mod.tensors))
    return given, dict(FEATURES=features_of(mod), M=ROWS, N=COLUMNS, TURNED=turned)


def expected_of(mod, x, b, h, q_start, k_start, turned):
    rows, columns = torch.arange(ROWS)[:, None], torch.arange(COLUMNS)
    q, k = (columns, rows) if turned else (rows, columns)
    if isinstance(mod, Mask):
        seen = evaluate(mod.expr, b, h, q_start + q, k_start + k, mod.tensors)
        return torch.where(seen.expand(x.shape), x, -math.inf)
    found = evaluate(mod.expr, b, h, q_start + q, k_start + k, mod.tensors, x)
    return found.float().expand(x.shape)


def interpreted(given, constants):
    interpret(triton_kernel)[(1,)](*given, **constants)


def emulated(given, constants):
    emulate(gluon_kernel)[(1,)](*given, **constants, num_warps=4)


def check(mod, run=interpreted, as_read=None, **where):
    """Holds a tile to torch's, or to that of `as_read`, where torch would refuse an index."""
    given, constants = arguments(mod, **where)
    run(given, constants)
    x, out, *at, _ = given
    expected = expected_of(mod if as_read is None else as_read, x, *at, constants["TURNED"])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
