"""A tile of queries in the backward's loop over keys: what it loads once, and what it recomputes
for each tile of keys.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...tile.types import Sequence, SequenceOffsets
from ..common.bwd_step import RowStats, load_lse, recompute, stats_rows
from ..common.io import from_row, load_once, load_rows, load_stats, multiply_rows, open_rows
from ..common.keys import open_keys


class Queries(NamedTuple):
    """A tile of queries, and the keys and values of its sequence."""

    offsets: SequenceOffsets
    seq: Sequence
    m_start: tl.tensor
    q: Any  # (BLOCK_M, BLOCK_D); opened, where they are read in chunks
    do: Any  # (BLOCK_M, BLOCK_DV)
    row: Any  # (BLOCK_M, 1), `RowStats`
    delta_or_dlse: tl.tensor  # (BLOCK_M,)
    k: Any  # opened
    v: Any


class BlockGrads(NamedTuple):
    """What the backward recomputes of a tile of queries and one of keys."""

    k: tl.tensor  # (BLOCK_N, BLOCK_D)
    qk: tl.tensor  # (BLOCK_M, BLOCK_N)
    ds: tl.tensor
    dqk: tl.tensor  # the gradient of scale * q k^T


@triton.jit
def open_queries(
    q,
    k,
    v,
    dout,
    stats,
    tile,
    optionals,
    sizes,
    numbers,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The tile (m_block, head, batch); stats are lse, delta or the gradient of lse, and what lse
    has lost.
    """
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    D: tl.constexpr = FEATURES.HEADDIM
    DV: tl.constexpr = FEATURES.HEADDIM_V
    m_block, head, batch = tile
    m_start = m_block * BLOCK_M
    q_idx = m_start + tl.arange(0, BLOCK_M)
    offsets, seq, k_rows, v_rows = open_keys(
        k, v, head, batch, optionals, sizes, numbers, FEATURES, TILE
    )
    batch = offsets.batch
    seqlen_q = seq.lengths.seqlen_q
    q, dout = from_row(q, offsets.first_q), from_row(dout, offsets.first_q)
    if TILE.CHUNK > 0:
        q_tile = open_rows(q, batch, head, seqlen_q, BLOCK_M, D, BLOCK_D, False)
        do = open_rows(dout, batch, head, seqlen_q, BLOCK_M, DV, BLOCK_DV, False)
    else:
        q_tile = load_once(q, batch, head, m_start, seqlen_q, BLOCK_M, D, BLOCK_D)
        do = load_once(dout, batch, head, m_start, seqlen_q, BLOCK_M, DV, BLOCK_DV)
    lse_row, other_row, rest = stats_rows(stats, batch, head, offsets.first_q, sizes)
    row = load_lse(lse_row, rest, q_idx, seq.lengths, stats[2] is not None, FEATURES, 1)
    delta_or_dlse = load_stats(other_row, q_idx, seq.lengths, 0.0, True)
    return Queries(offsets, seq, m_start, q_tile, do, row, delta_or_dlse, k_rows, v_rows)


@triton.jit
def recompute_block(
    queries, delta, n_start, FEATURES: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr
):
    """The queries and the keys from n_start on."""
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    D: tl.constexpr = FEATURES.HEADDIM
    DV: tl.constexpr = FEATURES.HEADDIM_V
    k_tile = load_rows(queries.k, n_start, BLOCK_N, D, TILE.BLOCK_D, TILE.DESCRIPTORS, MASKED)
    # S = Q K^T, dP = dO V^T: (BLOCK_M, BLOCK_N)
    PRECISION: tl.constexpr = FEATURES.PRECISION
    if TILE.CHUNK > 0:
        qk = multiply_rows(
            queries.q, queries.k, queries.m_start, n_start,
            TILE.BLOCK_M, BLOCK_N, D, TILE.CHUNK, PRECISION,
        )  # fmt: skip
        dp = multiply_rows(
            queries.do, queries.v, queries.m_start, n_start,
            TILE.BLOCK_M, BLOCK_N, DV, TILE.CHUNK, PRECISION,
        )  # fmt: skip
    else:
        v_tile = load_rows(queries.v, n_start, BLOCK_N, DV, TILE.BLOCK_DV, TILE.DESCRIPTORS, MASKED)
        qk = tl.dot(queries.q, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(queries.do, tl.trans(v_tile), input_precision=PRECISION)
    # In a loop Triton (3.6) forgets the names of what is in tuples of tuples
    lse, rest = queries.row
    row, delta = RowStats(lse, rest), delta[:, None]
    m_start, seq = queries.m_start, queries.seq
    tile = recompute(qk, dp, row, delta, m_start, n_start, seq, FEATURES, TILE, MASKED, False)
    return BlockGrads(k_tile, qk, tile.ds, tile.dqk)
