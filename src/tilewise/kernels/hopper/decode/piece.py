"""A piece of keys, block by block: FlashAttention-2, algorithm 1, in one of three orders.

    16 bits, one warpgroup     S, softmax, O += P V: it waits for memory anyway
    8 bits                     S of the next block during the softmax of this one
    16 bits, two warpgroups    O += P V of this block during the softmax of the next

All compute the same: the operations on a row, and their order, are those of the first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....tile.mask import seen_by_position
from ....tile.score import exp_scale, load_slope, score
from ....tile.softmax import exponentials, running_max
from ....tile.splits import SplitState, piece_keys
from ....tile.types import Sequence
from ..layouts import accumulator, column_of, row_of
from ..operands import add_sums, operand, row_factor, row_sums, whole_sums
from ..pipeline import advance, release_by_threads, wait_full
from ..rescale import pinned
from .rows import clear_unused, rows_at
from .scales import times_scale
from .work import keys_of, lengths_in


@gluon.jit
def attend_piece(
    work, piece, state, rings, q_smem, k_scale, call, modifiers,
    FEATURES: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Keys [piece * split_size, (piece + 1) * split_size), as far as the tile sees them."""
    N: gl.constexpr = TILE.BLOCK_N
    DV: gl.constexpr = TILE.BLOCK_DV
    S_LAYOUT: gl.constexpr = accumulator(N)
    O_LAYOUT: gl.constexpr = accumulator(DV)
    rows = rows_at(work, gl.arange(0, 64, row_of(S_LAYOUT)), FEATURES)
    slope = load_slope(call.optionals, work.batch, rows.head[:, None], FEATURES)
    lengths = lengths_in(work)
    numbers = call.numbers
    if call.scales.k is not None and call.scales.k_row is None:
        numbers = times_scale(numbers, gl.where(k_scale > 0.0, k_scale, 1.0))
    seq = Sequence(lengths, slope, numbers, work.batch, rows.head[:, None], modifiers, 0)
    position = (work.seqlen_k - work.seqlen_q + rows.token)[:, None]
    keys = keys_of(work, call, FEATURES, TILE.ROWS)
    full = keys_of_all(work, keys, call, FEATURES)
    no_scores = gl.zeros([64, N], gl.float32, S_LAYOUT)
    acc_o = gl.zeros([64, DV], gl.float32, O_LAYOUT)
    m_i = gl.full([64], float("-inf"), gl.float32, row_of(S_LAYOUT))
    l_i = row_sums(no_scores)
    split_size = call.sizes.split_size
    first, stop = piece_keys(piece * split_size, split_size, keys, N)
    if TILE.WARPGROUPS > 1:
        # O += P V of a block and S of the next are issued together, and the softmax waits for S
        # alone
        s = multiply_keys(q_smem, rings, state, no_scores, TILE)
        s = warpgroup_mma_wait(0, deps=[s])
        release_by_threads(rings.k, state)
        p, _, m_i, l_i = online_block(s, first, m_i, l_i, position, keys, full, seq, FEATURES)
        p = operand(p.to(rings.v.buffers.dtype), O_LAYOUT)
        for n in range(first + N, stop, N):
            ahead = advance(state, TILE.STAGES)
            s = multiply_keys(q_smem, rings, ahead, no_scores, TILE)
            acc_o = multiply_values(p, acc_o, rings, state, TILE)
            s = warpgroup_mma_wait(1, deps=[s])
            release_by_threads(rings.k, ahead)
            p, alpha, m_i, l_i = online_block(s, n, m_i, l_i, position, keys, full, seq, FEATURES)
            alpha = pinned(alpha)
            acc_o = warpgroup_mma_wait(0, deps=[acc_o])
            release_by_threads(rings.v, state)
            acc_o = acc_o * row_factor(alpha, O_LAYOUT)[:, None]
            p = operand(p.to(rings.v.buffers.dtype), O_LAYOUT)
            state = ahead
        acc_o = multiply_values(p, acc_o, rings, state, TILE)
        acc_o = warpgroup_mma_wait(0, deps=[acc_o])
        release_by_threads(rings.v, state)
        state = advance(state, TILE.STAGES)
    elif TILE.CACHE == "":
        for n in range(first, stop, N):
            s = multiply_keys(q_smem, rings, state, no_scores, TILE)
            s = warpgroup_mma_wait(0, deps=[s])
            release_by_threads(rings.k, state)
            p, alpha, m_i, l_i = online_block(s, n, m_i, l_i, position, keys, full, seq, FEATURES)
            acc_o = acc_o * row_factor(alpha, O_LAYOUT)[:, None]
            v_tile = wait_values(n, keys, rings, state, TILE)
            p = to_operand(p, v_tile, rings, state, call, TILE)
            acc_o = add_values(p, v_tile, acc_o, rings, state)
            state = advance(state, TILE.STAGES)
    else:
        # The tensor cores have the next S to compute during the softmax of this one: conversion
        # leaves one warpgroup half the time that 16 bits do
        s = multiply_keys(q_smem, rings, state, no_scores, TILE)
        s = take_scores(s, rings, state, k_scale, call, TILE)
        for n in range(first, stop - N, N):
            ahead = advance(state, TILE.STAGES)
            following = multiply_keys(q_smem, rings, ahead, no_scores, TILE)
            p, alpha, m_i, l_i = online_block(s, n, m_i, l_i, position, keys, full, seq, FEATURES)
            acc_o = acc_o * row_factor(alpha, O_LAYOUT)[:, None]
            v_tile = wait_values(n, keys, rings, state, TILE)
            p = to_operand(p, v_tile, rings, state, call, TILE)
            s = take_scores(following, rings, ahead, k_scale, call, TILE)
            acc_o = add_values(p, v_tile, acc_o, rings, state)
            state = ahead
        n = first + (stop - first - 1) // N * N
        p, alpha, m_i, l_i = online_block(s, n, m_i, l_i, position, keys, full, seq, FEATURES)
        acc_o = acc_o * row_factor(alpha, O_LAYOUT)[:, None]
        v_tile = wait_values(n, keys, rings, state, TILE)
        p = to_operand(p, v_tile, rings, state, call, TILE)
        acc_o = add_values(p, v_tile, acc_o, rings, state)
        state = advance(state, TILE.STAGES)
    m_i = row_factor(m_i, O_LAYOUT)
    return state, SplitState(acc_o, m_i, whole_sums(l_i, row_of(O_LAYOUT)))


