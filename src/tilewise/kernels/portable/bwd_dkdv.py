"""dK and dV: FlashAttention-2, algorithm 2, one program a tile of keys.

The program keeps its K and V tiles and walks the queries that see them. Probabilities are recomputed from lse, never stored:

    P = exp(S - lse)    dV += P^T dO    dP = dO V^T    dS = P (dP - delta)    dK += dS^T Q

S and dP are computed transposed, so that P^T and dS^T come out as the left operands of the two products. All query heads of a
group add to the same accumulators, so that GQA needs neither repeated heads nor atomics.
"""

import triton
import triton.language as tl

from ...tile.bounds import count_partial, partial_block, query_blocks
from ...tile.schedule import key_tile
from ...tile.score import load_slope
from ...tile.seqlen import lengths_of
from ...tile.softmax import lse_to_log2
from .io import load_keys, load_queries, open_keys, open_queries, row_stats, store_rows
from .step import recompute


@triton.jit
def add_query_tile(
    dk, dv, k, v, q, dout, stats, m_start, n_start, slope, lengths, numbers, FEATURES: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr
):
    """One tile of queries into dK and dV (q and dout: opened; stats: addresses of lse and delta)."""
    q_idx = m_start + tl.arange(0, TILE.BLOCK_M)
    k_idx = n_start + tl.arange(0, TILE.BLOCK_N)
    q_tile = load_queries(q, m_start, FEATURES.HEADDIM, TILE.BLOCK_D, TILE, MASKED)
    # S^T = K Q^T: (BLOCK_N, BLOCK_M)
    qk = tl.dot(k, tl.trans(q_tile), input_precision=FEATURES.PRECISION)
    do_tile = load_queries(dout, m_start, FEATURES.HEADDIM_V, TILE.BLOCK_DV, TILE, MASKED)
    dp = tl.dot(v, tl.trans(do_tile), input_precision=FEATURES.PRECISION)
    if MASKED:  # rows past the end count as rows that saw nothing
        lse = tl.load(stats[0] + q_idx, mask=q_idx < lengths.seqlen_q, other=float("-inf"))
        delta = tl.load(stats[1] + q_idx, mask=q_idx < lengths.seqlen_q, other=0.0)
    else:
        lse = tl.load(stats[0] + q_idx)
        delta = tl.load(stats[1] + q_idx)
    tile = recompute(
        qk, dp, lse_to_log2(lse)[None, :], delta[None, :], q_idx[None, :], k_idx[:, None], slope, lengths, numbers, FEATURES, MASKED
    )
    dv = tl.dot(tile.p.to(do_tile.dtype), do_tile, dv, input_precision=FEATURES.PRECISION)
    dk = tl.dot(tile.ds.to(q_tile.dtype), q_tile, dk, input_precision=FEATURES.PRECISION)
    return dk, dv


@triton.jit
def attn_bwd_dkdv_kernel(q, k, v, dout, dk, dv, stats, optionals, sizes, numbers, FEATURES: tl.constexpr, TILE: tl.constexpr):
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    n_block, head_k, batch = key_tile(tl.program_id(0), sizes, FEATURES, BLOCK_N)
    n_start = n_block * BLOCK_N
    lengths = lengths_of(batch, sizes, optionals, FEATURES)

    k_rows = open_keys(k, batch, head_k, lengths.seqlen_k, FEATURES.HEADDIM, BLOCK_D, TILE)
    v_rows = open_keys(v, batch, head_k, lengths.seqlen_k, FEATURES.HEADDIM_V, BLOCK_DV, TILE)
    k_tile = load_keys(k_rows, n_start, FEATURES.HEADDIM, BLOCK_D, TILE, True)
    v_tile = load_keys(v_rows, n_start, FEATURES.HEADDIM_V, BLOCK_DV, TILE, True)
    acc_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    blocks = query_blocks(n_start, lengths, numbers, FEATURES, TILE.BLOCK_M, BLOCK_N)
    for head in range(head_k * FEATURES.GROUP, (head_k + 1) * FEATURES.GROUP):
        slope = load_slope(optionals, batch, head, FEATURES)
        q_rows = open_queries(q, batch, head, sizes.seqlen_q, FEATURES.HEADDIM, BLOCK_D, TILE)
        do_rows = open_queries(dout, batch, head, sizes.seqlen_q, FEATURES.HEADDIM_V, BLOCK_DV, TILE)
        stat_rows = row_stats(stats[0], batch, head, sizes), row_stats(stats[1], batch, head, sizes)
        for i in range(count_partial(blocks)):
            m_start = partial_block(blocks, i) * TILE.BLOCK_M
            acc_dk, acc_dv = add_query_tile(
                acc_dk, acc_dv, k_tile, v_tile, q_rows, do_rows, stat_rows, m_start, n_start, slope, lengths, numbers, FEATURES, TILE, True
            )
        for m_block in range(blocks.full_first, blocks.full_stop):
            m_start = m_block * TILE.BLOCK_M
            acc_dk, acc_dv = add_query_tile(
                acc_dk, acc_dv, k_tile, v_tile, q_rows, do_rows, stat_rows, m_start, n_start, slope, lengths, numbers, FEATURES, TILE, False
            )

    # keys past seqused_k exist in memory and get gradient 0
    is_key = (n_start + tl.arange(0, BLOCK_N) < lengths.seqlen_k)[:, None]
    acc_dk = tl.where(is_key, acc_dk * numbers.scale, 0.0)
    acc_dv = tl.where(is_key, acc_dv, 0.0)
    store_rows(dk, batch, head_k, acc_dk, n_start, sizes.seqlen_k, BLOCK_N, FEATURES.HEADDIM, BLOCK_D)
    store_rows(dv, batch, head_k, acc_dv, n_start, sizes.seqlen_k, BLOCK_N, FEATURES.HEADDIM_V, BLOCK_DV)
