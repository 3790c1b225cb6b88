"""The mask of a tile of scores: a band, as an interval of columns for each row, and a function.

Query i sees key j where i + diagonal - left <= j <= i + diagonal + right and j < seqlen_k
(`tilewise.tile.predicates`). Both ends are per row, whether queries are rows or columns of the
tile: so an element takes one comparison for each end.
"""

import triton
import triton.language as tl

from .ends import RowInterval, load_ends

LAST = tl.constexpr(0x7FFFFFFF)  # past every column


@triton.constexpr_function
def has_first(left, right, has_ends, is_transposed):
    """Whether a row's interval has a beginning: a query's with `left`, a key's with `right`."""
    return has_ends or (right if is_transposed else left)


@triton.constexpr_function
def has_stop(left, has_ends, is_transposed):
    """Whether it has an end: a query's always, as keys come to one; a key's with `left`."""
    return has_ends or left or not is_transposed


@triton.jit
def columns_seen(q_idx, k_idx, seq, FEATURES: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The keys that a query sees, or TRANSPOSED the queries that see a key: none past the end."""
    if FEATURES.ENDS:
        return ends_seen(q_idx, k_idx, seq=seq, TRANSPOSED=TRANSPOSED)
    else:
        return band_seen(q_idx, k_idx, seq=seq, FEATURES=FEATURES, TRANSPOSED=TRANSPOSED)


@triton.jit
def band_seen(q_idx, k_idx, seq, FEATURES: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The keys that a query sees in a band, or TRANSPOSED the queries that see a key."""
    diagonal, seqlen_k = seq.lengths.diagonal, seq.lengths.seqlen_k
    left, right = seq.numbers.left, seq.numbers.right
    if TRANSPOSED:
        is_key = k_idx < seqlen_k
        first = tl.where(is_key, k_idx - (diagonal + right), LAST)
        stop = k_idx - (diagonal - left - 1)
        if not FEATURES.RIGHT:
            stop = tl.where(is_key, stop, -LAST)
        return RowInterval(first, stop)
    else:
        first = q_idx + (diagonal - left)
        stop = tl.minimum(q_idx + (diagonal + right + 1), seqlen_k) if FEATURES.RIGHT else seqlen_k
        return RowInterval(first, stop)


@triton.jit
def ends_seen(q_idx, k_idx, seq, TRANSPOSED: tl.constexpr):
    """`columns_seen` of a mask that keeps the ends of its rows and columns."""
    first_key, stop_key, first_query, stop_query = seq.modifiers.mask_tensors
    seqlen_k = seq.lengths.seqlen_k
    if TRANSPOSED:
        interval = load_ends(k_idx, seq.batch, head=seq.head, ends=(first_query, stop_query))
        first = tl.where(k_idx < seqlen_k, interval.first - seq.origin, LAST)
        return RowInterval(first, interval.stop - seq.origin)
    else:
        interval = load_ends(q_idx, seq.batch, head=seq.head, ends=(first_key, stop_key))
        stop = tl.minimum(interval.stop - seq.origin, seqlen_k)
        return RowInterval(interval.first - seq.origin, stop)


@triton.jit
def function_allows(q_idx, k_idx, seq, FEATURES: tl.constexpr):
    """The mask function's value for each pair."""
    tensors = seq.modifiers.mask_tensors
    return FEATURES.MASK_MOD(seq.batch, seq.head, q_idx, k_idx, tensors)


@triton.jit
def apply_mask(s, q_idx, k_idx, seq, FEATURES: tl.constexpr):
    """Sets masked scores to -inf; q_idx and k_idx broadcast over the tile."""
    TRANSPOSED: tl.constexpr = k_idx.shape[1] == 1
    LEFT: tl.constexpr = FEATURES.LEFT
    interval = columns_seen(q_idx, k_idx, seq=seq, FEATURES=FEATURES, TRANSPOSED=TRANSPOSED)
    column = q_idx if TRANSPOSED else k_idx
    keep = k_idx < seq.lengths.seqlen_k  # which the ends of a band know, too
    if has_stop(LEFT, FEATURES.ENDS, is_transposed=TRANSPOSED):
        keep = column < interval.stop
    if has_first(LEFT, FEATURES.RIGHT, has_ends=FEATURES.ENDS, is_transposed=TRANSPOSED):
        is_late = column >= interval.first
        keep = keep & is_late if has_stop(LEFT, FEATURES.ENDS, TRANSPOSED) else is_late
    if FEATURES.MASK_MOD is not None:
        keep = keep & function_allows(q_idx, k_idx, seq=seq, FEATURES=FEATURES)
    return tl.where(keep, s, float("-inf"))


@triton.jit
def seen_by_position(keep, q_idx, k_idx, seq, FEATURES: tl.constexpr):
    """The pairs in `keep` that the band and the mask function allow; query i stands on key i, and
    before the first key if there are fewer keys than queries.
    """
    if FEATURES.LEFT:
        keep = keep & (k_idx >= q_idx - seq.numbers.left)
    if FEATURES.RIGHT:
        keep = keep & (k_idx <= q_idx + seq.numbers.right)
    if FEATURES.MASK_MOD is not None:
        keep = keep & function_allows(q_idx, k_idx, seq=seq, FEATURES=FEATURES)
    return keep