@gluon.jit
def multiply_keys(q_smem, rings, state, no_scores, TILE: gl.constexpr):
    """S = Q K^T, (64, BLOCK_N), begun."""
    wait_full(rings.k, state)
    if not TILE.BY_TMA and TILE.CACHE == "":
        fence_async_shared()  # what threads copied, before wgmma reads it
    k_tile = rings.k.buffers.index(state.stage).reshape((TILE.BLOCK_N, TILE.BLOCK_D))
    k_tile = k_tile.permute((1, 0))
    return warpgroup_mma(q_smem, k_tile, no_scores, use_acc=False, is_async=True)


@gluon.jit
def take_scores(s, rings, state, k_scale, call, TILE: gl.constexpr):
    """S of a cache of 8 bits, times what its rows' scales, or one of no use as a factor of the
    exponent, ask for.
    """
    S_LAYOUT: gl.constexpr = accumulator(TILE.BLOCK_N)
    s = warpgroup_mma_wait(0, deps=[s])
    if call.scales.k_row is not None:
        scales = rings.k_scales.index(state.stage).load(column_of(S_LAYOUT))
        s = s * scales[None, :]
    elif call.scales.k is not None:
        if (k_scale > 0.0) == 0:
            s = s * k_scale
    release_by_threads(rings.k, state)
    return s


