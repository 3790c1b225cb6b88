"""The bias of a block of scores.

A thread has two neighbouring columns of S, and eight rows meet in a warp. Read like that a bias of
16 bits takes 16 bytes of each row at a time, half of what the L1 cache answers with, one row after
the other. So, where memory allows it, a thread reads two such pairs, and then the four threads of a
row exchange: a pair, which one register holds, stays a pair.

Where the rows begin is the same for all blocks of a tile, and the compiler works it out before
their loop, in 64 bits; a block adds one number to both, and the columns are immediate offsets.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .layouts import accumulator, column_of, pairs_of, row_of, runs_of_pairs


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
        # A constant, as the compiler forgets on the way into a partition what it knew of strides
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
    if bias.shape[1] > 1:
        bias = gl.convert_layout(bias, s.type.layout)
    return s + bias.to(gl.float32)
