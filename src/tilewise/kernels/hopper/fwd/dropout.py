"""Dropout in the forward, of tiles in wgmma's accumulator layout, in assembly that LLVM cannot
pessimise.

The mask as a comparison and a `where` takes a third to a half more instructions: the optimiser
multiplies by other constants for each byte of a word, and packs a tile's comparisons into integers.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.dropout import byte_of, group_words, key_group, query_group, word_of
from ..layouts import column_of, pairs_of, row_of
from .pairs import neighbours


@gluon.constexpr_function
def selection(kind):
    """Two neighbours at a time. A byte b becomes the half-precision number 1024 + b, whose bits are
    0x6400 + b. What it lacks to the threshold is 0 for kept pairs, and at least 1 for dropped ones,
    or 2^-7 if its bits are read as bfloat16: times the lowest number of all that outweighs any P.

    Comparisons and masks would do, as many instructions, but integer and logic units are short.
    """
    lowest = {"bf16": "0xFF7FFF7F", "f16": "0xFBFFFBFF"}[kind]
    return f"""{{
        .reg .b32 bytes, lacks, both, minus_one, lowest;
        mov.b32 minus_one, 0xBC00BC00;
        mov.b32 lowest, {lowest};
        cvt.rn.{kind}x2.f32 both, $2, $1;
        prmt.b32 bytes, $3, $5, $4;
        fma.rn.relu.f16x2 lacks, bytes, minus_one, $5;
        fma.rn.relu.{kind}x2 $0, lacks, lowest, both;
    }}"""


@gluon.jit
def drop_pairs(p, stream, m_start, n_start, rows, threshold, dtype: gl.constexpr):
    """A tile in 16 bits, queries down, keys across, 0 where `tile.dropout.keep_mask` is false: two
    neighbours a word, (64, BLOCK_N // 2), which is one register.

    Three instructions for two elements, since the bytes of keys 2t and 2t + 1 share a word, too.
    """
    N: gl.constexpr = p.shape[1] // 2
    LAYOUT: gl.constexpr = pairs_of(N)
    even, odd = neighbours(p)
    rows = gl.convert_layout(rows, row_of(LAYOUT))[:, None]
    columns = 2 * gl.arange(0, N, column_of(LAYOUT))[None, :]
    group_q = (query_group(m_start) + query_group(rows)).to(gl.uint32)
    # A thread's own part of the columns first, what is left are constants
    group_k = key_group(n_start) + key_group(columns & 6)
    group_k = (group_k + key_group(columns - (columns & 6))).to(gl.uint32)
    w0, w1, w2, w3 = group_words(stream, group_q, group_k=group_k)
    index = word_of(columns)
    bits = gl.where(index < 2, gl.where(index == 0, w0, w1), gl.where(index == 2, w2, w3))
    selector = 0x5150 + 0x101 * byte_of(rows, columns)
    least = (gl.cast(threshold, gl.uint32) + 0x6400) * 0x10001
    KIND: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    text: gl.constexpr = selection(KIND)
    return gl.inline_asm_elementwise(
        text,
        "=r,r,r,r,r,r",
        [even, odd, bits, selector, least],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


def _select(dtype):
    def select(even, odd, word, selector, least):
        pairs = []
        for x, place in ((even, selector), (odd, selector >> 8)):
            is_kept = ((word >> 8 * (place & 3)) & 255) >= (least & 255)
            pairs.append(torch.where(is_kept, x, 0.0).to(dtype).view(torch.int16).int())
        return pairs[0] & 0xFFFF | pairs[1] << 16

    return select


# What this assembly means to the emulator
ASM = {selection("bf16"): _select(torch.bfloat16), selection("f16"): _select(torch.float16)}
