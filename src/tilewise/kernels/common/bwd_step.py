"""The backward's recomputation for one tile of queries and one tile of keys."""

from typing import NamedTuple

import triton
import triton.language as tl

from ...tile.dropout import keep_mask
from ...tile.gradient import natural_probabilities, probabilities
from ...tile.mask import apply_mask
from ...tile.score import score
from ...tile.softmax import lse_or_inf, lse_to_log2
from .io import load_stats, row_stats


class RowStats(NamedTuple):
    """The lse of some queries, in base 2 or natural (`natural_probabilities`), and its rest."""

    lse: tl.tensor
    rest: tl.tensor  # 0.0 where that is unknown


class Recomputed(NamedTuple):
    """A tile of probabilities, after dropout, and the gradients of scores and of scale * q k^T."""

    p: tl.tensor  # before the factor of what is kept
    ds: tl.tensor
    dqk: tl.tensor


@triton.jit
def load_lse(
    lse,
    rest,
    q_idx,
    lengths,
    HAS_REST: tl.constexpr,
    FEATURES: tl.constexpr,
    AXIS: tl.constexpr,
    CHECKED: tl.constexpr = True,
):
    """Loads the row statistics of queries, along the other axis of a tile than AXIS; `stats_rows`
    gives the addresses.
    """
    row = load_stats(lse, q_idx, lengths, float("-inf"), CHECKED)
    lost = 0.0
    if FEATURES.NATURAL:
        row = lse_or_inf(row)
        if HAS_REST:
            lost = tl.expand_dims(load_stats(rest, q_idx, lengths, 0.0, CHECKED), AXIS)
    else:
        row = lse_to_log2(row)
    return RowStats(tl.expand_dims(row, AXIS), lost)


@triton.jit
def stats_rows(stats, batch, head, first, sizes):
    """Where lse, delta and what lse has lost begin, of a head's queries from `first` on. The last
    may not be there: then it is not read.
    """
    lse = row_stats(stats[0], batch, head, sizes) + first
    delta = row_stats(stats[1], batch, head, sizes) + first
    if stats[2] is None:
        return lse, delta, lse
    else:
        return lse, delta, row_stats(stats[2], batch, head, sizes) + first


@triton.jit
def recompute(
    qk,
    dp,
    row,
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

    `row`, of `load_lse`, and delta are shaped to broadcast over the tile.
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
    if FEATURES.NATURAL:
        p = natural_probabilities(s, row.lse, row.rest)
    else:
        p = probabilities(s, -row.lse, seq, FEATURES)
    dropped = p
    if FEATURES.DROPOUT:
        threshold = seq.numbers.dropout_threshold
        keep = keep_mask(seq.stream, m_start, n_start, offs_m, offs_n, threshold)
        dropped = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp * seq.numbers.dropout_factor, 0.0)
    ds = p * (dp - delta)
    return Recomputed(dropped, ds, ds * scored.derivative)
