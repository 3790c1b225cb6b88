"""Dropout in the backward: the sign of P says which pairs were dropped.

    dV = factor Pd^T dO          dS = P (factor dPd - delta)

where Pd and dPd are 0 for dropped pairs. P is positive, so its sign is free to carry the mask from
P to dS: -P stands for a pair that was dropped. The conversion of P to 16 bits makes Pd of it in the
same instruction. The factor waits until all is summed: the loop computes dS / factor, for which the
stored delta is divided by it. So dP may start at -delta as ever, and dropped pairs, for which no dP
comes in, take -delta alone.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.dropout import draw
from ...tile.gradient import score_gradient

_MARK = """{
    .reg .b32 byte_first, dropped;
    .reg .pred is_kept;
    shl.b32 byte_first, $2, $3;
    setp.ge.u32 is_kept, byte_first, $4;
    neg.f32 dropped, $1;
    selp.b32 $0, $1, dropped, is_kept;
}"""
MARK = gl.constexpr(_MARK)


@gluon.constexpr_function
def conversion(kind, has_dropout, is_masked):
    """Two numbers to 16 bits; with dropout what is negative becomes 0. The comment makes the arms
    of a branch differ, see `kept_operand`.
    """
    relu = ".relu" if has_dropout else ""
    comment = " // masked" if is_masked else ""
    return f"cvt.rn{relu}.{kind}x2.f32 $0, $2, $1;{comment}"


@gluon.jit
def mark_dropped(p, stream, m_start, n_start, offs_m, offs_n, threshold):
    """P, negative where `tile.dropout.kept` is false."""
    drawn = draw(stream, m_start, n_start, offs_m, offs_n)
    least = gl.cast(threshold, gl.uint32) << 24
    return gl.inline_asm_elementwise(
        MARK,
        "=r,r,r,r,r",
        [p, drawn.word, 24 - 8 * drawn.byte, least],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def kept_operand(
    p, dtype: gl.constexpr, MASKED: gl.constexpr, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """P in 16 bits, 0 where the pair was dropped.

    At headdim 128 the conversions are to stand between the exponentials of an arm of the branch
    (+0.7 %). Of arms that end alike the compiler moves the end behind the branch; so they are
    assembly, and not the same. Others have no registers for P in both precisions.
    """
    if TILE.BLOCK_D != 128 and not FEATURES.DROPOUT:
        return p.to(dtype)
    elif dtype == gl.bfloat16:
        text: gl.constexpr = conversion("bf16", FEATURES.DROPOUT, MASKED)
        return gl.inline_asm_elementwise(text, "=r,r,r", [p], gl.bfloat16, is_pure=True, pack=2)
    else:
        text: gl.constexpr = conversion("f16", FEATURES.DROPOUT, MASKED)
        return gl.inline_asm_elementwise(text, "=r,r,r", [p], gl.float16, is_pure=True, pack=2)


@gluon.jit
def weight_of(p, derivative, FEATURES: gl.constexpr):
    """What dS is a multiple of, P times the score's derivative. Dropped pairs stay marked: by the
    sign, or where a derivative may have one of its own by the lowest bit.
    """
    if FEATURES.DROPOUT and FEATURES.SCORE_MOD is not None:
        bits = (gl.abs(p) * derivative).to(gl.int32, bitcast=True)
        return ((bits & -2) | (p < 0.0).to(gl.int32)).to(gl.float32, bitcast=True)
    else:
        return p * derivative


@gluon.jit
def weighted(weight, dp, minus_delta, FEATURES: gl.constexpr):
    """dS of weights and of dP - delta."""
    if FEATURES.DROPOUT and FEATURES.SCORE_MOD is not None:
        is_dropped = (weight.to(gl.int32, bitcast=True) & 1) != 0
        return weight * gl.where(is_dropped, minus_delta, dp)
    elif FEATURES.DROPOUT:
        return gl.abs(weight) * gl.where(weight < 0.0, minus_delta, dp)
    else:
        return score_gradient(weight, dp, 1.0)


def _mark(p, word, shift, least):
    return torch.where(((word << shift) & 0xFFFFFFFF) >= least, p, -p)


# What this assembly means to the emulator
ASM = {_MARK: _mark}
for _kind in ("bf16", "f16"):
    for _is_masked in (False, True):
        ASM[conversion(_kind, True, _is_masked)] = torch.relu
        ASM[conversion(_kind, False, _is_masked)] = torch.clone
