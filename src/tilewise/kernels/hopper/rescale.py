"""Conditional rescaling of O, which few blocks need, and the placement of exponentials next to the
wgmma in flight.

Online softmax may subtract any m from the scores, as long as O and l are summed with the same one:
the two are divided by each other at the end, and lse = m + log2 l. So a row keeps its m until the
maximum exceeds it by THRESHOLD (FlashAttention-4, arXiv 2603.05451). P is then at most 2^THRESHOLD,
which fp32 sums and fp16 hold; its largest number is no longer a 1 that rounding leaves as it is.
After the first blocks of a tile rows seldom change, and a warp in which none does skips the 32, 64
or 128 multiplications of its part of O.

The branch is inline assembly, because it is one warp's own: an `if` in Gluon is the same for all
warps of a partition. It has a second use. A branch ends a basic block, and ptxas moves no
instruction that is needed before it behind it: what is PINNED is computed during the P V in flight,
before the wait for it. Such a branch is never taken, which the compiler must not be able to prove,
and what it skips must have an effect (`nanosleep`), or it is removed.
"""

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

THRESHOLD = gl.constexpr(8.0)  # in the units of m: base 2, or natural, see `in_exponent`
HUGE = gl.constexpr(67108864.0)  # 2^26, from where on numbers in fp32 are 8 apart or more
NEVER = gl.constexpr(-77777)  # no tile starts at this row

PIN = gl.constexpr("@!never bra ON; HERE: nanosleep.u32 20; bra HERE; ON: }")


@gluon.constexpr_function
def factors_of(is_pinned):
    """alpha of a thread's two rows, and whether any row of the warp has another than 1."""
    end = f"setp.eq.s32 never, $6, {NEVER.value}; {PIN.value}" if is_pinned else "}"
    return (
        "{ .reg .pred grows, any, never;"
        " ex2.approx.ftz.f32 $0, $4; ex2.approx.ftz.f32 $1, $5;"
        " setp.neu.f32 grows, $4, 0f00000000; setp.neu.or.f32 grows, $5, 0f00000000, grows;"
        " vote.sync.any.pred any, grows, 0xffffffff;"
        " selp.b32 $2, 1, 0, any; selp.b32 $3, 1, 0, any; " + end
    )


@gluon.constexpr_function
def rescale_of(n):
    """n registers of an accumulator, of which the first two of every four are of the thread's first
    row, times that row's alpha.
    """
    rows = [2 * n if i % 4 < 2 else 2 * n + 2 for i in range(n)]
    products = " ".join(f"mul.f32 ${i}, ${i}, ${row};" for i, row in enumerate(rows))
    return f"{{ .reg .pred any; setp.ne.s32 any, ${3 * n}, 0; @!any bra SAME; {products} SAME: }}"


@gluon.constexpr_function
def exponentials_of(n, first, stop, is_pinned, by_row=False):
    """2^(s - m) of quarters of n registers; scores have a factor for each row, or one for both.
    Pinned ones are summed: no sum of them is negative, but ptxas does not know that, so that none
    is computed behind the branch.
    """
    first, stop = n * first // 4, n * stop // 4
    lines = ["{ .reg .pred never; .reg .f32 m0, m1;"]
    lines.append(f"neg.f32 m0, ${2 * n}; neg.f32 m1, ${2 * n + 2};")
    for i in range(first, stop):
        row = "m0" if i % 4 < 2 else "m1"
        scale = 3 * n + 2 * (by_row and i % 4 >= 2)
        lines.append(f"fma.rn.f32 ${i}, ${i}, ${scale}, {row}; ex2.approx.ftz.f32 ${i}, ${i};")
    if not is_pinned:
        return " ".join([*lines, "}"])
    lines.append(f"add.f32 m0, ${first}, ${first + 1};")
    lines += [f"add.f32 m0, m0, ${i};" for i in range(first + 2, stop)]
    return " ".join([*lines, "setp.eq.f32 never, m0, 0fC7980000;", PIN.value])  # -77824


