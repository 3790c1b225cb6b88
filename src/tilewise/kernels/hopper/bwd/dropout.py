"""Dropout in the backward.

    dV = factor Pd^T dO          dS = P (factor dPd - delta)

where Pd and dPd are 0 for dropped pairs. A bit for each pair says which these are
(dropout_bits.py), and is held in registers with P until dP is there. The factor is applied after
the sums: the loop computes dS / factor, for which the stored delta is divided by it. So dP may
still start at -delta, and dropped pairs, for which no dP comes in, take -delta alone.

For wide heads P goes to the other warpgroup. It is positive, so its sign encodes the bit.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.gradient import score_gradient
from . import dropout_bits as bwd_drawn

PAIRS = gl.constexpr(32)  # of a thread in (64, 64)


@gluon.constexpr_function
def selection():
    """Assembly that selects the first or the second of each of 32 elements, by a bit of one word.

    Bits of one byte follow each other: only then does ptxas move seven at a time into predicates
    (R2P), instead of testing each.
    """
    n = PAIRS.value
    lines = ["{ .reg .b32 bit; .reg .pred is_kept;"]
    for i in sorted(range(n), key=lambda i: (i // 4 % 2, i % 2)):
        bit = 16 * (i // 4 % 2) + 8 * (i % 2) + 7 - 2 * (i // 8) - i // 2 % 2
        lines.append(f"and.b32 bit, ${3 * n}, {1 << bit}; setp.ne.u32 is_kept, bit, 0;")
        lines.append(f"selp.b32 ${i}, ${n + i}, ${2 * n + i}, is_kept;")
    return " ".join([*lines, "}"])


@gluon.jit
def select(keep_bits, x, other):
    """x where `draw_keep_bits` says that a pair is kept, other elsewhere."""
    LAYOUT: gl.constexpr = x.type.layout
    M: gl.constexpr = x.shape[1]
    # warp, k % 8, q % 8 // 2, q // 64; then k // 8 % 2, q // 32 % 2, q // 16 % 2, q // 8 % 2, q % 2
    bits = keep_bits.reshape([4, 8, 4, M // 64])
    for _ in gl.static_range(5):
        bits = gl.join(bits, bits)
    bits = bits.permute((0, 4, 1, 3, 5, 6, 7, 2, 8)).reshape([64, M])
    bits = gl.convert_layout(bits, LAYOUT)
    n: gl.constexpr = PAIRS
    return gl.inline_asm_elementwise(
        selection(), registers(n), [x, other, bits], gl.float32, is_pure=True, pack=n
    )


@gluon.constexpr_function
def registers(n):
    """Constraints of n outputs and three times n inputs."""
    return ",".join(["=r"] * n + ["r"] * (3 * n))


@gluon.constexpr_function
def conversion(kind, has_relu, is_masked):
    """Two numbers to 16 bits. The comment makes the arms of a branch differ (`dropped_operand`)."""
    relu = ".relu" if has_relu else ""
    comment = " // masked" if is_masked else ""
    return f"cvt.rn{relu}.{kind}x2.f32 $0, $2, $1;{comment}"


@gluon.jit
def marked(p, keep_bits, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """P, negative where the pair was dropped, if P is passed to the other warpgroup."""
    if FEATURES.DROPOUT and TILE.BLOCK_N == 64:
        return select(keep_bits, p, other=-p)
    else:
        return p


@gluon.jit
def dropped_operand(
    p,
    keep_bits,
    dtype: gl.constexpr,
    MASKED: gl.constexpr,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    """P in 16 bits, 0 where the pair was dropped.

    At headdim 128 the conversions are to stand between the exponentials of an arm of the branch
    (+0.7 %). Of arms that end alike the compiler moves the end behind the branch; so they are
    assembly, and not the same. Others have no registers for P in both precisions.
    """
    RELU: gl.constexpr = FEATURES.DROPOUT and TILE.BLOCK_N == 64
    if FEATURES.DROPOUT and not RELU:
        p = select(keep_bits, p, other=0.0)
    if TILE.BLOCK_D != 128 and not RELU:
        return p.to(dtype)
    elif dtype == gl.bfloat16:
        text: gl.constexpr = conversion("bf16", RELU, is_masked=MASKED)
        return gl.inline_asm_elementwise(text, "=r,r,r", [p], gl.bfloat16, is_pure=True, pack=2)
    else:
        text: gl.constexpr = conversion("f16", RELU, is_masked=MASKED)
        return gl.inline_asm_elementwise(text, "=r,r,r", [p], gl.float16, is_pure=True, pack=2)


@gluon.jit
def weight_of(p, derivative, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """What dS is a multiple of, P times the score's derivative. Marked pairs stay so: by the sign,
    or where a derivative may have one of its own by the lowest bit.
    """
    if FEATURES.DROPOUT and TILE.BLOCK_N == 64 and FEATURES.SCORE_MOD is not None:
        bits = (gl.abs(p) * derivative).to(gl.int32, bitcast=True)
        return ((bits & -2) | (p < 0.0).to(gl.int32)).to(gl.float32, bitcast=True)
    else:
        return p * derivative


@gluon.jit
def marked_gradient(weight, dp, minus_delta, FEATURES: gl.constexpr):
    """dS of marked weights and of dP - delta."""
    if FEATURES.DROPOUT and FEATURES.SCORE_MOD is not None:
        is_dropped = (weight.to(gl.int32, bitcast=True) & 1) != 0
        return weight * gl.where(is_dropped, minus_delta, dp)
    elif FEATURES.DROPOUT:
        return gl.abs(weight) * gl.where(weight < 0.0, minus_delta, dp)
    else:
        return score_gradient(weight, dp, derivative=1.0)


def _select(x, other, words):
    k, q = torch.arange(64)[:, None], torch.arange(x.shape[1])
    bit = 16 * (q // 8 % 2) + 8 * (q % 2) + 7 - 2 * (q // 16 % 4) - k // 8 % 2
    return torch.where((words >> bit) & 1 != 0, x, other)


# What this assembly means to the emulator
ASM = {**bwd_drawn.ASM, selection(): _select}
for _kind in ("bf16", "f16"):
    for _is_masked in (False, True):
        ASM[conversion(_kind, True, is_masked=_is_masked)] = torch.relu
        ASM[conversion(_kind, False, is_masked=_is_masked)] = torch.clone
