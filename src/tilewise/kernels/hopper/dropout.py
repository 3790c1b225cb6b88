"""Dropout in the forward, of tiles that lie as wgmma leaves them, in assembly that LLVM's optimiser
cannot spoil.

The mask as a comparison and a `where` takes a third to a half more instructions: the optimiser
multiplies by other constants for each byte of a word, and packs a tile's comparisons into integers.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Two neighbours at a time. A byte b becomes the half-precision number 1024 + b, whose bits are
# 0x6400 + b: such numbers can be compared two at a time, and the answer is all ones or zeros
_SELECT_HALVES = """{
    .reg .b32 selector, bytes, is_kept;
    shl.b32 selector, $5, 8;
    or.b32 selector, selector, $4;
    prmt.b32 bytes, $2, 0x64646464, selector;
    set.ge.u32.f16x2 is_kept, bytes, $6;
    and.b32 $0, $1, is_kept;
}"""
SELECT_HALVES = gl.constexpr(_SELECT_HALVES)


@gluon.jit
def drop_halves(p, drawn, threshold):
    """A tile of 16-bit elements, queries down, keys across, 0 where `tile.dropout.kept` is false by
    what was drawn for it: three instructions for two elements, since keys 2t and 2t + 1 share a
    register, and their bytes a word.
    """
    least = (gl.cast(threshold, gl.uint32) + 0x6400) * 0x10001
    return gl.inline_asm_elementwise(
        SELECT_HALVES,
        "=r,r,r,r,r,r,r,r",
        [p, drawn.word, 0x40 + drawn.byte, least],  # the pair's byte, then one of the constant
        dtype=p.dtype,
        is_pure=True,
        pack=2,
    )


def _select_halves(p, word, selector, least):
    byte = (word >> 8 * (selector & 3)) & 255
    return torch.where(byte >= (least & 255), p, 0.0)


# What this assembly means to the emulator
ASM = {_SELECT_HALVES: _select_halves}
