"""The forward's inner step: one tile of queries and one tile of keys. The backward's recomputation
is in kernels/common/bwd_step.py.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...tile.dropout import keep_mask
from ...tile.mask import apply_mask
from ...tile.score import exp_scale, score
from ...tile.softmax import natural_step, online_step
from ..common.io import load_rows


class RowState(NamedTuple):
    """The state of a tile of queries in the loop over keys: unnormalised output, running maximum
    (base 2, or natural: `natural_step`) and running sum.
    """

    acc_o: tl.tensor  # (BLOCK_M, BLOCK_DV)
    m_i: tl.tensor  # (BLOCK_M,)
    l_i: tl.tensor


@triton.jit
def attend(
    state,
    q,
    k,
    v,
    n_start,
    m_start,
    seq,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys into the state (k and v: opened)."""
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    D: tl.constexpr = FEATURES.HEADDIM
    DV: tl.constexpr = FEATURES.HEADDIM_V
    k_tile = load_rows(k, n_start, BLOCK_N, D, TILE.BLOCK_D, TILE.DESCRIPTORS, MASKED)
    # S = Q K^T: (BLOCK_M, BLOCK_N)
    qk = tl.dot(q, tl.trans(k_tile), input_precision=FEATURES.PRECISION)
    offs_m, offs_n = tl.arange(0, TILE.BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    q_idx, k_idx = m_start + offs_m, n_start + offs_n
    s = score(qk, q_idx, k_idx, seq, FEATURES).s
    if MASKED:
        s = apply_mask(s, q_idx, k_idx, seq, FEATURES)
    if FEATURES.NATURAL:
        step = natural_step(s, state.m_i, state.l_i)
    else:
        step = online_step(s, state.m_i, state.l_i, exp_scale(seq, FEATURES), MASKED)
    p = step.p
    if FEATURES.DROPOUT:
        threshold = seq.numbers.dropout_threshold
        p = tl.where(keep_mask(seq.stream, m_start, n_start, offs_m, offs_n, threshold), p, 0.0)
    v_tile = load_rows(v, n_start, BLOCK_N, DV, TILE.BLOCK_DV, TILE.DESCRIPTORS, MASKED)
    # O = diag(alpha) O + P V
    acc_o = state.acc_o * step.alpha[:, None]
    acc_o = tl.dot(p.to(v_tile.dtype), v_tile, acc_o, input_precision=FEATURES.PRECISION)
    return RowState(acc_o, step.m_i, step.l_i)
