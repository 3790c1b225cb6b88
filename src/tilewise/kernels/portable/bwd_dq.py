"""dQ: one program a tile of queries, which loops over the same keys as the forward.

FlashAttention-2's algorithm 2 adds to dQ from programs of keys, with atomics. Here the program of a
tile of queries recomputes S and dP instead: two more matmuls a tile, no atomics, no fp32 buffer,
and the same bits in every run.
"""

import triton
import triton.language as tl

from ...tile.bounds import count_full, count_partial, full_block, key_blocks, partial_block
from ...tile.schedule import find_query_tile
from ..common.io import from_row, store_rows
from .queries import open_queries, recompute_block


@triton.jit
def add_key_tile(
    dq, queries, n_start, FEATURES: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr
):
    """One tile of keys into the dQ of its queries."""
    block = recompute_block(queries, queries.delta_or_dlse, n_start, FEATURES, TILE, MASKED)
    # dQ += dS K
    return tl.dot(block.dqk.to(block.k.dtype), block.k, dq, input_precision=FEATURES.PRECISION)


@triton.jit
def attn_bwd_dq_kernel(
    q, k, v, dout, dq, stats, optionals, sizes, numbers, FEATURES: tl.constexpr, TILE: tl.constexpr
):
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    program, lane = tl.program_id(0), tl.arange(0, 32)
    m_block, head, batch = find_query_tile(program, lane, sizes, optionals, FEATURES, BLOCK_M)
    if FEATURES.PACKED:
        if batch >= sizes.packed:
            return
    tile = m_block, head, batch
    queries = open_queries(q, k, v, dout, stats, tile, optionals, sizes, numbers, FEATURES, TILE)

    acc_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    blocks = key_blocks(queries.m_start, queries.seq, FEATURES, TILE)
    SPLIT: tl.constexpr = FEATURES.MASK_N // BLOCK_N
    for i in range(count_partial(blocks, SPLIT)):
        n_start = partial_block(blocks, i, SPLIT) * BLOCK_N
        acc_dq = add_key_tile(acc_dq, queries, n_start, FEATURES, TILE, True)
    PADDED: tl.constexpr = SPLIT > 0 and FEATURES.SEQUSED_K  # which a block mask does not know
    for i in range(count_full(blocks, SPLIT)):
        n_start = full_block(blocks, i, SPLIT) * BLOCK_N
        acc_dq = add_key_tile(acc_dq, queries, n_start, FEATURES, TILE, PADDED)
    acc_dq *= numbers.scale
    dq = from_row(dq, queries.offsets.first_q)
    rows = queries.offsets.rows_q
    batch, m_start = queries.offsets.batch, queries.m_start
    store_rows(dq, batch, head, acc_dq, m_start, rows, BLOCK_M, FEATURES.HEADDIM, BLOCK_D)
