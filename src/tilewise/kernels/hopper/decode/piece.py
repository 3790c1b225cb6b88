"""A piece of keys, 64 rows of queries: FlashAttention-2, algorithm 1, block by block in one of two
orders.

    one warpgroup     S, softmax, O += P V: it waits for memory anyway
    two warpgroups    O += P V of this block during the softmax of the next

Both compute the same: the operations on a row, and their order, are those of the first. A row's m
lags behind its maximum (rescale.py), so that most blocks leave O as it is: two warpgroups then skip
the multiplication. Tiles of fewer rows, and caches of 8 bits, see swapped.py.
"""

from typing import Any, NamedTuple

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
from ..compat import barrier
from ..layouts import WARPGROUP_WARPS, accumulator, column_of, row_of
from ..operands import operand, row_factor
from ..pipeline import advance, release_by_threads, wait_full
from ..rescale import lagging_max, rescale, rescale_factors
from .row_sums import add_sums, sums_of_threads, sums_of_warps, whole_sums
from .rows import clear_unused, rows_at
from .work import keys_of, lengths_in


class PieceRows(NamedTuple):
    """What all blocks of a piece have in common."""

    seq: Sequence
    position: gl.tensor  # of queries, (BLOCK_M, 1)
    keys: Any  # that some row of the tile sees
    full: tuple  # that all rows see: blocks within them need no mask


