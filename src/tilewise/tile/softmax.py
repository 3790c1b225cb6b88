"""Online softmax: a row's softmax over blocks of keys, seen one at a time.

Each row keeps m, the largest score so far, and l, the sum of 2^(s - m). A new block can only raise
m; what was summed before is then too large by 2^(m_new - m) and is rescaled by alpha (Milakov and
Gimelshein 2018, arXiv 1805.02867; FlashAttention-2, algorithm 1, lines 9-10). A row that has seen
no key has m = -inf, and -inf - -inf is NaN: such rows are handled here and nowhere else.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


class SoftmaxStep(NamedTuple):
    """A block's unnormalised probabilities, the new row statistics, and the factor for everything
    accumulated before.
    """

    p: tl.tensor
    m_i: tl.tensor
    l_i: tl.tensor
    alpha: tl.tensor


@triton.jit
def online_step(s, m_i, l_i, exp_scale, MASKED: tl.constexpr):
    """One block of scores (rows x keys) into the running maximum and sum."""
    m_new = running_max(s, m_i, exp_scale=exp_scale)
    p, alpha = exponentials(s, m_i, m_new=m_new, exp_scale=exp_scale, MASKED=MASKED)
    return SoftmaxStep(p, m_new, l_i=l_i * alpha + tl.sum(p, 1), alpha=alpha)


@triton.jit
def natural_step(s, m_i, l_i):
    """One block of scores that a bias or a score function changed, with m in natural units. A mask
    may be a bias of -1e9, or the most negative number, which times log2(e) overflows: the
    difference is scaled instead.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1))
    m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
    p, alpha = tl.exp2((s - m_ref[:, None]) * LOG2_E), tl.exp2((m_i - m_ref) * LOG2_E)
    return SoftmaxStep(p, m_new, l_i=l_i * alpha + tl.sum(p, 1), alpha=alpha)


@triton.jit
def running_max(s, m_i, exp_scale):
    """The largest score of each row so far."""
    return tl.maximum(m_i, tl.max(s, 1) * exp_scale)


@triton.jit
def exponentials(s, m_i, m_new, exp_scale, MASKED: tl.constexpr):
    """2^(s - m) of a block, and 2^(m_i - m), the factor for everything accumulated before."""
    m_ref = m_new
    if MASKED:  # a row with nothing but masked scores so far
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
    return tl.exp2(s * exp_scale - m_ref[:, None]), tl.exp2(m_i - m_ref)


@triton.jit
def finish(m_i, l_i, sink_log2, FEATURES: tl.constexpr):
    """The factor 1 / l of what each row accumulated, and its natural lse. A sink is a logit that
    joins the softmax without a value.
    """
    TO_LOG2: tl.constexpr = 1.4426950408889634 if FEATURES.NATURAL else 1.0
    rescale = 1.0
    if FEATURES.SINKS:
        sink = sink_log2 * 0.6931471805599453 if FEATURES.NATURAL else sink_log2
        m_new = tl.maximum(m_i, sink)
        m_ref = tl.where(m_new == float("-inf"), 0.0, m_new)
        rescale = tl.exp2((m_i - m_ref) * TO_LOG2)
        l_i = l_i * rescale + tl.exp2((sink - m_ref) * TO_LOG2)
        m_i = m_new
    is_empty = l_i == 0.0
    rescale = rescale / tl.where(is_empty, 1.0, l_i)
    if FEATURES.NATURAL:
        lse = m_i + tl.log2(l_i) * 0.6931471805599453  # ln 2
    else:
        lse = (m_i + tl.log2(l_i)) * 0.6931471805599453
    return rescale, tl.where(is_empty, float("-inf"), lse)


@triton.jit
def lse_or_inf(lse):
    """The lse, +inf for a row that saw no key, so that its probabilities come out 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse)


@triton.jit
def lse_to_log2(lse):
    """The lse in base 2, +inf for a row that saw no key."""
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def load_sink(optionals, head, FEATURES: tl.constexpr):
    """The head's sink logit in base 2."""
    if FEATURES.SINKS:
        return tl.load(optionals.sinks + head).to(tl.float32) * 1.4426950408889634
    else:
        return 0.0
