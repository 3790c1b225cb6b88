"""The convert warps: keys and values of 8 bits to the 16 bits of the queries, exactly.

wgmma reads its right operand from shared memory. So each block is read from the ring that copies
fill, and written, swizzled, to the ring that the matmul warpgroup reads. It then knows of 8 bits
only their scales.
"""

from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ....tile.splits import piece_keys
from ..compat import reinterpret
from ..layouts import row_of, shared
from ..pieces import in_pieces
from ..pipeline import advance, release_by_threads, start, wait_empty, wait_full
from .work import END, PART, keys_of, receive_work

# Four bytes, $2, to two pairs. Triton (3.6) converts e4m3 to bf16 by F2F.BF16.F16, an instruction
# of the exponentials' unit; these are of others.
_TO_F16 = (
    "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
    " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
)
_TO_BF16 = (
    "{ .reg .b16 low, high, h0, h1, h2, h3; .reg .b32 p, q; .reg .f32 f0, f1, f2, f3;"
    " mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 p, low; cvt.rn.f16x2.e4m3x2 q, high;"
    " mov.b32 {h0, h1}, p; mov.b32 {h2, h3}, q;"
    " cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3;"
    " cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }"
)
# An int8 is its low 7 bits less 128 times its highest. Behind 0x43 they are a bf16 from 128 to 255,
# and either 128 or 256.
_INT_TO_BF16 = (
    "{ .reg .b32 p, q, r, s; prmt.b32 p, $2, 0x43, 0x4140; prmt.b32 q, $2, 0x43, 0x4342;"
    " and.b32 r, p, 0xff7fff7f; and.b32 s, p, 0xff80ff80; sub.rn.bf16x2 $0, r, s;"
    " and.b32 r, q, 0xff7fff7f; and.b32 s, q, 0xff80ff80; sub.rn.bf16x2 $1, r, s; }"
)
# With its highest bit turned it is 128 more; behind 0x64, an fp16 from 1024 to 1279.
_INT_TO_F16 = (
    "{ .reg .b32 p, q, less; xor.b32 p, $2, 0x80808080; prmt.b32 q, p, 0x64, 0x4342;"
    " prmt.b32 p, p, 0x64, 0x4140; mov.b32 less, 0x64806480;"
    " sub.rn.f16x2 $0, p, less; sub.rn.f16x2 $1, q, less; }"
)


@gluon.constexpr_function
def assembly_of(to_bf16, is_int):
    """What converts four numbers."""
    if is_int:
        return _INT_TO_BF16 if to_bf16 else _INT_TO_F16
    return _TO_BF16 if to_bf16 else _TO_F16


def _emulated(dtype: torch.dtype, is_int: bool) -> Callable[[torch.Tensor], tuple]:
    def convert(words: torch.Tensor) -> tuple:
        kind = torch.int8 if is_int else torch.float8_e4m3fn
        pairs = words.contiguous().view(kind).to(dtype).view(torch.int32)
        return tuple(pairs.unflatten(-1, (-1, 2)).unbind(-1))

    return convert


ASM = {
    assembly_of(to_bf16, is_int): _emulated(torch.bfloat16 if to_bf16 else torch.float16, is_int)
    for to_bf16 in (False, True)
    for is_int in (False, True)
}


@gluon.jit
def convert_partition(rings, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    messages_state, stored_state, state = start(), start(), start()
    work = receive_work(rings.messages, messages_state)
    while work.kind != END:
        messages_state = advance(messages_state, 2)
        if work.kind == PART:
            stored_state, state = convert_part(
                work, rings, stored_state, state, call, FEATURES, TILE
            )
        work = receive_work(rings.messages, messages_state)


@gluon.jit
def convert_part(
    work, rings, stored_state, state, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """The keys and values of a part, block by block."""
    N: gl.constexpr = TILE.BLOCK_N
    stored = rings.stored
    keys = keys_of(work, call, FEATURES, TILE.ROWS)
    split_size = call.sizes.split_size
    for piece in range(work.piece, work.stop):
        first, stop = piece_keys(piece * split_size, split_size, keys, N)
        for n in range(first, stop, N):
            at = stored_state, state
            if call.scales.k_row is not None:
                pass_on(stored.k, stored.k_scales, rings.k, rings.k_scales, at)
            convert_block(stored.k, rings.k, at, n, keys, False, TILE)
            if call.scales.v_row is not None:
                pass_on(stored.v, stored.v_scales, rings.v, rings.v_scales, at)
            convert_block(stored.v, rings.v, at, n, keys, True, TILE)
            stored_state = advance(stored_state, TILE.CACHE_STAGES)
            state = advance(state, TILE.STAGES)
    return stored_state, state


@gluon.jit
def convert_block(stored, ring, at, n, keys, CLEAR: gl.constexpr, TILE: gl.constexpr):
    """A block, (BLOCK_N, columns). CLEAR: rows that are not in use, which may be NaN, become zeros,
    as 0 times NaN is NaN.
    """
    N: gl.constexpr = TILE.BLOCK_N
    COLUMNS: gl.constexpr = stored.buffers.shape[4]
    LAYOUT: gl.constexpr = in_pieces(COLUMNS // 4, 2, 4)
    IS_BF16: gl.constexpr = ring.buffers.dtype == gl.bfloat16
    IS_INT: gl.constexpr = TILE.CACHE == "int8"
    stored_state, state = at
    wait_full(stored, stored_state)
    words = as_words(stored.buffers.index(stored_state.stage), N, COLUMNS // 4)
    words = widened(words.load(LAYOUT), IS_BF16, IS_INT)
    if CLEAR:
        if (n < keys.first) | (n + N > keys.last):
            row = n + gl.arange(0, N, row_of(words.type.layout))
            is_used = (row >= keys.first) & (row < keys.last)
            words = gl.where(is_used[:, None], words, 0)
    wait_empty(ring, state)
    as_words(ring.buffers.index(state.stage), N, COLUMNS // 2).store(words)
    fence_async_shared()  # what threads wrote, before wgmma reads it
    mbarrier.arrive(ring.full.index(state.stage), count=1)
    release_by_threads(stored, stored_state)


@gluon.jit
def as_words(smem, ROWS: gl.constexpr, WORDS: gl.constexpr):
    """Words of 32 bits: in numbers of 8, the compiler would take them apart."""
    LAYOUT: gl.constexpr = shared(ROWS, WORDS, gl.int32)
    return reinterpret(smem, gl.int32, [ROWS, WORDS], LAYOUT)


@gluon.jit
def pass_on(stored, stored_scales, ring, scales, at):
    """The scales of a block's rows, beside which they then stay."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    stored_state, state = at
    wait_full(stored, stored_state)
    scale = stored_scales.index(stored_state.stage).load(LAYOUT)
    wait_empty(ring, state)
    scales.index(state.stage).store(scale)


@gluon.jit
def widened(words, IS_BF16: gl.constexpr, IS_INT: gl.constexpr):
    """Words of four bytes as the numbers that these stand for, all exact in 16 bits: two words."""
    ASSEMBLY: gl.constexpr = assembly_of(IS_BF16, IS_INT)
    KINDS: gl.constexpr = (gl.int32, gl.int32)
    low, high = gl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [words], KINDS, True, 1)
    return gl.join(low, high).reshape([words.shape[0], 2 * words.shape[1]])
