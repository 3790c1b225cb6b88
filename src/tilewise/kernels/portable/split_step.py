"""A tile of keys into the state of a tile of queries: FlashAttention-2, algorithm 1."""

import triton
import triton.language as tl

from ...tile.mask import seen_by_position
from ...tile.score import exp_scale, score
from ...tile.softmax import online_step
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
    step = online_step(s, state.m_i, state.l_i, exp_scale(rows.seq, FEATURES), True)
    if len(q_tile.shape) == 3:
        acc_o = tl.dot(step.p, v_tile, input_precision=FEATURES.PRECISION)
        acc_o = tl.fma(state.acc_o, step.alpha[:, None], acc_o)
    else:
        acc_o = state.acc_o * step.alpha[:, None]
        p = step.p
        if cache.v_scale is not None:
            if cache.v_scale_row is not None:
                p = p * scales[1]
        acc_o = tl.dot(p.to(v_tile.dtype), v_tile, acc_o, input_precision=FEATURES.PRECISION)
    return SplitState(acc_o, step.m_i, step.l_i)


@triton.jit
def multiply(q_tile, k_tile, FEATURES: tl.constexpr):
    """S = Q K^T; each chunk has a sum of its own."""
    if len(q_tile.shape) == 2:
        return tl.dot(q_tile, tl.trans(k_tile), input_precision=FEATURES.PRECISION)
    else:
        k_tile = tl.permute(k_tile, (0, 2, 1))
        return tl.sum(tl.dot(q_tile, k_tile, input_precision=FEATURES.PRECISION), 0)
