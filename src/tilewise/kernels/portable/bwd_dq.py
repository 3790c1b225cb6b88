"""dQ: one program a tile of queries, which walks the same keys as the forward did.

FlashAttention-2's algorithm 2 adds to dQ from the programs that own keys, with atomics. Here the
queries' owner recomputes S and dP
instead: two more matmuls a tile, no atomics, no fp32 buffer, and the same bits in every run.
"""

import triton
import triton.language as tl

from ...tile.bounds import count_full, count_partial, full_block, key_blocks, partial_block
from ...tile.schedule import find_query_tile
from ...tile.seqlen import modifiers_of, place_of, sequence_of
from ...tile.softmax import lse_to_log2
from ..bwd_step import recompute
from ..io import (
    from_row,
    load_once,
    load_rows,
    load_stats,
    open_rows,
    row_stats,
    store_rows,
)


@triton.jit
def add_key_tile(
    dq,
    q,
    do,
    k,
    v,
    stats,
    m_start,
    n_start,
    seq,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One tile of keys into dQ; k and v are opened, stats are the rows' lse (base 2) and delta."""
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    D: tl.constexpr = FEATURES.HEADDIM
    DV: tl.constexpr = FEATURES.HEADDIM_V
    k_tile = load_rows(k, n_start, BLOCK_N, D, TILE.BLOCK_D, TILE.DESCRIPTORS, MASKED)
    v_tile = load_rows(v, n_start, BLOCK_N, DV, TILE.BLOCK_DV, TILE.DESCRIPTORS, MASKED)
    # S = Q K^T, dP = dO V^T: (BLOCK_M, BLOCK_N)
    qk = tl.dot(q, tl.trans(k_tile), input_precision=FEATURES.PRECISION)
    dp = tl.dot(do, tl.trans(v_tile), input_precision=FEATURES.PRECISION)
    lse, delta = stats[0][:, None], stats[1][:, None]
    tile = recompute(qk, dp, lse, delta, m_start, n_start, seq, FEATURES, TILE, MASKED, False)
    # dQ += dS K
    return tl.dot(tile.dqk.to(k_tile.dtype), k_tile, dq, input_precision=FEATURES.PRECISION)


@triton.jit
def attn_bwd_dq_kernel(
    q, k, v, dout, dq, stats, optionals, sizes, numbers, FEATURES: tl.constexpr, TILE: tl.constexpr
):
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    D: tl.constexpr = FEATURES.HEADDIM
    DV: tl.constexpr = FEATURES.HEADDIM_V
    tile, lane = tl.program_id(0), tl.arange(0, 32)
    m_block, head, batch = find_query_tile(tile, lane, sizes, optionals, FEATURES, BLOCK_M)
    if FEATURES.PACKED:
        if batch >= sizes.packed:
            return
    m_start = m_block * BLOCK_M
    q_idx = m_start + tl.arange(0, BLOCK_M)
    modifiers = modifiers_of(optionals)
    seq = sequence_of(batch, head, sizes, optionals, modifiers, numbers, FEATURES)
    place = place_of(batch, sizes, optionals, FEATURES)
    batch = place.batch
    q, dq = from_row(q, place.first_q), from_row(dq, place.first_q)
    k, v = from_row(k, place.first_k), from_row(v, place.first_k)
    dout = from_row(dout, place.first_q)

    seqlen_q = seq.lengths.seqlen_q
    seqlen_k = seq.lengths.seqlen_k
    head_k = head // FEATURES.GROUP
    k_rows = open_rows(k, batch, head_k, seqlen_k, BLOCK_N, D, BLOCK_D, TILE.DESCRIPTORS)
    v_rows = open_rows(v, batch, head_k, seqlen_k, BLOCK_N, DV, BLOCK_DV, TILE.DESCRIPTORS)
    q_tile = load_once(q, batch, head, m_start, seqlen_q, BLOCK_M, D, BLOCK_D)
    do = load_once(dout, batch, head, m_start, seqlen_q, BLOCK_M, DV, BLOCK_DV)
    lse_row = row_stats(stats[0], batch, head, sizes) + place.first_q
    delta_row = row_stats(stats[1], batch, head, sizes) + place.first_q
    lse = load_stats(lse_row, q_idx, seq.lengths, float("-inf"), True)
    delta = load_stats(delta_row, q_idx, seq.lengths, 0.0, True)
    rows = lse_to_log2(lse), delta

    acc_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    blocks = key_blocks(m_start, seq, FEATURES, TILE)
    SPLIT: tl.constexpr = FEATURES.MASK_N // BLOCK_N
    for i in range(count_partial(blocks, SPLIT)):
        n_start = partial_block(blocks, i, SPLIT) * BLOCK_N
        acc_dq = add_key_tile(
            acc_dq, q_tile, do, k_rows, v_rows, rows, m_start, n_start, seq, FEATURES, TILE, True
        )
    PADDED: tl.constexpr = SPLIT > 0 and FEATURES.SEQUSED_K  # which a block mask does not know
    for i in range(count_full(blocks, SPLIT)):
        n_start = full_block(blocks, i, SPLIT) * BLOCK_N
        acc_dq = add_key_tile(
            acc_dq, q_tile, do, k_rows, v_rows, rows, m_start, n_start, seq, FEATURES, TILE, PADDED
        )
    acc_dq *= numbers.scale
    store_rows(dq, batch, head, acc_dq, m_start, place.rows_q, BLOCK_M, D, BLOCK_D)
