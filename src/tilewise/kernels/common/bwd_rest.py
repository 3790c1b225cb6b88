"""What the lse in fp32 has lost, of rows whose scores are large: at -1e9, a mask as a bias, all of
log l, so that n keys would have P = 1 each.

    rest = log2(sum exp(S - lse))        P = exp(S - lse) / 2^rest

Tiles without such a row, as almost all are, read their lse and write zeros.
"""

import triton
import triton.language as tl

from ...tile.bounds import count_full, count_partial, full_block, key_blocks, partial_block
from ...tile.mask import apply_mask
from ...tile.schedule import find_query_tile
from ...tile.score import score
from ...tile.softmax import LOG2_E, load_sink, lse_or_inf
from .io import from_row, load_once, load_rows, load_stats, row_stats
from .keys import open_keys

LARGE = tl.constexpr(4096.0)  # of an lse in fp32 whose rounding is 2^-12, a relative error of P


@triton.jit
def add_sums(
    sums, q, k, lse, m_start, n_start, seq, FEATURES: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys into the sums of its queries."""
    D: tl.constexpr = FEATURES.HEADDIM
    k_tile = load_rows(k, n_start, TILE.BLOCK_N, D, TILE.BLOCK_D, TILE.DESCRIPTORS, MASKED)
    qk = tl.dot(q, tl.trans(k_tile), input_precision=FEATURES.PRECISION)
    q_idx = m_start + tl.arange(0, TILE.BLOCK_M)[:, None]
    k_idx = n_start + tl.arange(0, TILE.BLOCK_N)[None, :]
    s = score(qk, q_idx, k_idx, seq, FEATURES).s
    if MASKED:
        s = apply_mask(s, q_idx, k_idx, seq, FEATURES)
    return sums + tl.sum(tl.exp2((s - lse[:, None]) * LOG2_E), 1)


@triton.jit
def attn_bwd_rest_kernel(
    q, k, v, lse, rest, optionals, sizes, numbers, FEATURES: tl.constexpr, TILE: tl.constexpr
):
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    D: tl.constexpr = FEATURES.HEADDIM
    tile, lane = tl.program_id(0), tl.arange(0, 32)
    m_block, head, batch = find_query_tile(tile, lane, sizes, optionals, FEATURES, BLOCK_M)
    if FEATURES.PACKED:
        if batch >= sizes.packed:
            return
    m_start = m_block * BLOCK_M
    q_idx = m_start + tl.arange(0, BLOCK_M)
    offsets, seq, k_rows, _ = open_keys(
        k, v, head, batch, optionals, sizes, numbers, FEATURES, TILE
    )
    batch = offsets.batch
    seqlen_q = seq.lengths.seqlen_q
    row = row_stats(lse, batch, head, sizes) + offsets.first_q
    row_lse = load_stats(row, q_idx, seq.lengths, float("-inf"), True)
    is_large = (tl.abs(row_lse) > LARGE) & (row_lse != float("-inf"))
    found = tl.zeros([BLOCK_M], tl.float32)
    if tl.max(is_large.to(tl.int32), 0) > 0:
        row_lse = lse_or_inf(row_lse)
        q = from_row(q, offsets.first_q)
        q_tile = load_once(q, batch, head, m_start, seqlen_q, BLOCK_M, D, TILE.BLOCK_D)
        sums = tl.zeros([BLOCK_M], tl.float32)
        if FEATURES.SINKS:
            sums += tl.exp2(load_sink(optionals, head, FEATURES) - row_lse * LOG2_E)
        blocks = key_blocks(m_start, seq, FEATURES, TILE)
        SPLIT: tl.constexpr = FEATURES.MASK_N // BLOCK_N
        PADDED: tl.constexpr = SPLIT > 0 and FEATURES.SEQUSED_K
        for i in range(count_partial(blocks, SPLIT)):
            n_start = partial_block(blocks, i, SPLIT) * BLOCK_N
            sums = add_sums(
                sums, q_tile, k_rows, row_lse, m_start, n_start, seq, FEATURES, TILE, True
            )
        for i in range(count_full(blocks, SPLIT)):
            n_start = full_block(blocks, i, SPLIT) * BLOCK_N
            sums = add_sums(
                sums, q_tile, k_rows, row_lse, m_start, n_start, seq, FEATURES, TILE, PADDED
            )
        found = tl.where(is_large, tl.log2(tl.where(is_large, sums, 1.0)), 0.0)
    target = row_stats(rest, batch, head, sizes) + offsets.first_q
    tl.store(target + q_idx, found, mask=q_idx < seqlen_q)
