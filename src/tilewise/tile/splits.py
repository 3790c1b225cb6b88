"""Split-KV on tiles: the pieces that queries see, and how two neighbours are folded; the arithmetic
is that of `tilewise.tile.split_kv`, in base 2.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .split_kv import SplitState


class SeenKeys(NamedTuple):
    """Keys [first, last) are seen by some query of a tile; they lie in pieces [piece, stop)."""

    first: tl.tensor
    last: tl.tensor
    piece: tl.tensor
    stop: tl.tensor


@triton.constexpr_function
def longest_alone(rows):
    """Pieces of a part at most where each program has one: with more, SMs end too far apart. Of 32
    rows more: a state, written and read again, is an eighth of its piece's bytes, and slices of
    folds take longer than the wait for the slowest.
    """
    return 16 if 16 < rows <= 32 else 8


@triton.jit
def fold(left, right):
    """Two states over neighbouring keys as one. A state without a key changes no bit."""
    m_i = tl.maximum(left.m_i, right.m_i)
    m_ref = tl.where(m_i == float("-inf"), 0.0, m_i)
    alpha, beta = tl.exp2(left.m_i - m_ref), tl.exp2(right.m_i - m_ref)
    l_i = left.l_i * alpha + right.l_i * beta
    acc_o = left.acc_o * alpha[:, None] + right.acc_o * beta[:, None]
    return SplitState(acc_o, m_i, l_i=l_i)


@triton.jit
def keys_seen(q_first, q_last, seqlen_k, numbers, split_size, FEATURES: tl.constexpr):
    """What queries at positions [q_first, q_last] see of a sequence."""
    first, last = seqlen_k * 0, seqlen_k
    if FEATURES.LEFT:
        first = tl.maximum(q_first - numbers.left, 0)
    if FEATURES.RIGHT:
        last = tl.minimum(q_last + numbers.right + 1, seqlen_k)
    last = tl.maximum(last, first)
    stop = tl.where(first < last, tl.cdiv(last, split_size), first // split_size)
    return SeenKeys(first, last, piece=first // split_size, stop=stop)


@triton.jit
def piece_keys(start, split_size, keys, BLOCK_N: tl.constexpr):
    """The first block and the last key of the piece from key `start` on, as far as they are seen.
    Blocks count from the beginning of the piece, also where a window hides some.
    """
    stop = tl.minimum(start + split_size, keys.last)
    return start + tl.maximum(keys.first - start, 0) // BLOCK_N * BLOCK_N, stop
