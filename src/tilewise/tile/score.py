"""From a raw product q k^T to a score, in base 2, and the derivative of that step.

    score = scale * qk                                  plain
    score = softcap * tanh(scale * qk / softcap)        with softcap
    score = score_mod(score, b, h, q_idx, k_idx)        with a score function
    score = ... - slope * |q_idx + diagonal - k_idx|    with ALiBi
    score = ... + bias[b, h, q_idx, k_idx]              with a bias

ALiBi is Press et al. 2022, arXiv 2108.12409. Softmax uses 2^x, so scores are needed times log2(e).
Where nothing is added, that factor, with the scale or the softcap, is applied in the exponent, in
the fused multiply-add that subtracts the maximum: `exp_scale` is the exponent's factor. A score
function and a bias work in natural units, so that the factor is log2(e).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .types import Numbers


class Score(NamedTuple):
    """A tile of scores, before `exp_scale`, and its derivative by the scaled product."""

    s: tl.tensor
    derivative: tl.tensor  # 1.0 where the score is linear in the product


@triton.jit
def tanh(x):
    """Within two ulps, of itself and not of 1, as a cap that follows may be large.

    1 - 2 / (e^2x + 1) is exact where e^2x is 0 or infinite; near 0 it is x + x^3 P(x^2) (Cephes).
    """
    far = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)  # 2 log2(e)
    z = x * x
    p = (-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2
    p = (p * z + 1.33314422036e-1) * z - 3.33332819422e-1
    return tl.where(tl.abs(x) < 0.625, x + x * (z * p), far)


@triton.jit
def fast_tanh(x):
    """NVIDIA's tanh.approx, within 2^-11 of the value: the error of rounding to fp16."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def exp_scale(seq, FEATURES: tl.constexpr):
    """The factor that the exponent still has to apply to a score."""
    if FEATURES.NATURAL:
        return 1.4426950408889634  # log2(e)
    elif FEATURES.ALIBI:
        return 1.0
    elif FEATURES.SOFTCAP:
        return seq.numbers.softcap_log2
    else:
        return seq.numbers.scale_log2


@triton.jit
def in_units(numbers, unit):
    """The numbers of scores whose products lack a positive factor."""
    return Numbers(
        numbers.scale * unit,
        numbers.scale_log2 * unit,
        numbers.softcap_log2,
        numbers.scale_over_softcap * unit,
        numbers.left,
        numbers.right,
        numbers.dropout_threshold,
        numbers.dropout_factor,
    )


@triton.jit
def score(qk, q_idx, k_idx, seq, FEATURES: tl.constexpr):
    """Scores of a tile; q_idx and k_idx are shaped to broadcast over it."""
    scored = score_without_bias(qk, q_idx, k_idx=k_idx, seq=seq, FEATURES=FEATURES)
    if FEATURES.BIAS:
        return Score(scored.s + load_bias(q_idx, k_idx, seq=seq), scored.derivative)
    else:
        return scored


@triton.jit
def score_without_bias(qk, q_idx, k_idx, seq, FEATURES: tl.constexpr):
    """Scores of a tile, for a kernel that reads the bias in its own way."""
    scored = scaled(qk, seq, FEATURES=FEATURES)
    s, derivative = scored.s, scored.derivative
    slope = seq.slope_log2
    if FEATURES.NATURAL:
        slope = slope * 0.6931471805599453  # ln 2
    if FEATURES.SCORE_MOD is not None:
        tensors = seq.modifiers.score_tensors
        mod_derivative = FEATURES.SCORE_DERIVATIVE(s, seq.batch, seq.head, q_idx, k_idx, tensors)
        derivative = derivative * mod_derivative
        modified = FEATURES.SCORE_MOD(s, seq.batch, seq.head, q_idx, k_idx, tensors)
        s = tl.broadcast_to(modified, s.shape)
    if FEATURES.ALIBI:
        # In floats, exact for lengths up to 2^24
        distance = tl.abs((q_idx + seq.lengths.diagonal - k_idx).to(tl.float32))
        s = s - slope * distance
    return Score(s, derivative)


@triton.jit
def scaled(qk, seq, FEATURES: tl.constexpr):
    """A tile of scaled and capped scores before anything is added to them: as score functions see
    them, where there is one.
    """
    s = qk
    derivative = 1.0
    if FEATURES.SOFTCAP:
        s = qk * seq.numbers.scale_over_softcap
        s = fast_tanh(s) if FEATURES.FAST_TANH else tanh(s)
        derivative = 1.0 - s * s
    if FEATURES.NATURAL:
        factor = seq.numbers.scale
        if FEATURES.SOFTCAP:
            factor = seq.numbers.softcap_log2 * 0.6931471805599453  # ln 2
        s = s * factor
    elif FEATURES.ALIBI:
        s = s * (seq.numbers.softcap_log2 if FEATURES.SOFTCAP else seq.numbers.scale_log2)
    return Score(s, derivative)


@triton.jit
def load_bias(q_idx, k_idx, seq):
    """The bias of a tile, 0 past the ends; 64-bit, as it may have 2^31 elements."""
    bias = seq.modifiers.bias
    row = bias.ptr + tl.cast(seq.batch, tl.int64) * bias.batch
    row += tl.cast(seq.head, tl.int64) * bias.head
    offset = q_idx.to(tl.int64) * bias.row + k_idx.to(tl.int64) * bias.column
    exists = (q_idx < seq.lengths.seqlen_q) & (k_idx < seq.lengths.seqlen_k)
    return tl.load(row + offset, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def load_slope(optionals, batch, head, FEATURES: tl.constexpr):
    """The head's ALiBi slope in base 2."""
    if FEATURES.ALIBI:
        return (
            tl.load(optionals.alibi_slopes + batch * optionals.alibi_batch + head)
            * 1.4426950408889634
        )
    else:
        return 0.0