@gluon.constexpr_function
def in_place(n, kinds):
    """Constraints of n registers that are changed, then of n of each of `kinds`."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + [x for x in kinds for _ in range(n)])


@gluon.jit
def lagging_max(m_before, m_new):
    """The m to go on with. -inf stays until there is a score; a comparison with NaN is false."""
    return gl.where(m_new - m_before > THRESHOLD, m_new, m_before)


@gluon.jit
def finite_max(m_i):
    """What is subtracted: a row that has seen no key has no maximum."""
    return gl.where(m_i == float("-inf"), 0.0, m_i)


class Exponent(NamedTuple):
    """What the exponent subtracts from scores times a factor: before, and now."""

    m_before: gl.tensor
    m_i: gl.tensor
    factor: gl.tensor


@gluon.jit
def in_exponent(m_before, m_i, scale, FEATURES: gl.constexpr):
    """Maxima in base 2, of scores to which a bias or a score function adds, which are natural.

    A mask may be a bias of -1e9 or the most negative number, whose product with log2(e) overflows,
    or is rounded by more than fp16 can hold as a power of 2. The factor of such a row is 1: its
    scores are 8 apart at least, so that what is not the maximum has a P of nearly 0 in either base.
    """
    if FEATURES.NATURAL:
        factor = factor_of(m_i, scale)
        return Exponent(product(m_before, factor), product(m_i, factor), factor[:, None])
    else:
        return Exponent(m_before, m_i, factor=scale)


@gluon.jit
def factor_of(m_i, scale):
    """The factor of each row."""
    return gl.where(gl.abs(m_i) < HUGE, scale, 1.0)


@gluon.jit
def product(m_i, factor):
    """Rounded: the compiler may not join it with a difference, as P of a row is all by one m."""
    return gl.fma(m_i, factor, 0.0)


@gluon.jit
def rounded_off(m_i, scale):
    """The product's rounding: the logarithm of a factor that P and a row's sums share."""
    m_ref = finite_max(m_i)
    factor = factor_of(m_ref, scale)
    return gl.fma(m_ref, factor, -product(m_ref, factor))


@gluon.jit
def rescale_factors(m_before, m_i, start, PINNED: gl.constexpr):
    """alpha = 2^(m_before - m_i), and whether a row of the warp has another than 1. `start` is any
    number of the tile's that is never NEVER.
    """
    return gl.inline_asm_elementwise(
        factors_of(PINNED),
        "=f,=f,=r,=r,f,f,r,r",
        [m_before - finite_max(m_i), start],
        dtype=(gl.float32, gl.int32),
        is_pure=False,
        pack=2,
    )


@gluon.jit
def rescale(acc, alpha, is_needed):
    """acc * alpha, in warps where that is not acc."""
    n: gl.constexpr = acc.shape[1] // 2
    return gl.inline_asm_elementwise(
        rescale_of(n),
        in_place(n, "fr"),
        [acc, alpha[:, None], is_needed[:, None]],
        dtype=gl.float32,
        is_pure=False,
        pack=n,
    )


@gluon.jit
def exponentials_in(
    s,
    m_i,
    scale,
    FIRST: gl.constexpr,
    STOP: gl.constexpr,
    PINNED: gl.constexpr,
    BY_ROW: gl.constexpr,
):
    """2^(s - m) in the quarters FIRST to STOP of a block's columns; the others stay scores."""
    n: gl.constexpr = s.shape[1] // 2
    return gl.inline_asm_elementwise(
        exponentials_of(n, FIRST, stop=STOP, is_pinned=PINNED, by_row=BY_ROW),
        in_place(n, "ff"),
        [s, finite_max(m_i)[:, None], scale],
        dtype=gl.float32,
        is_pure=not PINNED,
        pack=n,
    )


def _factors(difference, start):
    return torch.exp2(difference), torch.ones_like(difference, dtype=torch.int32)


def _quarters(first, stop):
    def exponentials(s, m_ref, scale):
        a, b = s.shape[1] * first // 4, s.shape[1] * stop // 4
        return torch.cat([s[:, :a], torch.exp2(s * scale - m_ref)[:, a:b], s[:, b:]], 1)

    return exponentials


_REGISTERS = 16, 32, 64, 128  # of an accumulator of up to 256 columns
# What this assembly means to the emulator
ASM = {
    **{factors_of(is_pinned): _factors for is_pinned in (False, True)},
    **{rescale_of(n): lambda acc, alpha, is_needed: acc * alpha for n in _REGISTERS},
    **{exponentials_of(n, 0, 1, True, x): _quarters(0, 1) for n in _REGISTERS for x in (0, 1)},
    **{exponentials_of(n, 1, 4, False, x): _quarters(1, 4) for n in _REGISTERS for x in (0, 1)},
}
