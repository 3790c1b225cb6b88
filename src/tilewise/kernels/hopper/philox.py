"""Philox4x32 for the words that a kernel asks for, with products in assembly.

LLVM's optimiser would multiply the halves of a product apart, or by numbers of 64 bits, where it
forgets that words have 32.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...tile.dropout import (
    KEY_STEP_0,
    KEY_STEP_1,
    MULTIPLIER_0,
    MULTIPLIER_1,
    ROUNDS,
    high,
    low,
    philox,
)

_PRODUCT = "mul.wide.u32 $0, $1, $2;"
PRODUCT = gl.constexpr(_PRODUCT)


@gluon.jit
def group_words(stream, group_q, group_k):
    """The four words of a group, see `tile.dropout.philox`. What is the same for a tile stands in
    brackets, to be computed apart.
    """
    c0, c1, c2, c3 = group_k, group_q, stream.counter2, stream.counter3
    for i in gl.static_range(ROUNDS):
        step_0, step_1 = steps_of(stream, i)
        a, b = product(c0, MULTIPLIER_0), product(c2, MULTIPLIER_1)
        c0, c1, c2, c3 = high(b) ^ (c1 ^ step_0), low(b), high(a) ^ (c3 ^ step_1), low(a)
    return c0, c1, c2, c3


@gluon.jit
def half_group(stream, group_q, group_k, is_upper):
    """The first two words of a group, or the last two: one of the last round's two products."""
    key0, key1 = stream.key0, stream.key1
    c0, c1, c2, c3 = philox(
        group_k, group_q, stream.counter2, stream.counter3, key0, key1, ROUNDS - 1
    )
    step_0, step_1 = steps_of(stream, ROUNDS - 1)
    x = product(gl.where(is_upper, c0, c2), gl.where(is_upper, MULTIPLIER_0, MULTIPLIER_1))
    other = gl.where(is_upper, c3, c1) ^ gl.where(is_upper, step_1, step_0)
    return high(x) ^ other, low(x)


@gluon.jit
def steps_of(stream, i: gl.constexpr):
    """The key of a round."""
    step_0 = low(stream.key0.to(gl.int64) + i * KEY_STEP_0)
    return step_0, low(stream.key1.to(gl.int64) + i * KEY_STEP_1)


@gluon.jit
def product(x, multiplier):
    """A product of 32-bit words, in 64 bits."""
    multiplier = gl.cast(multiplier, gl.uint32)
    return gl.inline_asm_elementwise(
        PRODUCT, "=l,r,r", [x, multiplier], gl.int64, is_pure=True, pack=1
    )


# What this assembly means to the emulator
ASM = {_PRODUCT: torch.mul}
