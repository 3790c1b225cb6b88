"""A tile in 16 bits as words of two neighbours, which a loop carries as they are.

The optimiser unpacks 16-bit elements that a loop carries: two instructions, to move one register.
That of Triton 3.6 leaves P together, but with dropout. By later ones, three warpgroups of headdim
64 moved and swapped all of P in each block, and spilled (3.8: 12 bytes a thread, causal 216).
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..layouts import pairs_of

UNPACKS = gl.constexpr(not triton.__version__.startswith("3.6."))


@gluon.constexpr_function
def rounding(kind):
    """Two numbers to 16 bits, in a word."""
    return f"{{ cvt.rn.{kind}x2.f32 $0, $2, $1; }}"


@gluon.jit
def neighbours(p):
    """The even and the odd columns of a tile, each (64, BLOCK_N // 2): nothing moves."""
    N: gl.constexpr = p.shape[1] // 2
    LAYOUT: gl.constexpr = pairs_of(N)
    even, odd = gl.split(p.reshape([64, N, 2]))
    return gl.convert_layout(even, LAYOUT), gl.convert_layout(odd, LAYOUT)


@gluon.jit
def to_pairs(p, dtype: gl.constexpr):
    """A tile in 16 bits: two neighbours a word, (64, BLOCK_N // 2), which is one register."""
    KIND: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    text: gl.constexpr = rounding(KIND)
    even, odd = neighbours(p)
    return gl.inline_asm_elementwise(
        text, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def from_pairs(pairs, dtype: gl.constexpr):
    """The tile of `to_pairs`, (64, BLOCK_N)."""
    even = pairs.to(gl.int16).to(dtype, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.join(even, odd).reshape([64, 2 * pairs.shape[1]])


def _rounded(dtype):
    def rounded(even, odd):
        even, odd = (x.to(dtype).view(torch.int16).int() for x in (even, odd))
        return even & 0xFFFF | odd << 16

    return rounded


# What this assembly means to the emulator
ASM = {rounding("bf16"): _rounded(torch.bfloat16), rounding("f16"): _rounded(torch.float16)}
