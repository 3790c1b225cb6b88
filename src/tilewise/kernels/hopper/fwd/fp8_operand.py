"""P in e4m3, from the accumulator of one product to the left operand of the next.

Thread t of the four that hold a row has columns 8 i + 2 t and 8 i + 2 t + 1 of S, and as an
operand of 8 bits wants columns 4 t to 4 t + 3 of every 16. Nothing moves: its column 4 t + 2 i + b
of P is key 8 i + 2 t + b, and V^T has its keys in that order (`common.quantized.KEY_ORDER`).

P is 2^TOP times itself: e4m3, whose largest number is 448, then holds probabilities down to 2^-17
of the row's largest. l is summed from P in fp32, so that the factor vanishes in O = acc / l.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..layouts import fp8_left_operand

TOP = gl.constexpr(8.0)
# The maximum of a row before its first key, and while all its keys are hidden. Finite, so that
# nothing has to be done about -inf - -inf: a hidden score is -inf, and 2^(-inf - LOWEST) is 0
LOWEST = gl.constexpr(-3.4028234663852886e38)

# One piece of assembly for four values: LLVM would take a packed word apart again
_EXPONENTIALS = (
    "{ .reg .b16 low, high;"
    " ex2.approx.ftz.f32 $1, $5; ex2.approx.ftz.f32 $2, $6;"
    " ex2.approx.ftz.f32 $3, $7; ex2.approx.ftz.f32 $4, $8;"
    " cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
    " mov.b32 $0, {low, high}; }"
)
EXPONENTIALS = gl.constexpr(_EXPONENTIALS)


@gluon.jit
def exponents(s, m_i, scale):
    """s - m + TOP. Before the next S is started: it then takes the registers of this one."""
    return s * scale + (TOP - m_i)[:, None]


@gluon.jit
def exponentials(y, DV: gl.constexpr):
    """P = 2^y as wgmma's left operand, and each thread's part of the sums of its rows.

    P is not kept from one step of a loop to the next: LLVM would hold each byte in a register of
    its own, and pack and unpack them.
    """
    N: gl.constexpr = y.shape[1]
    y = y.reshape([64, N // 16, 2, 4, 2]).permute(0, 1, 3, 2, 4).reshape([64, N])
    y = gl.convert_layout(y, fp8_left_operand(DV), assert_trivial=True)
    p, exact = gl.inline_asm_elementwise(
        EXPONENTIALS,
        "=r,=f,=f,=f,=f,f,f,f,f",
        [y],
        dtype=(gl.float8e4nv, gl.float32),
        is_pure=True,
        pack=4,
    )
    return p, gl.sum(gl.sum(exact.reshape([64, N // 16, 4, 4]), 3), 1)


@gluon.jit
def no_sums(N: gl.constexpr, DV: gl.constexpr):
    """Sums of nothing, as `exponentials` returns them: (64, 4)."""
    nothing = gl.zeros([64, N], gl.float32, fp8_left_operand(DV))
    return gl.sum(gl.sum(nothing.reshape([64, N // 16, 4, 4]), 3), 1)


def _in_e4m3(y):
    p = torch.exp2(y.double()).float()
    return p.clamp(max=448).to(torch.float8_e4m3fn), p


ASM = {_EXPONENTIALS: _in_e4m3}  # what this assembly means to the emulator