@gluon.jit
def online_block(s, n, m_i, l_i, position, keys, full, seq, FEATURES: gl.constexpr):
    """P of a block from key n on, the factor of what was before, and the new maxima and sums."""
    N: gl.constexpr = s.shape[1]
    S_LAYOUT: gl.constexpr = accumulator(N)
    scale = exp_scale(seq, FEATURES)
    k_idx = (n + gl.arange(0, N, column_of(S_LAYOUT)))[None, :]
    s = score(s, position, k_idx, seq, FEATURES).s
    is_partial = (n < full[0]) | (n + N > full[1])
    if FEATURES.MASK_MOD is not None:
        is_partial = True
    if is_partial:
        s = hide(s, position, k_idx, keys, seq, FEATURES)
    m_new = running_max(s, m_i, scale)
    p, alpha = exponentials(s, m_i, m_new, scale, True)
    l_i = add_sums(l_i, alpha, p)
    return p, alpha, m_new, l_i


@gluon.jit
def wait_values(n, keys, rings, state, TILE: gl.constexpr):
    """V, (BLOCK_N, BLOCK_DV), once it is there."""
    N: gl.constexpr = TILE.BLOCK_N
    wait_full(rings.v, state)
    if not TILE.BY_TMA and TILE.CACHE == "":
        fence_async_shared()
    v_tile = rings.v.buffers.index(state.stage).reshape((N, TILE.BLOCK_DV))
    if TILE.CACHE == "":
        if (n < keys.first) | (n + N > keys.last):
            clear_unused(v_tile, n, keys, 32, 4, TILE)
    return v_tile


@gluon.jit
def to_operand(p, v_tile, rings, state, call, TILE: gl.constexpr):
    """P, times the scales of V's rows, as wgmma's left operand."""
    S_LAYOUT: gl.constexpr = accumulator(TILE.BLOCK_N)
    O_LAYOUT: gl.constexpr = accumulator(TILE.BLOCK_DV)
    if call.scales.v_row is not None:
        scales = rings.v_scales.index(state.stage).load(column_of(S_LAYOUT))
        p = p * scales[None, :]
    return operand(p.to(v_tile.dtype), O_LAYOUT)


@gluon.jit
def add_values(p, v_tile, acc_o, rings, state):
    """O += P V: (64, BLOCK_DV)."""
    acc_o = warpgroup_mma(p, v_tile, acc_o, is_async=True)
    acc_o = warpgroup_mma_wait(0, deps=[acc_o])
    release_by_threads(rings.v, state)
    return acc_o


@gluon.jit
def multiply_values(p, acc_o, rings, state, TILE: gl.constexpr):
    """O += P V, (64, BLOCK_DV), begun."""
    wait_full(rings.v, state)
    if not TILE.BY_TMA:
        fence_async_shared()
    v_tile = rings.v.buffers.index(state.stage).reshape((TILE.BLOCK_N, TILE.BLOCK_DV))
    return warpgroup_mma(p, v_tile, acc_o, is_async=True)


@gluon.jit
def keys_of_all(work, keys, call, FEATURES: gl.constexpr):
    """The keys that all rows of a tile see: blocks within them need no mask."""
    diagonal = work.seqlen_k - work.seqlen_q
    first, stop = keys.first, keys.last
    if FEATURES.LEFT:
        first = gl.maximum(first, work.seqlen_k - 1 - call.numbers.left)
    if FEATURES.RIGHT:
        stop = gl.minimum(stop, diagonal + work.start + call.numbers.right + 1)
    return first, stop


@gluon.jit
def hide(s, q_idx, k_idx, keys, seq, FEATURES: gl.constexpr):
    """Scores of pairs that may not see each other, or of keys that are not in use, become -inf."""
    keep = (k_idx >= keys.first) & (k_idx < keys.last)
    keep = seen_by_position(keep, q_idx, k_idx, seq, FEATURES)
    return gl.where(keep, s, float("-inf"))
