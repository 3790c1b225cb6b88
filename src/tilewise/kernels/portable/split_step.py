"""A tile of keys into the state of a tile of queries.

Rows are few and keys many: where it pays (`is_swapped`) the products are S^T = K Q^T and
O^T += V^T P^T, whose rows are keys and columns of V.
"""

import triton
import triton.language as tl
from triton.language.target_info import current_target

from ...tile.mask import seen_by_position
from ...tile.score import exp_scale, score
from ...tile.softmax import exponentials, running_max
from ...tile.splits import SplitState


@triton.constexpr_function
def is_swapped(BLOCK_M, BLOCK_N, dtype, cache_dtype):
    """Whether keys, and columns of V, are the rows of products. Hopper's wgmma has 64 of them, and
    reads K and V from where they were copied to; other instructions have 16, and V as rows would
    not be copied ahead (Triton 3.6). The interpreter takes it, too.
    """
    if dtype != cache_dtype or dtype.primitive_bitwidth != 16 or BLOCK_M >= 64 or BLOCK_N < 64:
        return False
    target = current_target()
    return target is None or (target.backend == "cuda" and target.arch // 10 == 9)


@triton.jit
def spread_sums(states, SUMS: tl.constexpr):
    """Those of no keys, with l_i in SUMS sums."""
    found = ()
    for i in tl.static_range(len(states)):
        acc_o, m_i, l_i = states[i]
        l_i = tl.zeros([l_i.shape[0], SUMS], tl.float32)
        found = found + (SplitState(acc_o, m_i, l_i),)
    return found


@triton.jit
def add_sums(states):
    """With l_i in one sum again."""
    found = ()
    for i in tl.static_range(len(states)):
        acc_o, m_i, l_i = states[i]
        found = found + (SplitState(acc_o, m_i, tl.sum(l_i, 1)),)
    return found


@triton.jit
def attend(
    state, q_tile, k_tile, v_tile, rows, keys, cache, scales,
    FEATURES: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    """A tile of keys into the state of a tile of queries; `keys` are positions, and which are in
    use.
    """
    k_idx, keep = keys
    qk = multiply(q_tile, k_tile, FEATURES, SWAPPED)
    if cache.k_scale is not None:
        qk = qk * scales[0]
    q_idx = rows.position[:, None]
    s = score(qk, q_idx, k_idx, rows.seq, FEATURES).s
    keep = seen_by_position(keep, q_idx, k_idx, rows.seq, FEATURES)
    s = tl.where(keep, s, float("-inf"))
    factor = exp_scale(rows.seq, FEATURES)
    m_i = running_max(s, state.m_i, factor)
    p, alpha = exponentials(s, state.m_i, m_i, factor, True)
    l_i = state.l_i * alpha[:, None] + sums_of(p, SWAPPED)
    if len(q_tile.shape) == 3:
        acc_o = tl.dot(p, v_tile, input_precision=FEATURES.PRECISION)
        acc_o = tl.fma(state.acc_o, alpha[:, None], acc_o)
    else:
        acc_o = state.acc_o * alpha[:, None]
        if cache.v_scale is not None:
            if cache.v_scale_row is not None:
                p = p * scales[1]
        p = p.to(v_tile.dtype)
        if SWAPPED:
            acc_o = tl.trans(tl.dot(tl.trans(v_tile), tl.trans(p), tl.trans(acc_o)))
        else:
            acc_o = tl.dot(p, v_tile, acc_o, input_precision=FEATURES.PRECISION)
    return SplitState(acc_o, m_i, l_i)


@triton.jit
def sums_of(p, SWAPPED: tl.constexpr):
    """(BLOCK_M, 1); SWAPPED of keys that are 8 apart, (BLOCK_M, BLOCK_N // 2): those which a thread
    has. Then threads exchange sums once a piece, and not for each tile of keys.
    """
    if SWAPPED:
        BLOCK_M: tl.constexpr = p.shape[0]
        BLOCK_N: tl.constexpr = p.shape[1]
        pairs = tl.reshape(p, (BLOCK_M, BLOCK_N // 16, 2, 8))
        return tl.reshape(tl.sum(pairs, 2), (BLOCK_M, BLOCK_N // 2))
    else:
        return tl.sum(p, 1)[:, None]


@triton.jit
def multiply(q_tile, k_tile, FEATURES: tl.constexpr, SWAPPED: tl.constexpr):
    """S = Q K^T; each chunk has a sum of its own."""
    if SWAPPED:
        return tl.trans(tl.dot(k_tile, tl.trans(q_tile)))
    elif len(q_tile.shape) == 2:
        return tl.dot(q_tile, tl.trans(k_tile), input_precision=FEATURES.PRECISION)
    else:
        k_tile = tl.permute(k_tile, (0, 2, 1))
        return tl.sum(tl.dot(q_tile, k_tile, input_precision=FEATURES.PRECISION), 0)
