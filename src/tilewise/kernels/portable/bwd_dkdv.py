"""dK and dV: FlashAttention-2, algorithm 2, one program a tile of keys.

The program keeps its K and V tiles and loops over the queries that attend to them. Probabilities
are recomputed from lse, never stored:

    P = exp(S - lse)    dV += P^T dO    dP = dO V^T    dS = P (dP - delta)    dK += dS^T Q

S and dP are computed transposed, so that P^T and dS^T come out as the left operands of the two
products. All query heads of a group add to the same accumulators, so that GQA needs neither
repeated heads nor atomics.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...tile.bounds import count_full, count_partial, full_block, partial_block, query_blocks
from ...tile.schedule import find_key_tile
from ...tile.seqlen import lengths_of, modifiers_of, offsets_of, sequence_of
from ..common.bwd_step import load_lse, recompute, stats_rows
from ..common.io import (
    from_row,
    load_once,
    load_rows,
    load_stats,
    multiply_rows,
    open_rows,
    store_rows,
)


class KeyGrads(NamedTuple):
    """The accumulators of one tile of keys."""

    dk: tl.tensor  # (BLOCK_N, BLOCK_D), before the factor scale
    dv: tl.tensor  # (BLOCK_N, BLOCK_DV)


class QueryRows(NamedTuple):
    """The query side of one head: tile views of q and do, addresses of lse, delta and what lse has
    lost (`stats_rows`).
    """

    q: tl.tensor
    do: tl.tensor
    lse: tl.tensor
    delta: tl.tensor
    rest: tl.tensor


@triton.jit
def add_query_tile(
    grads,
    k,
    v,
    rows,
    m_start,
    n_start,
    seq,
    HAS_REST: tl.constexpr,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of queries into dK and dV."""
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    D: tl.constexpr = FEATURES.HEADDIM
    DV: tl.constexpr = FEATURES.HEADDIM_V
    q_idx = m_start + tl.arange(0, BLOCK_M)
    q_tile = load_rows(rows.q, m_start, BLOCK_M, D, TILE.BLOCK_D, TILE.DESCRIPTORS, MASKED)
    do_tile = load_rows(rows.do, m_start, BLOCK_M, DV, TILE.BLOCK_DV, TILE.DESCRIPTORS, MASKED)
    # S^T = K Q^T, dP^T = V dO^T: (BLOCK_N, BLOCK_M)
    PRECISION: tl.constexpr = FEATURES.PRECISION
    if TILE.CHUNK > 0:
        qk = multiply_rows(k, rows.q, n_start, m_start, BLOCK_N, BLOCK_M, D, TILE.CHUNK, PRECISION)
        dp = multiply_rows(
            v, rows.do, n_start, m_start, BLOCK_N, BLOCK_M, DV, TILE.CHUNK, PRECISION
        )
    else:
        qk = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)
        dp = tl.dot(v, tl.trans(do_tile), input_precision=PRECISION)
    # rows past the end count as rows without keys
    row = load_lse(rows.lse, rows.rest, q_idx, seq.lengths, HAS_REST, FEATURES, 0, MASKED)
    delta = load_stats(rows.delta, q_idx, seq.lengths, 0.0, MASKED)[None, :]
    tile = recompute(qk, dp, row, delta, m_start, n_start, seq, FEATURES, TILE, MASKED, True)
    # dV += P^T dO, dK += dS^T Q
    dv = tl.dot(tile.p.to(do_tile.dtype), do_tile, grads.dv, input_precision=PRECISION)
    dk = tl.dot(tile.dqk.to(q_tile.dtype), q_tile, grads.dk, input_precision=PRECISION)
    return KeyGrads(dk, dv)


@triton.jit
def attn_bwd_dkdv_kernel(
    q,
    k,
    v,
    dout,
    dk,
    dv,
    stats,
    optionals,
    sizes,
    numbers,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
):
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    D: tl.constexpr = FEATURES.HEADDIM
    DV: tl.constexpr = FEATURES.HEADDIM_V
    tile, lane = tl.program_id(0), tl.arange(0, 32)
    n_block, head_k, sequence = find_key_tile(tile, lane, sizes, optionals, FEATURES, BLOCK_N)
    if FEATURES.PACKED:
        if sequence >= sizes.packed:
            return
    n_start = n_block * BLOCK_N
    lengths = lengths_of(sequence, sizes, optionals, FEATURES)
    offsets = offsets_of(sequence, sizes, optionals, FEATURES)
    batch = offsets.batch
    q, dout = from_row(q, offsets.first_q), from_row(dout, offsets.first_q)
    k, v = from_row(k, offsets.first_k), from_row(v, offsets.first_k)
    dk, dv = from_row(dk, offsets.first_k), from_row(dv, offsets.first_k)
    seqlen_q = lengths.seqlen_q

    seqlen_k = lengths.seqlen_k
    if TILE.CHUNK > 0:
        k_tile = open_rows(k, batch, head_k, seqlen_k, BLOCK_N, D, BLOCK_D, False)
        v_tile = open_rows(v, batch, head_k, seqlen_k, BLOCK_N, DV, BLOCK_DV, False)
    else:
        k_tile = load_once(k, batch, head_k, n_start, seqlen_k, BLOCK_N, D, BLOCK_D)
        v_tile = load_once(v, batch, head_k, n_start, seqlen_k, BLOCK_N, DV, BLOCK_DV)
    grads = KeyGrads(
        tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    )

    SPLIT: tl.constexpr = FEATURES.MASK_M // BLOCK_M
    PADDED: tl.constexpr = SPLIT > 0 and FEATURES.SEQUSED_K  # which a block mask does not know
    modifiers = modifiers_of(optionals)
    HAS_REST: tl.constexpr = stats[2] is not None
    for head in range(head_k * FEATURES.GROUP, (head_k + 1) * FEATURES.GROUP):
        seq = sequence_of(sequence, head, sizes, optionals, modifiers, numbers, FEATURES)
        rows = QueryRows(
            open_rows(q, batch, head, seqlen_q, BLOCK_M, D, BLOCK_D, TILE.DESCRIPTORS),
            open_rows(dout, batch, head, seqlen_q, BLOCK_M, DV, BLOCK_DV, TILE.DESCRIPTORS),
            *stats_rows(stats, batch, head, offsets.first_q, sizes),
        )
        blocks = query_blocks(n_start, seq, FEATURES, TILE)
        for i in range(count_partial(blocks, SPLIT)):
            m_start = partial_block(blocks, i, SPLIT) * BLOCK_M
            grads = add_query_tile(
                grads, k_tile, v_tile, rows, m_start, n_start, seq, HAS_REST, FEATURES, TILE, True
            )
        for i in range(count_full(blocks, SPLIT)):
            m_start = full_block(blocks, i, SPLIT) * BLOCK_M
            grads = add_query_tile(
                grads, k_tile, v_tile, rows, m_start, n_start, seq, HAS_REST, FEATURES, TILE, PADDED
            )

    # keys past seqused_k exist in memory and get gradient 0
    is_key = (n_start + tl.arange(0, BLOCK_N) < seqlen_k)[:, None]
    dk_tile = tl.where(is_key, grads.dk * numbers.scale, 0.0)
    dv_tile = tl.where(is_key, grads.dv * numbers.dropout_factor, 0.0)
    store_rows(dk, batch, head_k, dk_tile, n_start, offsets.rows_k, BLOCK_N, D, BLOCK_D)
    store_rows(dv, batch, head_k, dv_tile, n_start, offsets.rows_k, BLOCK_N, DV, BLOCK_DV)
