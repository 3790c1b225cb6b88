"""A tile of keys into the state of a tile of queries: FlashAttention-2, algorithm 1.

A row's l is many sums, each of one thread's keys, until its piece ends, so that threads exchange
nothing but maxima. Then sums of two numbers follow, which have no order: that of `tl.sum` is the
compiler's choice of a layout, another one in another kernel. So a row's bits are the same in all.
"""

import triton
import triton.language as tl

from ...tile.mask import seen_by_position
from ...tile.score import exp_scale, score
from ...tile.softmax import exponentials, running_max
from ...tile.splits import SplitState


@triton.jit
def attend(state, q_tile, k_tile, v_tile, rows, keys, cache, scales, FEATURES: tl.constexpr):
    """`keys` are positions, and which are in use."""
    k_idx, keep = keys
    qk = multiply(q_tile, k_tile, FEATURES)
    if cache.k_scale is not None:
        qk = qk * scales[0]
    q_idx = rows.position[:, None]
    s = score(qk, q_idx, k_idx, rows.seq, FEATURES).s
    keep = seen_by_position(keep, q_idx, k_idx, rows.seq, FEATURES)
    s = tl.where(keep, s, float("-inf"))
    scale = exp_scale(rows.seq, FEATURES)
    m_i = running_max(s, state.m_i, scale)
    p, alpha = exponentials(s, state.m_i, m_i, scale, True)
    l_i = state.l_i * beside_sums(alpha, p.shape[1]) + sums_of_threads(p)
    if len(q_tile.shape) == 3:
        acc_o = tl.dot(p, v_tile, input_precision=FEATURES.PRECISION)
        acc_o = tl.fma(state.acc_o, alpha[:, None], acc_o)
    else:
        acc_o = state.acc_o * alpha[:, None]
        if cache.v_scale is not None:
            if cache.v_scale_row is not None:
                p = p * scales[1]
        acc_o = tl.dot(p.to(v_tile.dtype), v_tile, acc_o, input_precision=FEATURES.PRECISION)
    return SplitState(acc_o, m_i, l_i)


@triton.jit
def sums_of_threads(p):
    """(BLOCK_M, BLOCK_N // 4), each of two neighbours and of those half a tile on, which a thread
    has in an accumulator.
    """
    halves = tl.sum(tl.reshape(p, (p.shape[0], 2, p.shape[1] // 2)), 1)
    return tl.sum(tl.reshape(halves, (p.shape[0], p.shape[1] // 4, 2)), 2)


@triton.jit
def beside_sums(alpha, BLOCK_N: tl.constexpr):
    """A row's factor for each of its sums. It takes their way, by maxima of two equal numbers that
    are no instruction: else Triton (3.6) moves sums through shared memory to where it is.
    """
    BLOCK_M: tl.constexpr = alpha.shape[0]
    x = tl.broadcast_to(alpha[:, None], (BLOCK_M, BLOCK_N))
    halves = tl.max(tl.reshape(x, (BLOCK_M, 2, BLOCK_N // 2)), 1)
    return tl.max(tl.reshape(halves, (BLOCK_M, BLOCK_N // 4, 2)), 2)


@triton.jit
def spread_sums(states, BLOCK_N: tl.constexpr):
    """The states without keys, with a row's sums apart, (BLOCK_M, BLOCK_N // 4)."""
    spread = ()
    for i in tl.static_range(len(states)):
        acc_o, m_i, l_i = states[i]
        spread = spread + (
            SplitState(acc_o, m_i, tl.zeros([l_i.shape[0], BLOCK_N // 4], tl.float32)),
        )
    return spread


@triton.jit
def add_sums(states):
    """With one sum again."""
    summed = ()
    for i in tl.static_range(len(states)):
        acc_o, m_i, l_i = states[i]
        summed = summed + (SplitState(acc_o, m_i, sums_in_pairs(l_i)),)
    return summed


@triton.constexpr_function
def halvings(n):
    """How often n, a power of 2, is halved until it is 1."""
    return n.bit_length() - 1


@triton.jit
def sums_in_pairs(x):
    """The sum of each row, pair by pair, (BLOCK_M,)."""
    for _ in tl.static_range(halvings(x.shape[1])):
        x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def multiply(q_tile, k_tile, FEATURES: tl.constexpr):
    """S = Q K^T; each chunk has a sum of its own, and these are added in pairs."""
    if len(q_tile.shape) == 2:
        return tl.dot(q_tile, tl.trans(k_tile), input_precision=FEATURES.PRECISION)
    else:
        k_tile = tl.permute(k_tile, (0, 2, 1))
        qk = tl.dot(q_tile, k_tile, input_precision=FEATURES.PRECISION)
        for _ in tl.static_range(halvings(qk.shape[0])):
            qk = tl.sum(tl.reshape(qk, (2, qk.shape[0] // 2, qk.shape[1], qk.shape[2])), 0)
        return tl.reshape(qk, (qk.shape[1], qk.shape[2]))
