"""The mask of a tile of scores: a band, as an interval of columns for each row, and a function.

Query i sees key j where i + diagonal - left <= j <= i + diagonal + right and j < seqlen_k
(`tilewise.predicates`). Both ends are numbers a row, whichever of a tile's sides the queries are:
so an element takes one comparison for each end that there is.
"""

from typing import NamedTuple

import triton
import triton.language as tl

LAST = tl.constexpr(0x7FFFFFFF)  # past every column


class Interval(NamedTuple):
    """What each row sees of its columns: first <= column < stop."""

    first: tl.tensor
    stop: tl.tensor


@triton.constexpr_function
def has_first(left, right, is_transposed):
    """Whether a row's interval has a beginning: a query's with `left`, a key's with `right`."""
    return right if is_transposed else left


@triton.constexpr_function
def has_stop(left, is_transposed):
    """Whether it has an end: a query's always, as keys come to one; a key's with `left`."""
    return left if is_transposed else True


@triton.jit
def columns_seen(
    q_idx, k_idx, seq, LEFT: tl.constexpr, RIGHT: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """The keys that a query sees, or TRANSPOSED the queries that see a key: none past the end."""
    diagonal, seqlen_k = seq.lengths.diagonal, seq.lengths.seqlen_k
    left, right = seq.numbers.left, seq.numbers.right
    if TRANSPOSED:
        is_key = k_idx < seqlen_k
        first = tl.where(is_key, k_idx - (diagonal + right), LAST)
        stop = k_idx - (diagonal - left - 1)
        if not RIGHT:
            stop = tl.where(is_key, stop, -LAST)
        return Interval(first, stop)
    else:
        first = q_idx + (diagonal - left)
        stop = tl.minimum(q_idx + (diagonal + right + 1), seqlen_k) if RIGHT else seqlen_k
        return Interval(first, stop)


@triton.jit
def function_allows(q_idx, k_idx, seq, FEATURES: tl.constexpr):
    """What the mask function says of each pair."""
    tensors = seq.modifiers.mask_tensors
    return FEATURES.MASK_MOD(seq.batch, seq.head, q_idx, k_idx, tensors)


@triton.jit
def apply_mask(s, q_idx, k_idx, seq, FEATURES: tl.constexpr):
    """Scores of pairs that may not see each other become -inf; q_idx and k_idx broadcast over the
    tile.
    """
    TRANSPOSED: tl.constexpr = k_idx.shape[1] == 1
    seen = columns_seen(q_idx, k_idx, seq, FEATURES.LEFT, FEATURES.RIGHT, TRANSPOSED)
    column = q_idx if TRANSPOSED else k_idx
    keep = k_idx < seq.lengths.seqlen_k  # which the ends of a band know, too
    if has_stop(FEATURES.LEFT, TRANSPOSED):
        keep = column < seen.stop
    if has_first(FEATURES.LEFT, FEATURES.RIGHT, TRANSPOSED):
        is_late = column >= seen.first
        keep = keep & is_late if has_stop(FEATURES.LEFT, TRANSPOSED) else is_late
    if FEATURES.MASK_MOD is not None:
        keep = keep & function_allows(q_idx, k_idx, seq, FEATURES)
    return tl.where(keep, s, float("-inf"))
