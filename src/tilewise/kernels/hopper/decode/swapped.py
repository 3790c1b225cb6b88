"""A piece of keys, block by block, with operands swapped: keys, of which there are many, are the 64
rows of wgmma, and the tile's rows, of which a decode has few, its columns.

    S^T = K Q^T,  softmax,  O^T += V^T P^T

An accumulator's transpose is a tile of rows again, in the registers where it is: what follows wgmma
is written as it is of 16 bits, and only layouts know. A row's keys lie in four warps, which tell
each other their maxima once a block, and their sums once a piece. O^T += V^T P^T of a block is
computed during the softmax of the next. The bits of a row are those of piece.py, as wgmma sums
alike whichever operand is which.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....tile.score import exp_scale, in_units
from ....tile.softmax import exponentials
from ....tile.splits import SplitState, piece_keys
from ..layouts import accumulator, column_of, numbers_of_warps, row_of, transposed_accumulator
from ..pipeline import advance, release_by_threads, wait_full
from ..rescale import lagging_max
from .eight_bits import in_order, interleaved_accumulator, key_operand, value_operand
from .piece import open_piece, scores_of, wait_values
from .row_sums import add_sums, sums_of_threads, sums_of_warps, whole_sums


@gluon.jit
def attend_piece_swapped(
    work, piece, state, rings, q_smem, smem, k_scale, call, modifiers,
    FEATURES: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """`attend_piece`, of few rows or a cache of 8 bits."""
    M: gl.constexpr = TILE.BLOCK_M
    N: gl.constexpr = TILE.BLOCK_N
    DV: gl.constexpr = TILE.BLOCK_DV
    S_LAYOUT: gl.constexpr = transposed_accumulator(M, N)
    O_LAYOUT: gl.constexpr = output_layout(M, DV, cache=TILE.CACHE)
    numbers = call.numbers
    if call.scales.k is not None and call.scales.k_row is None:
        numbers = in_units(numbers, gl.where(k_scale > 0.0, k_scale, 1.0))
    # K and V^T are both in registers else, for which these leave no room
    IN_TURN: gl.constexpr = TILE.CACHE != "" and M > (8 if DV > 128 else 32)
    tile = open_piece(work, numbers, call, modifiers, S_LAYOUT, FEATURES, TILE)
    no_scores = gl.zeros([N, M], gl.float32, accumulator(M))
    acc_o = gl.zeros([DV, M], gl.float32, accumulator(M))
    m_i = gl.full([M], float("-inf"), gl.float32, row_of(S_LAYOUT))
    l_i = sums_of_threads(gl.zeros([M, N], gl.float32, S_LAYOUT))
    split_size = call.sizes.split_size
    first, stop = piece_keys(piece * split_size, split_size, keys=tile.keys, BLOCK_N=N)
    s = multiply_keys(q_smem, rings, state=state, no_scores=no_scores, TILE=TILE)
    s = take_scores(s, 0, rings=rings, state=state, k_scale=k_scale, call=call, TILE=TILE)
    p, _, m_i, l_i = online_block(s, m_i, l_i, first, tile, smem, FEATURES)
    p_smem = share(p, first, smem=smem, rings=rings, state=state, call=call, TILE=TILE)
    for n in range(first + N, stop, N):
        ahead = advance(state, TILE.STAGES)
        s = multiply_keys(q_smem, rings, state=ahead, no_scores=no_scores, TILE=TILE)
        if IN_TURN:
            s = take_scores(s, 0, rings=rings, state=ahead, k_scale=k_scale, call=call, TILE=TILE)
            acc_o = multiply_values(p_smem, acc_o, n - N, tile.keys, rings, state, TILE)
        else:
            acc_o = multiply_values(p_smem, acc_o, n - N, tile.keys, rings, state, TILE)
            s = take_scores(s, 1, rings=rings, state=ahead, k_scale=k_scale, call=call, TILE=TILE)
        p, alpha, m_i, l_i = online_block(s, m_i, l_i, n, tile, smem, FEATURES)
        p_smem = share(p, n, smem=smem, rings=rings, state=ahead, call=call, TILE=TILE)
        acc_o = end_values(acc_o, alpha, rings=rings, state=state)
        state = ahead
    last = (stop - 1) // N * N
    acc_o = multiply_values(p_smem, acc_o, last, tile.keys, rings, state, TILE)
    acc_o = warpgroup_mma_wait(0, deps=[acc_o])
    release_by_threads(rings.v, state)
    l_i = whole_sums(of_all_warps(sums_of_warps(l_i), smem.sums))
    acc_o = by_rows(acc_o) if TILE.CACHE == "" else in_order(acc_o)
    partial = SplitState(acc_o, in_rows(m_i, O_LAYOUT), in_rows(l_i, O_LAYOUT))
    return advance(state, TILE.STAGES), partial


@gluon.constexpr_function
def output_layout(rows, columns, cache):
    """O as its transpose is left."""
    layout_of = interleaved_accumulator if cache else transposed_accumulator
    return layout_of(rows, columns)


@gluon.jit
def multiply_keys(q_smem, rings, state, no_scores, TILE: gl.constexpr):
    """S^T = K Q^T, (BLOCK_N, BLOCK_M), begun."""
    wait_full(rings.k, state)
    if TILE.CACHE == "":
        if not TILE.BY_TMA:
            fence_async_shared()  # what threads copied, before wgmma reads it
        k_tile = rings.k.buffers.index(state.stage).reshape((TILE.BLOCK_N, TILE.BLOCK_D))
    else:
        k_tile = key_operand(rings.k.buffers.index(state.stage), q_smem.dtype, TILE=TILE)
    return warpgroup_mma(k_tile, q_smem.permute((1, 0)), no_scores, use_acc=False, is_async=True)


@gluon.jit
def take_scores(s, IN_FLIGHT: gl.constexpr, rings, state, k_scale, call, TILE: gl.constexpr):
    """S, (BLOCK_M, BLOCK_N), times what its keys' scales, or one of no use as a factor of the
    exponent, ask for; of products IN_FLIGHT are newer.
    """
    s = by_rows(warpgroup_mma_wait(IN_FLIGHT, deps=[s]))
    if call.scales.k_row is not None:
        scales = rings.k_scales.index(state.stage).load(column_of(s.type.layout))
        s = s * scales[None, :]
    elif call.scales.k is not None:
        if (k_scale > 0.0) == 0:
            s = s * k_scale
    release_by_threads(rings.k, state)
    return s


@gluon.jit
def online_block(s, m_i, l_i, n, tile, smem, FEATURES: gl.constexpr):
    """P of a block from key n on, the factor of what was before, and the new maxima and sums."""
    M: gl.constexpr = s.shape[0]
    N: gl.constexpr = s.shape[1]
    S_LAYOUT: gl.constexpr = s.type.layout
    scale = exp_scale(tile.seq, FEATURES)
    s = scores_of(s, n, tile=tile, FEATURES=FEATURES)
    # Row 64 i + 16 w + j of wgmma is in warp w
    of_warps = gl.max(gl.max(s.reshape([M, N // 64, 4, 16]), 1), 2)
    largest = in_rows(gl.max(of_all_warps(of_warps, smem.maxima), 1), S_LAYOUT)
    m_new = lagging_max(m_i, gl.maximum(m_i, largest * scale))
    p, alpha = exponentials(s, m_i, m_new=m_new, exp_scale=scale, MASKED=True)
    return p, alpha, m_new, add_sums(l_i, alpha, p=p)


@gluon.jit
def share(p, n, smem, rings, state, call, TILE: gl.constexpr):
    """P, times the scales of V's rows, where wgmma reads its right operand. Two blocks alternate,
    as the product of the one before may read still.
    """
    if call.scales.v_row is not None:
        wait_full(rings.v, state)
        scales = rings.v_scales.index(state.stage).load(column_of(p.type.layout))
        p = p * scales[None, :]
    p_smem = smem.probabilities.index(n // TILE.BLOCK_N % 2)
    if p.shape[0] < p_smem.shape[0]:
        p_smem = p_smem.slice(0, p.shape[0])
    p_smem.store(p.to(p_smem.dtype))
    fence_async_shared()  # what threads wrote, before wgmma reads it
    return p_smem


@gluon.jit
def multiply_values(p_smem, acc_o, n, keys, rings, state, TILE: gl.constexpr):
    """O^T += V^T P^T, (BLOCK_DV, BLOCK_M), begun, of the block from key n on."""
    v_tile = wait_values(n, keys, rings=rings, state=state, TILE=TILE)
    if TILE.CACHE == "":
        v_tile = v_tile.permute((1, 0))
    else:
        v_tile = value_operand(rings.v.buffers.index(state.stage), p_smem.dtype, TILE=TILE)
    return warpgroup_mma(v_tile, p_smem.permute((1, 0)), acc_o, is_async=True)


@gluon.jit
def end_values(acc_o, alpha, rings, state):
    """Waits for that product, and multiplies what is there before the next one."""
    acc_o = warpgroup_mma_wait(0, deps=[acc_o])
    release_by_threads(rings.v, state)
    factor = gl.convert_layout(alpha, column_of(acc_o.type.layout), assert_trivial=True)
    return acc_o * factor[None, :]


@gluon.jit
def by_rows(acc):
    """An accumulator's transpose: its registers stay where they are."""
    LAYOUT: gl.constexpr = transposed_accumulator(acc.shape[1], acc.shape[0])
    return gl.convert_layout(acc.permute((1, 0)), LAYOUT, assert_trivial=True)


@gluon.jit
def in_rows(x, layout: gl.constexpr):
    """One number per row, in a slice of this layout of the same rows."""
    return gl.convert_layout(x, row_of(layout), assert_trivial=True)


@gluon.jit
def of_all_warps(x, smem):
    """(BLOCK_M, 4), a number of each warp, where all have them."""
    smem.store(x)
    return smem.load(numbers_of_warps(x.shape[0]))
