"""Split-KV: keys are summed in pieces, and the pieces folded from left to right.

Piece i holds keys [i * split_size, (i + 1) * split_size), counted from key 0. Of a row and a piece

    m = max_j S_j,   l = sum_j exp(S_j - m),   O = sum_j exp(S_j - m) V_j

are computed independently of other pieces, in fp32 (fp64 for fp64), and two neighbours are folded
to

    m = max(m1, m2),   l = exp(m1 - m) l1 + exp(m2 - m) l2,   O likewise

A piece without a key is m = -inf, l = 0, O = 0 and changes no bit, so that a row's bits do not
depend on which program computes which piece, nor on pieces that a window hides. The row is O / l at
the end.

FlashDecoding (Dao et al. 2023) splits so; that the size of a piece is fixed, and not their number,
is what makes the result independent of the batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

Tensor = torch.Tensor


class SplitState(NamedTuple):
    """The softmax state of rows: unnormalised output, maximum (in kernels in base 2), and sum."""

    acc_o: Tensor  # (..., rows, headdim_v)
    m_i: Tensor  # (..., rows, 1)
    l_i: Tensor  # (..., rows, 1)


def default_split_size(group: int) -> int:
    """The keys of a piece by default, by query heads for each key head. More rows write more
    partial results, so their pieces are longer: a partial row is at most 1.6 % of what is read.
    """
    return 512 if group <= 4 else 1024 if group <= 8 else 2048


def pieces(first: int, last: int, split_size: int) -> range:
    """The indices of the pieces that contain keys [first, last)."""
    return range(first // split_size, -(-last // split_size)) if first < last else range(0)


def empty_state(like: Tensor) -> SplitState:
    """Rows that have seen no key; `like` is their output."""
    m_i = like.new_full((*like.shape[:-1], 1), -math.inf)
    return SplitState(torch.zeros_like(like), m_i, l_i=torch.zeros_like(m_i))


def fold(left: SplitState, right: SplitState) -> SplitState:
    """Two states over neighbouring keys as one."""
    m_i = torch.maximum(left.m_i, right.m_i)
    shift = m_i.clamp_min(torch.finfo(m_i.dtype).min)  # -inf: neither has seen a key
    alpha, beta = torch.exp(left.m_i - shift), torch.exp(right.m_i - shift)
    l_i = left.l_i * alpha + right.l_i * beta
    return SplitState(left.acc_o * alpha + right.acc_o * beta, m_i, l_i=l_i)


def key_without_value(scores: Tensor, like: Tensor) -> SplitState:
    """Rows that have seen one key whose value is 0, by its scores (..., rows, 1)."""
    return SplitState(torch.zeros_like(like), scores, l_i=(scores > -math.inf).to(scores.dtype))


def finish(state: SplitState) -> tuple[Tensor, Tensor]:
    """`out` and `lse` (..., rows)."""
    is_empty = state.l_i == 0
    lse = (state.m_i + state.l_i.log()).masked_fill(is_empty, -math.inf)
    return state.acc_o / state.l_i.masked_fill(is_empty, 1), lse.squeeze(-1)