@gluon.jit
def attend_piece(
    work, piece, state, rings, q_smem, call, modifiers,
    FEATURES: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Keys [piece * split_size, (piece + 1) * split_size), as far as the tile sees them."""
    N: gl.constexpr = TILE.BLOCK_N
    DV: gl.constexpr = TILE.BLOCK_DV
    S_LAYOUT: gl.constexpr = accumulator(N)
    O_LAYOUT: gl.constexpr = accumulator(DV)
    tile = open_piece(work, call.numbers, call, modifiers, S_LAYOUT, FEATURES, TILE)
    keys = tile.keys
    no_scores = gl.zeros([64, N], gl.float32, S_LAYOUT)
    acc_o = gl.zeros([64, DV], gl.float32, O_LAYOUT)
    m_i = gl.full([64], float("-inf"), gl.float32, row_of(S_LAYOUT))
    l_i = sums_of_threads(no_scores)
    split_size = call.sizes.split_size
    first, stop = piece_keys(piece * split_size, split_size, keys=keys, BLOCK_N=N)
    if TILE.WARPGROUPS > 1:
        FIRST: gl.constexpr = TILE.BLOCK_D <= 128  # at 192 it would spill more
        # O += P V of a block and S of the next are issued together, and the softmax waits for S
        # alone
        s = multiply_keys(q_smem, rings, state=state, no_scores=no_scores, TILE=TILE)
        s = warpgroup_mma_wait(0, deps=[s])
        release_by_threads(rings.k, state)
        p, _, m_i, l_i = online_block(s, first, m_i, l_i, tile, FEATURES, FIRST)
        p = operand(p.to(rings.v.buffers.dtype), O_LAYOUT)
        for n in range(first + N, stop, N):
            ahead = advance(state, TILE.STAGES)
            s = multiply_keys(q_smem, rings, state=ahead, no_scores=no_scores, TILE=TILE)
            acc_o = multiply_values(p, acc_o, rings=rings, state=state, TILE=TILE)
            s = warpgroup_mma_wait(1, deps=[s])
            release_by_threads(rings.k, ahead)
            s, m_new = block_max(s, n, m_i=m_i, tile=tile, FEATURES=FEATURES, MAXIMA_FIRST=FIRST)
            alpha, grows = rescale_factors(m_i, m_new, start=n, PINNED=True)
            acc_o = warpgroup_mma_wait(0, deps=[acc_o])
            release_by_threads(rings.v, state)
            acc_o = rescale(acc_o, row_factor(alpha, O_LAYOUT), row_factor(grows, O_LAYOUT))
            p, _ = exponentials(s, m_i, m_new, exp_scale(tile.seq, FEATURES), True)
            m_i, l_i = m_new, add_sums(l_i, alpha, p=p)
            p = operand(p.to(rings.v.buffers.dtype), O_LAYOUT)
            state = ahead
        acc_o = multiply_values(p, acc_o, rings=rings, state=state, TILE=TILE)
        acc_o = warpgroup_mma_wait(0, deps=[acc_o])
        release_by_threads(rings.v, state)
        state = advance(state, TILE.STAGES)
    else:
        for n in range(first, stop, N):
            s = multiply_keys(q_smem, rings, state=state, no_scores=no_scores, TILE=TILE)
            s = warpgroup_mma_wait(0, deps=[s])
            release_by_threads(rings.k, state)
            p, alpha, m_i, l_i = online_block(s, n, m_i, l_i, tile, FEATURES)
            acc_o = acc_o * row_factor(alpha, O_LAYOUT)[:, None]
            v_tile = wait_values(n, keys, rings=rings, state=state, TILE=TILE)
            acc_o = add_values(operand(p.to(v_tile.dtype), O_LAYOUT), v_tile, acc_o, rings, state)
            state = advance(state, TILE.STAGES)
    m_i = row_factor(m_i, O_LAYOUT)
    l_i = row_factor(whole_sums(sums_of_warps(l_i)), O_LAYOUT)
    return state, SplitState(acc_o, m_i, l_i=l_i)


@gluon.jit
def open_piece(
    work, numbers, call, modifiers, S_LAYOUT: gl.constexpr,
    FEATURES: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """The rows of a tile whose scores have this layout, and the keys that they see."""
    rows = rows_at(work, gl.arange(0, TILE.BLOCK_M, row_of(S_LAYOUT)), FEATURES=FEATURES, TILE=TILE)
    slope = load_slope(call.optionals, work.batch, head=rows.head[:, None], FEATURES=FEATURES)
    head = rows.head[:, None]
    seq = Sequence(lengths_in(work), slope, numbers, work.batch, head, modifiers, 0)
    position = (work.seqlen_k - work.seqlen_q + rows.token)[:, None]
    keys = keys_of(work, call, FEATURES=FEATURES, ROWS=TILE.ROWS)
    return PieceRows(seq, position, keys=keys, full=keys_of_all(work, keys, call, FEATURES))


@gluon.jit
def multiply_keys(q_smem, rings, state, no_scores, TILE: gl.constexpr):
    """S = Q K^T, (64, BLOCK_N), begun."""
    wait_full(rings.k, state)
    if not TILE.BY_TMA:
        fence_async_shared()  # what threads copied, before wgmma reads it
    k_tile = rings.k.buffers.index(state.stage).reshape((TILE.BLOCK_N, TILE.BLOCK_D))
    k_tile = k_tile.permute((1, 0))
    return warpgroup_mma(q_smem, k_tile, no_scores, use_acc=False, is_async=True)


@gluon.jit
def online_block(s, n, m_i, l_i, tile, FEATURES: gl.constexpr, MAXIMA_FIRST: gl.constexpr = False):
    """P of a block from key n on, the factor of what was before, and the new maxima and sums."""
    s, m_new = block_max(s, n, m_i=m_i, tile=tile, FEATURES=FEATURES, MAXIMA_FIRST=MAXIMA_FIRST)
    p, alpha = exponentials(s, m_i, m_new, exp_scale(tile.seq, FEATURES), True)
    return p, alpha, m_new, add_sums(l_i, alpha, p=p)


@gluon.jit
def block_max(s, n, m_i, tile, FEATURES: gl.constexpr, MAXIMA_FIRST: gl.constexpr):
    """The scores of a block from key n on, masked, and the m to go on with.

    MAXIMA_FIRST: the maxima are taken in both branches. What stands behind a branch stays there, so
    that ptxas takes the maxima of a thread's two rows beside each other; else it begins with all of
    the one row. Two warpgroups of a chunk gain 3 % by that.
    """
    scale = exp_scale(tile.seq, FEATURES)
    if MAXIMA_FIRST:
        s, k_idx = unmasked(s, n, tile=tile, FEATURES=FEATURES)
        if is_partial(s, n, tile=tile, FEATURES=FEATURES):
            s = hide(s, tile.position, k_idx, tile.keys, tile.seq, FEATURES)
            m_new = running_max(s, m_i, exp_scale=scale)
        else:
            m_new = running_max(s, m_i, exp_scale=scale)
    else:
        s = scores_of(s, n, tile=tile, FEATURES=FEATURES)
        m_new = running_max(s, m_i, exp_scale=scale)
    return s, lagging_max(m_i, m_new)


@gluon.jit
def scores_of(qk, n, tile, FEATURES: gl.constexpr):
    """The scores of a block from key n on, masked where it needs that."""
    s, k_idx = unmasked(qk, n, tile=tile, FEATURES=FEATURES)
    if is_partial(s, n, tile=tile, FEATURES=FEATURES):
        s = hide(s, tile.position, k_idx=k_idx, keys=tile.keys, seq=tile.seq, FEATURES=FEATURES)
    return s


@gluon.jit
def unmasked(qk, n, tile, FEATURES: gl.constexpr):
    """The scores of a block from key n on, and the positions of its keys."""
    k_idx = (n + gl.arange(0, qk.shape[1], column_of(qk.type.layout)))[None, :]
    return score(qk, tile.position, k_idx=k_idx, seq=tile.seq, FEATURES=FEATURES).s, k_idx


@gluon.jit
def is_partial(s, n, tile, FEATURES: gl.constexpr):
    """Whether a block from key n on needs a mask."""
    if FEATURES.MASK_MOD is not None:
        return True
    else:
        return (n < tile.full[0]) | (n + s.shape[1] > tile.full[1])


@gluon.jit
def wait_values(n, keys, rings, state, TILE: gl.constexpr):
    """V, (BLOCK_N, BLOCK_DV), once it is there."""
    N: gl.constexpr = TILE.BLOCK_N
    wait_full(rings.v, state)
    if not TILE.BY_TMA and TILE.CACHE == "":
        fence_async_shared()
    v_tile = rings.v.buffers.index(state.stage).reshape((N, TILE.BLOCK_DV))
    if (n < keys.first) | (n + N > keys.last):
        clear_unused(v_tile, n, keys=keys, ROWS=32, WARPS=WARPGROUP_WARPS, TILE=TILE)
        if TILE.CACHE != "":
            barrier()  # here, so that threads which read other blocks do not wait for each other
    return v_tile


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
    keep = seen_by_position(keep, q_idx, k_idx=k_idx, seq=seq, FEATURES=FEATURES)
    return gl.where(keep, s, float("-inf"))
