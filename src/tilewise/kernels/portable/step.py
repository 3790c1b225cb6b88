"""What happens between one tile of queries and one tile of keys: the forward update, and the
backward's recomputation.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...tile.gradient import probabilities, score_gradient
from ...tile.mask import apply_mask
from ...tile.score import score, unit
from ...tile.softmax import online_step
from ..io import load_rows


class RowState(NamedTuple):
    """A tile of queries on its way over the keys: unnormalised output, running maximum (base 2) and
    running sum.
    """

    acc_o: tl.tensor  # (BLOCK_M, BLOCK_DV)
    m_i: tl.tensor  # (BLOCK_M,)
    l_i: tl.tensor


class Recomputed(NamedTuple):
    """A tile of probabilities, and of the gradient of scale * q k^T."""

    p: tl.tensor
    ds: tl.tensor


@triton.jit
def attend(
    state,
    q,
    k,
    v,
    n_start,
    q_idx,
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
    k_idx = n_start + tl.arange(0, BLOCK_N)
    s = score(qk, q_idx[:, None], k_idx[None, :], seq, FEATURES).s
    if MASKED:
        s = apply_mask(s, q_idx[:, None], k_idx[None, :], seq, FEATURES)
    step = online_step(s, state.m_i, state.l_i, unit(seq, FEATURES), MASKED)
    v_tile = load_rows(v, n_start, BLOCK_N, DV, TILE.BLOCK_DV, TILE.DESCRIPTORS, MASKED)
    # O = diag(alpha) O + P V
    acc_o = state.acc_o * step.alpha[:, None]
    acc_o = tl.dot(step.p.to(v_tile.dtype), v_tile, acc_o, input_precision=FEATURES.PRECISION)
    return RowState(acc_o, step.m_i, step.l_i)


@triton.jit
def recompute(
    qk,
    dp,
    lse,
    delta,
    q_idx,
    k_idx,
    seq,
    FEATURES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """P = exp(S - lse) and dS = P (dP - delta), times the score's derivative.

    All arguments are shaped to broadcast over the tile, so that the same lines serve S and its
    transpose. lse is in base 2.
    """
    scored = score(qk, q_idx, k_idx, seq, FEATURES)
    p = probabilities(scored.s, -lse, q_idx, k_idx, seq, FEATURES, MASKED)
    return Recomputed(p, score_gradient(p, dp - delta, scored.derivative))
