"""The FP8 forward's inner step: one tile of queries and one of keys.

K's rows are read in the order that V^T has its columns in, so that the columns of S, and of P, are
those of V^T without a move: masks and ALiBi take the position of each column's key.

P is 2^8 times itself: e4m3 then keeps probabilities down to 2^-17 of the row's largest. The row's
state has the running maximum less 8, so that sums, rescaling, sinks and the lse need no correction.

P V of a block is a product of its own, which is added to O in fp32. NVIDIA's tensor cores keep some
14 bits of what 8-bit products are added to: summing O there, as FlashAttention-3 does, loses 18 %
of it at 16Ki keys where V has a mean of 1 (DeepSeek-V3, arXiv 2412.19437, section 3.5.2).
"""

import triton
import triton.language as tl

from ...tile.fp8 import dequantize
from ...tile.mask import apply_mask
from ...tile.score import exp_scale, score
from ...tile.softmax import exponentials, running_max
from ..common.io import HeadRows, load_rows
from .fp8_order import key_of_column
from .step import RowState

TOP = tl.constexpr(8.0)  # log2 of the largest P


@triton.jit
def attend_fp8(
    state,
    q,
    k_rows,
    v_rows,
    n_start,
    m_start,
    seq,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys into the state; rows of V^T are the dims of a head, from key 0 on."""
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    D: tl.constexpr = FEATURES.HEADDIM
    DV: tl.constexpr = FEATURES.HEADDIM_V
    order = key_of_column(tl.arange(0, BLOCK_N))
    k_tile = operand(load_keys(k_rows, n_start, order, D, TILE.BLOCK_D, MASKED))
    # S = Q K^T: (BLOCK_M, BLOCK_N)
    qk = tl.dot(q, tl.trans(k_tile))
    q_idx = m_start + tl.arange(0, TILE.BLOCK_M)[:, None]
    k_idx = n_start + order[None, :]
    s = score(qk, q_idx, k_idx, seq, FEATURES).s
    if MASKED:
        s = apply_mask(s, q_idx, k_idx, seq, FEATURES)
    factor = exp_scale(seq, FEATURES)
    m_i = running_max(s, state.m_i + TOP, factor) - TOP
    p, alpha = exponentials(s, state.m_i, m_i, factor, MASKED)
    l_i = state.l_i * alpha + tl.sum(p, 1)
    of_block = HeadRows(v_rows.ptr + n_start, v_rows.stride, v_rows.limit)
    IS_PADDED: tl.constexpr = DV != TILE.BLOCK_DV
    v_tile = operand(load_rows(of_block, 0, TILE.BLOCK_DV, BLOCK_N, BLOCK_N, False, IS_PADDED))
    # O = diag(alpha) O + P V. A bound on imprecise sums, BLOCK_N being no bound at all, keeps
    # Triton from making the product and the sum one
    pv = tl.dot(p.to(v_tile.dtype), tl.trans(v_tile), max_num_imprecise_acc=BLOCK_N)
    return RowState(state.acc_o * alpha[:, None] + pv, m_i, l_i)


@triton.jit
def load_keys(source, start, order, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECKED: tl.constexpr):
    """Rows start + order as a tile; unless CHECKED, the caller knows that all of them exist."""
    columns = tl.arange(0, BLOCK_D)
    ptrs = (
        source.ptr
        + tl.cast(start, tl.int64) * source.stride
        + (order.to(tl.int64)[:, None] * source.stride + columns[None, :])
    )
    if CHECKED and D == BLOCK_D:
        return tl.load(ptrs, mask=(start + order < source.limit)[:, None], other=0.0)
    elif CHECKED:
        exists = (start + order < source.limit)[:, None] & (columns < D)[None, :]
        return tl.load(ptrs, mask=exists, other=0.0)
    elif D != BLOCK_D:
        return tl.load(ptrs, mask=(columns < D)[None, :], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def operand(tile):
    """A tile as an operand: e4m3 as it is; bits of e4m3, for GPUs that have no product of it, in
    bfloat16, which has all its values.
    """
    if tile.dtype == tl.uint8:
        return dequantize(tile, tl.bfloat16)
    else:
        return tile
