"""Keys and values of 8 bits as wgmma's left operand, converted exactly by the threads that have it.

wgmma takes its left operand from registers, where a thread has pairs of neighbours along the sum. A
tile is read as words of two bytes, so that a register has two of them. Its even bytes are then one
pair, its odd bytes another: no byte goes to another thread.

    K    (keys, pairs of columns)   S^T = K Q^T sums over even columns, then over odd ones
    V^T  (pairs of columns, keys)   of a pair, a thread has both rows of O^T, g and g + 8
"""

from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..compat import reinterpret
from ..layouts import accumulator, doublings, left_operand, shared

# The bytes of $2 to a pair of its even ones and a pair of its odd ones. Triton (3.6) converts e4m3
# to bf16 by F2F.BF16.F16, an instruction of the exponentials' unit; these are of others.
_TO_F16 = (
    "{ .reg .b32 w; .reg .b16 even, odd; prmt.b32 w, $2, 0, 0x3120; mov.b32 {even, odd}, w;"
    " cvt.rn.f16x2.e4m3x2 $0, even; cvt.rn.f16x2.e4m3x2 $1, odd; }"
)
_TO_BF16 = (
    "{ .reg .b16 even, odd, h0, h1, h2, h3; .reg .b32 w, p, q; .reg .f32 f0, f1, f2, f3;"
    " prmt.b32 w, $2, 0, 0x3120; mov.b32 {even, odd}, w;"
    " cvt.rn.f16x2.e4m3x2 p, even; cvt.rn.f16x2.e4m3x2 q, odd;"
    " mov.b32 {h0, h1}, p; mov.b32 {h2, h3}, q;"
    " cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3;"
    " cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }"
)
# An int8 is its low 7 bits less 128 times its highest. Behind 0x43 they are a bf16 from 128 to 255,
# and either 128 or 256.
_INT_TO_BF16 = (
    "{ .reg .b32 p, q, r, s; prmt.b32 p, $2, 0x43, 0x4240; prmt.b32 q, $2, 0x43, 0x4341;"
    " and.b32 r, p, 0xff7fff7f; and.b32 s, p, 0xff80ff80; sub.rn.bf16x2 $0, r, s;"
    " and.b32 r, q, 0xff7fff7f; and.b32 s, q, 0xff80ff80; sub.rn.bf16x2 $1, r, s; }"
)
# With its highest bit turned it is 128 more; behind 0x64, an fp16 from 1024 to 1279.
_INT_TO_F16 = (
    "{ .reg .b32 p, q, less; xor.b32 p, $2, 0x80808080; prmt.b32 q, p, 0x64, 0x4341;"
    " prmt.b32 p, p, 0x64, 0x4240; mov.b32 less, 0x64806480;"
    " sub.rn.f16x2 $0, p, less; sub.rn.f16x2 $1, q, less; }"
)


# Which bytes are a pair, in these pieces of assembly: of e4m3 both pairs, of int8 the first, second
_EVEN_AND_ODD = "prmt.b32 w, $2, 0, 0x3120;", "0x4240", "0x4341"
_NEIGHBOURS = "mov.b32 w, $2;", "0x4140", "0x4342"
# Every e4m3 in bf16 is the higher half of it in fp32, which takes half as long as rounding. Not
# where threads that multiply convert: it would be as many instructions, of a unit they use more
_ROUNDED = "cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2;"
_HALVES = "prmt.b32 $0, f0, f1, 0x7632; prmt.b32 $1, f2, f3, 0x7632;"


@gluon.constexpr_function
def assembly_of(to_bf16, is_int, in_order=False):
    """What converts four numbers, to pairs of even and of odd ones or, in order, of neighbours."""
    if is_int:
        text = _INT_TO_BF16 if to_bf16 else _INT_TO_F16
    else:
        text = _TO_BF16 if to_bf16 else _TO_F16
    if in_order:
        for even_or_odd, neighbours in zip(_EVEN_AND_ODD, _NEIGHBOURS):
            text = text.replace(even_or_odd, neighbours)
        text = text.replace(_ROUNDED, _HALVES).replace(".reg .f32 f0", ".reg .b32 f0")
    return text


@gluon.constexpr_function
def two_of(dtype):
    """The dtypes of two results."""
    return dtype, dtype


def _emulated(dtype: torch.dtype, is_int: bool, in_order: bool) -> Callable[..., tuple]:
    def convert(words: torch.Tensor) -> tuple:
        kind = torch.int8 if is_int else torch.float8_e4m3fn
        numbers = words.contiguous().view(kind).to(dtype)
        if in_order:
            numbers = numbers.view(torch.int32)
        return numbers[..., 0::2], numbers[..., 1::2]

    return convert


