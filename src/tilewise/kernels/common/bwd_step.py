"""The backward's recomputation for one tile of queries and one tile of keys."""

from typing import NamedTuple

import triton
import triton.language as tl

from ...tile.dropout import keep_mask
from ...tile.gradient import probabilities
from ...tile.mask import apply_mask
from ...tile.score import score


class Recomputed(NamedTuple):
    """A tile of probabilities, after dropout, and the gradients of scores and of scale * q k^T."""

    p: tl.tensor  # before the factor of what is kept
    ds: tl.tensor
    dqk: tl.tensor


@triton.jit
def recompute(
    qk,
    dp,
    lse,
    delta,
    m_start,
    n_start,
    seq,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """P = exp(S - lse) and dS = P (dP - delta), of a tile of S or of its transpose.

    lse, in base 2, and delta are shaped to broadcast over the tile.
    """
    offs_m, offs_n = tl.arange(0, TILE.BLOCK_M), tl.arange(0, TILE.BLOCK_N)
    if TRANSPOSED:
        offs_m, offs_n = offs_m[None, :], offs_n[:, None]
    else:
        offs_m, offs_n = offs_m[:, None], offs_n[None, :]
    q_idx, k_idx = m_start + offs_m, n_start + offs_n
    scored = score(qk, q_idx, k_idx, seq, FEATURES)
    s = scored.s
    if MASKED:
        s = apply_mask(s, q_idx, k_idx, seq, FEATURES)
    p = probabilities(s, -lse, seq, FEATURES)
    dropped = p
    if FEATURES.DROPOUT:
        threshold = seq.numbers.dropout_threshold
        keep = keep_mask(seq.stream, m_start, n_start, offs_m, offs_n, threshold)
        dropped = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp * seq.numbers.dropout_factor, 0.0)
    ds = p * (dp - delta)
    return Recomputed(dropped, ds, ds * scored.derivative)
