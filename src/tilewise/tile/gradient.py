"""The backward of softmax on one tile, by recomputation.

    P = exp(S - lse)        dS = P (dP - delta)        delta = rowsum(dO O)

FlashAttention-2, algorithm 2, lines 11 and 14; dS is the gradient of scale * q k^T, so that the
score's own derivative joins here.
"""

import triton
import triton.language as tl

from .mask import apply_mask
from .score import unit


@triton.jit
def probabilities(s, minus_lse, q_idx, k_idx, seq, FEATURES: tl.constexpr, MASKED: tl.constexpr):
    """P of a tile of scores; -lse is in base 2, -inf for rows that saw nothing.

    All arguments are shaped to broadcast over the tile, so that the same lines serve S and its
    transpose.
    """
    if MASKED:
        s = apply_mask(s, q_idx, k_idx, seq, FEATURES)
    return tl.exp2(s * unit(seq, FEATURES) + minus_lse)


@triton.jit
def score_gradient(p, dp_minus_delta, derivative):
    """dS of the same tile; `derivative` is the score's, 1.0 without softcap."""
    return p * dp_minus_delta * derivative
