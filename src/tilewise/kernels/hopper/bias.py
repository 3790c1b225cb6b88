"""The bias of a block of scores.

A bias of every pair comes by TMA: the load warp copies a warpgroup's tile into shared memory, from
where `ldmatrix` reads pairs just as the accumulator has them. What follows is for a bias that TMA
cannot read, or that shared memory has no room for.

A thread has two neighbouring columns of S, and eight rows meet in a warp. Read like that a bias of
16 bits takes 16 bytes of each row at a time, half of what the L1 cache answers with, one row after
the other. So, where alignment allows it, a thread reads two such pairs, and then the four threads
of a row exchange pairs, one register each.

Where the rows begin is the same for all blocks of a tile, and the compiler works it out before
their loop, in 64 bits; a block adds one number to both, and the columns are immediate offsets.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .layouts import accumulator, column_of, pairs_of, row_of, runs_of_pairs, shared
from .pipeline import PipelineState, load, make_ring, release_by_threads

# Two neighbours of bf16 to fp32: the upper half of a word needs no more than a mask
WIDEN = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")


@gluon.jit
def widened(bias):
    """A bias in fp32."""
    if bias.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            WIDEN, "=r,=r,r", [bias], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        return bias.to(gl.float32)


@gluon.jit
def make_biases(dtype: gl.constexpr, TILE: gl.constexpr):
    """Allocates the bias of a block for each of two warpgroups, where TMA loads it."""
    if TILE.BIAS_COPIED:
        N: gl.constexpr = TILE.BLOCK_N
        layout: gl.constexpr = shared(64, N, dtype=dtype)
        first = make_ring(dtype, [64, N], layout=layout, STAGES=1, PRODUCERS=1, CONSUMERS=128)
        return first, make_ring(dtype, [64, N], layout=layout, STAGES=1, PRODUCERS=1, CONSUMERS=128)
    else:
        return 0


@gluon.jit
def copy_bias(desc, rings, at, work, n_start, call, TILE: gl.constexpr):
    """Loads the bias of a block of keys for each warpgroup that has read the previous block's."""
    if TILE.BIAS_COPIED:
        bias = call.modifiers.bias
        # A dimension that the bias does not have is one element long
        batch = gl.where(bias.batch == 0, 0, work.batch)
        head = gl.where(bias.head == 0, 0, work.head)
        shape: gl.constexpr = desc.block_type.shape
        for i in gl.static_range(2):
            load(rings[i], at, desc, [batch, head, work.start + 64 * i, n_start], shape)


@gluon.jit
def copied_bias(bias, rings, WG: gl.constexpr, parity, pred, TILE: gl.constexpr):
    """The bias of a block, (64, BLOCK_N), where it is copied; else what was loaded already. The
    parity alternates from block to block, over all tiles.
    """
    if TILE.BIAS_COPIED:
        mbarrier.wait(rings[WG].full.index(0), parity, pred=pred)
        return rings[WG].buffers.index(0).load(accumulator(TILE.BLOCK_N))
    else:
        return bias


@gluon.jit
def release_bias(rings, WG: gl.constexpr, TILE: gl.constexpr):
    """The bias of the next block may be copied: each thread has used what it read."""
    if TILE.BIAS_COPIED:
        release_by_threads(rings[WG], PipelineState(0, 0))


@gluon.jit
def load_bias(work, rows, n_block, call, TILE: gl.constexpr):
    """The bias of one block of keys: (64, BLOCK_N), (64, BLOCK_N // 2) of pairs, or (64, 1). Past
    the last key lies anything, as scores are masked there; and rows that do not exist read
    another's.
    """
    bias = call.modifiers.bias
    STEP: gl.constexpr = TILE.BIAS_STEP
    IN_PAIRS: gl.constexpr = bias.ptr.dtype.element_ty == gl.int32
    N: gl.constexpr = TILE.BLOCK_N // 2 if IN_PAIRS else TILE.BLOCK_N
    LAYOUT: gl.constexpr = runs_of_pairs(N) if IN_PAIRS else accumulator(N)
    n_start = n_block * N
    rows = gl.convert_layout(rows, row_of(LAYOUT))
    q_idx = gl.minimum(gl.maximum(work.start, 0) + rows, call.sizes.seqlen_q - 1)
    columns = gl.arange(0, N, column_of(LAYOUT))[None, :]
    of_head = bias.ptr + gl.cast(work.batch, gl.int64) * bias.batch
    of_head += gl.cast(work.head, gl.int64) * bias.head
    of_rows = of_head + q_idx.to(gl.int64) * bias.row
    if STEP == 0:
        return gl.load(of_rows)[:, None]
    else:
        # A constexpr, as divisibility of strides is lost at the call of a partition
        step = 1 if STEP > 0 else bias.column
        of_block = of_rows + gl.cast(n_start, gl.int64) * step
        ptrs = of_block[:, None] + columns.to(gl.int64) * step
        stop = call.sizes.seqlen_k * N // TILE.BLOCK_N
        exist = columns < stop - n_start
        if STEP == 2:
            RUN: gl.constexpr = ptrs.dtype.element_ty.primitive_bitwidth // 4  # bytes of two
            ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [1, RUN]), [1, 2])
            exist = gl.max_constancy(exist, [1, 2])  # there are whole runs of keys
        return gl.load(ptrs, mask=exist)


@gluon.jit
def add_bias(s, bias, dtype: gl.constexpr):
    """Scores and their bias, as `load_bias` read it; pairs are of `dtype`."""
    if bias.dtype == gl.int32:
        N: gl.constexpr = s.shape[1]
        pairs = gl.convert_layout(bias, pairs_of(N // 2))
        if dtype == gl.bfloat16:  # the upper half of an fp32
            even = (pairs << 16).to(gl.float32, bitcast=True)
            odd = (pairs & -65536).to(gl.float32, bitcast=True)
        else:
            even = pairs.to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
            odd = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        bias = gl.join(even, odd).reshape([64, N])
    if bias.dtype == gl.bfloat16 and bias.shape[1] > 1:
        return s + widened(gl.convert_layout(bias, s.type.layout))
    if bias.shape[1] > 1:
        bias = gl.convert_layout(bias, s.type.layout)
    return s + bias.to(gl.float32)


# What this assembly means to the emulator
ASM = {WIDEN.value: lambda bias: bias.float()}
