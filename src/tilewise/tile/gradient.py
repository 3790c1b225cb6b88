"""The backward of softmax on one tile, by recomputation.

    P = exp(S - lse)        dS = P (dP - delta)        delta = rowsum(dO O)

FlashAttention-2, algorithm 2, lines 11 and 14; dS is the gradient of scale * q k^T, so it includes
the score's own derivative.
"""

import triton
import triton.language as tl

from .score import exp_scale


@triton.jit
def probabilities(s, minus_lse, seq, FEATURES: tl.constexpr):
    """P of a tile of scores or of its transpose; -lse is -inf for rows that saw nothing, and
    broadcasts over the tile. It is in base 2, and in natural units where scores are.
    """
    if FEATURES.NATURAL:
        return natural_probabilities(s, -minus_lse, rest=0.0)
    else:
        return tl.exp2(s * exp_scale(seq, FEATURES) + minus_lse)


@triton.jit
def natural_probabilities(s, lse, rest):
    """P of a tile of scores in natural units, whose lse may be as large as a mask of -1e9: +inf for
    rows that saw nothing. `rest` is what lse in fp32 has lost, in base 2: see `bwd_rest`.
    """
    return tl.exp2((s - lse) * 1.4426950408889634 - rest)


@triton.jit
def score_gradient(p, dp_minus_delta, derivative):
    """dS of the same tile; `derivative` is the score's, as `Score` has it."""
    return p * dp_minus_delta * derivative