ASM = {
    assembly_of(to_bf16, is_int, in_order): _emulated(
        torch.bfloat16 if to_bf16 else torch.float16, is_int, in_order
    )
    for to_bf16 in (False, True)
    for is_int in (False, True)
    for in_order in (False, True)
}


@gluon.jit
def key_operand(smem, dtype: gl.constexpr, TILE: gl.constexpr):
    """K, (BLOCK_N, BLOCK_D), its even columns before its odd ones."""
    N: gl.constexpr = TILE.BLOCK_N
    D: gl.constexpr = TILE.BLOCK_D
    OPERAND: gl.constexpr = left_operand(accumulator(TILE.BLOCK_M))
    even, odd = halves(as_words(smem, N, WORDS=D // 2).load(OPERAND), dtype, TILE=TILE)
    k_tile = gl.join(even, odd).permute((0, 2, 1)).reshape([N, D])
    return gl.convert_layout(k_tile, OPERAND, assert_trivial=True)


@gluon.jit
def value_operand(smem, dtype: gl.constexpr, TILE: gl.constexpr):
    """V^T, (BLOCK_DV, BLOCK_N), of 16 columns the even ones before the odd ones."""
    N: gl.constexpr = TILE.BLOCK_N
    DV: gl.constexpr = TILE.BLOCK_DV
    LAYOUT: gl.constexpr = transposed_words(DV // 2, N)
    packed = as_words(smem, N, WORDS=DV // 2).permute((1, 0)).load(LAYOUT)
    even, odd = halves(packed, dtype, TILE=TILE)
    v_tile = gl.join(even, odd).reshape([DV // 16, 8, N, 2])
    v_tile = v_tile.permute((0, 3, 1, 2)).reshape([DV, N])
    OPERAND: gl.constexpr = left_operand(accumulator(TILE.BLOCK_M))
    return gl.convert_layout(v_tile, OPERAND, assert_trivial=True)


@gluon.constexpr_function
def transposed_words(pairs, keys):
    """(pairs of columns, keys): a thread has pair 8 w + g, whose columns are then its two rows."""
    registers = [[0, 1], [0, 8], *doublings(16, keys, dim=1), *doublings(32, pairs, dim=0)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    over_warps = [[8, 0], [16, 0]]
    return gl.DistributedLinearLayout(registers, lanes, over_warps, [], [pairs, keys])


@gluon.constexpr_function
def interleaved_accumulator(rows, columns):
    """A (rows, columns) fp32 tile whose transpose wgmma left, of 16 columns the even ones first: a
    thread has both of a pair.
    """
    registers = [[1, 0], [0, 1], *doublings(8, rows, dim=0), *doublings(64, columns, dim=1)]
    lanes = [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]]
    over_warps = [[0, 16], [0, 32]]
    return gl.DistributedLinearLayout(registers, lanes, over_warps, [], [rows, columns])


@gluon.jit
def in_order(acc):
    """O, (BLOCK_M, BLOCK_DV), from O^T as wgmma left it: its registers stay where they are."""
    DV: gl.constexpr = acc.shape[0]
    M: gl.constexpr = acc.shape[1]
    acc = acc.permute((1, 0)).reshape([M, DV // 16, 2, 8]).permute((0, 1, 3, 2)).reshape([M, DV])
    return gl.convert_layout(acc, interleaved_accumulator(M, DV), assert_trivial=True)


@gluon.jit
def even_before_odd(x):
    """The columns of a tile of queries in the order of `key_operand`."""
    ROWS: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    return x.reshape([ROWS, D // 2, 2]).permute((0, 2, 1)).reshape([ROWS, D])


@gluon.jit
def as_words(smem, ROWS: gl.constexpr, WORDS: gl.constexpr):
    """Words of two bytes, swizzled as the bytes are."""
    LAYOUT: gl.constexpr = shared(ROWS, WORDS, dtype=gl.int16)
    return reinterpret(smem, gl.int16, shape=[ROWS, WORDS], layout=LAYOUT)


@gluon.jit
def neighbours(words, dtype: gl.constexpr, IS_INT: gl.constexpr):
    """Words of four bytes, (rows, words), as words of two 16-bit numbers each, (rows, 2 words)."""
    ASSEMBLY: gl.constexpr = assembly_of(dtype == gl.bfloat16, IS_INT, True)
    KINDS: gl.constexpr = two_of(gl.int32)
    first, second = gl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [words], KINDS, True, 1)
    return gl.join(first, second).reshape([words.shape[0], 2 * words.shape[1]])


@gluon.jit
def halves(words, dtype: gl.constexpr, TILE: gl.constexpr):
    """What the even bytes of words stand for, and what the odd ones do: all exact in 16 bits."""
    ASSEMBLY: gl.constexpr = assembly_of(dtype == gl.bfloat16, TILE.CACHE == "int8")
    KINDS: gl.constexpr = two_of(dtype)
    return gl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [words], KINDS, True, 2)
