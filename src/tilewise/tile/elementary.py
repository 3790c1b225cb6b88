"""Elementary functions that Triton's language lacks, in operations of it that every backend, the
interpreter and the emulator have. Relative errors are of a few ulps of fp32.
"""

import triton
import triton.language as tl


@triton.jit
def log1p(x):
    """log(1 + x). What 1 + x is rounded by is made good by a quotient of near numbers (Higham 2002,
    section 1.14.1).
    """
    u = 1.0 + x
    good = tl.where(tl.abs(x) < 1.0, x / tl.where(u == 1.0, 1.0, u - 1.0), 1.0)
    return tl.where(u == 1.0, x, tl.log(u) * good)


@triton.jit
def expm1(x):
    """exp(x) - 1; near 0 a Taylor polynomial."""
    p = x * (1.0 / 5040.0) + 1.0 / 720.0
    p = ((p * x + 1.0 / 120.0) * x + 1.0 / 24.0) * x + 1.0 / 6.0
    return tl.where(tl.abs(x) < 0.5, x + x * x * (p * x + 0.5), tl.exp(x) - 1.0)


@triton.jit
def power(x, y):
    """x to the power of y, as `torch.pow` of floats."""
    size = tl.exp2(y * tl.log2(tl.abs(x)))
    is_whole, is_odd = tl.floor(y) == y, tl.floor(y * 0.5) != y * 0.5
    signed = tl.where(is_odd, -size, size)
    of_negative = tl.where(is_whole, signed, float("nan"))
    return tl.where((y == 0.0) | (x == 1.0), 1.0, tl.where(x < 0.0, of_negative, size))


@triton.jit
def whole(x):
    """A float rounded towards zero, int64; the least integer for what is past it, or NaN."""
    fits = tl.abs(x) < 9223372036854775808.0
    return tl.where(fits, tl.cast(tl.where(fits, x, 0.0), tl.int64), -9223372036854775808)
