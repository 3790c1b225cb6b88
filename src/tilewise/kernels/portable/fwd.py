"""The forward: FlashAttention-2, algorithm 1 (Dao 2023, arXiv 2307.08691).

A program computes BLOCK_M queries of one head. It loops over the keys in tiles of BLOCK_N, first
the partial ones, which need a mask, then the full ones, and normalises the output at the end:

    O = (1 / l) sum_j exp(S_j - m) V_j        lse = m + log l
"""

import triton
import triton.language as tl

from ...tile.bounds import count_full, count_partial, full_block, key_blocks, partial_block
from ...tile.schedule import find_query_tile
from ...tile.softmax import finish, load_sink
from ..common.io import from_row, load_once, row_stats, store_rows
from ..common.keys import open_keys
from .step import RowState, attend


@triton.jit
def attn_fwd_kernel(
    q, k, v, out, lse, optionals, sizes, numbers, FEATURES: tl.constexpr, TILE: tl.constexpr
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
        if batch >= sizes.packed:  # the grid has programs enough for any lengths
            return
    m_start = m_block * BLOCK_M
    q_idx = m_start + tl.arange(0, BLOCK_M)
    offsets, seq, k_rows, v_rows = open_keys(
        k, v, head, batch, optionals, sizes, numbers, FEATURES, TILE
    )
    batch = offsets.batch
    seqlen_q = seq.lengths.seqlen_q
    q, out = from_row(q, offsets.first_q), from_row(out, offsets.first_q)
    # (BLOCK_M, BLOCK_D)
    q_tile = load_once(q, batch, head, m_start, seqlen_q, BLOCK_M, D, BLOCK_D)

    state = RowState(
        tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    blocks = key_blocks(m_start, seq, FEATURES, TILE)
    SPLIT: tl.constexpr = FEATURES.MASK_N // BLOCK_N
    # Without a band the partial run is a ragged tail, if that: not worth starting a pipeline for
    # (headdim 256 keeps it: without, its full loop spills 32 bytes on sm_90)
    HAS_MASK: tl.constexpr = (
        FEATURES.LEFT or FEATURES.RIGHT or FEATURES.ENDS or FEATURES.MASK_MOD is not None
    )
    TAIL_STAGES: tl.constexpr = None if HAS_MASK or BLOCK_D > 128 else 1
    for i in tl.range(count_partial(blocks, SPLIT), num_stages=TAIL_STAGES):
        n_start = partial_block(blocks, i, SPLIT) * BLOCK_N
        state = attend(state, q_tile, k_rows, v_rows, n_start, m_start, seq, FEATURES, TILE, True)
    # A block mask does not include seqused_k
    PADDED: tl.constexpr = SPLIT > 0 and FEATURES.SEQUSED_K
    for i in range(count_full(blocks, SPLIT)):
        n_start = full_block(blocks, i, SPLIT) * BLOCK_N
        state = attend(state, q_tile, k_rows, v_rows, n_start, m_start, seq, FEATURES, TILE, PADDED)

    sink = load_sink(optionals, head, FEATURES)
    rescale, row_lse = finish(state.m_i, state.l_i, sink, FEATURES)
    acc_o = state.acc_o * (rescale * numbers.dropout_factor)[:, None]
    if FEATURES.PACKED:  # rows that are not used
        acc_o = tl.where((q_idx < seqlen_q)[:, None], acc_o, 0.0)
        row_lse = tl.where(q_idx < seqlen_q, row_lse, float("-inf"))
    store_rows(out, batch, head, acc_o, m_start, offsets.rows_q, BLOCK_M, DV, BLOCK_DV)
    lse_row = row_stats(lse, batch, head, sizes) + offsets.first_q
    tl.store(lse_row + q_idx, row_lse, mask=q_idx < offsets.rows_q)
