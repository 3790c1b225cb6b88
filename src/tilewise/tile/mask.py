"""The predicates of `tilewise.predicates`, compiled for kernels, applied to a tile of scores."""

import triton
import triton.language as tl

from .. import predicates

is_key = triton.jit(predicates.is_key)
within_left = triton.jit(predicates.within_left)
within_right = triton.jit(predicates.within_right)


@triton.jit
def apply_mask(s, q_idx, k_idx, seq, FEATURES: tl.constexpr):
    """Scores of pairs that may not see each other become -inf; q_idx and k_idx broadcast over the
    tile.
    """
    return tl.where(visible(q_idx, k_idx, seq, FEATURES), s, float("-inf"))


@triton.jit
def visible(q_idx, k_idx, seq, FEATURES: tl.constexpr):
    """Whether each query sees each key: bool."""
    keep = is_key(k_idx, seq.lengths.seqlen_k)
    if FEATURES.RIGHT:
        # Both ends as one number a row, since the compiler selects an element for each condition
        ahead = seq.lengths.diagonal + seq.numbers.right
        if k_idx.shape[1] > 1:  # queries are rows
            keep = is_key(k_idx, tl.minimum(seq.lengths.seqlen_k, q_idx + ahead + 1))
        elif not FEATURES.LEFT:
            keep = q_idx >= tl.where(keep, k_idx - ahead, 0x7FFFFFFF)
        else:  # a window's other end wants its registers: Hopper's backward would spill
            keep = keep & within_right(q_idx, k_idx, seq.lengths.diagonal, seq.numbers.right)
    if FEATURES.LEFT:
        keep = keep & within_left(q_idx, k_idx, seq.lengths.diagonal, seq.numbers.left)
    if FEATURES.MASK_MOD is not None:
        tensors = seq.modifiers.mask_tensors
        keep = keep & FEATURES.MASK_MOD(seq.batch, seq.head, q_idx, k_idx, tensors)
    return keep
