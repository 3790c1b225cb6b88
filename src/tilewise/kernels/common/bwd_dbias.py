"""The gradient of a bias: one program a tile of it, which sums dS over everything that shares it.

    dBias[b, h, i, j] = sum of dS over the batches, heads, queries and keys that read that element

dS is recomputed as for dQ, so that no atomics are needed: the same bits in every run.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from ...tile.bounds import key_blocks
from ...tile.seqlen import modifiers_of, sequence_of
from .bwd_step import load_lse, recompute, stats_rows
from .io import load_once, load_stats, multiply_rows, open_rows


class Sharing(NamedTuple):
    """For each dimension, the tiles that a bias has, and how many tiles of scores share one."""

    heads: tl.tensor
    m_blocks: tl.tensor
    n_blocks: tl.tensor
    per_batch: tl.tensor  # as the rest: 1 where the bias has a dimension, else all there are
    per_head: tl.tensor
    per_row: tl.tensor
    per_column: tl.tensor


def sharing_of(dbias, q, k, tile) -> tuple[Sharing, int]:
    """How a bias is shared, by its gradient's shape, and how many tiles it has in all."""
    tiles = triton.cdiv(q.shape[1], tile.BLOCK_M), triton.cdiv(k.shape[1], tile.BLOCK_N)
    of_scores = q.shape[0], q.shape[2], *tiles
    of_bias = [1 if n == 1 else count for n, count in zip(dbias.shape, of_scores)]
    _, heads, m_blocks, n_blocks = of_bias
    batch, head, row, column = (count // n for n, count in zip(of_bias, of_scores))
    shares = dict(per_batch=batch, per_head=head, per_row=row, per_column=column)
    return Sharing(heads, m_blocks, n_blocks=n_blocks, **shares), math.prod(of_bias)


@triton.jit
def add_scores(
    acc,
    q,
    k,
    v,
    dout,
    stats,
    seq,
    m_start,
    n_start,
    sizes,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
):
    """dS of one tile of scores, added."""
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    D: tl.constexpr = FEATURES.HEADDIM
    DV: tl.constexpr = FEATURES.HEADDIM_V
    head_k = seq.head // FEATURES.GROUP
    seqlen_q, seqlen_k, _ = seq.lengths
    q_idx = m_start + tl.arange(0, BLOCK_M)
    lse_row, delta_row, rest = stats_rows(stats, seq.batch, seq.head, 0, sizes)
    row = load_lse(lse_row, rest, q_idx, seq.lengths, stats[2] is not None, FEATURES, 1)
    delta = load_stats(delta_row, q_idx, seq.lengths, 0.0, True)
    delta = delta[:, None]
    PRECISION: tl.constexpr = FEATURES.PRECISION
    if TILE.CHUNK > 0:
        q_rows = open_rows(q, seq.batch, seq.head, seqlen_q, BLOCK_M, D, TILE.BLOCK_D, False)
        do_rows = open_rows(dout, seq.batch, seq.head, seqlen_q, BLOCK_M, DV, TILE.BLOCK_DV, False)
        k_rows = open_rows(k, seq.batch, head_k, seqlen_k, BLOCK_N, D, TILE.BLOCK_D, False)
        v_rows = open_rows(v, seq.batch, head_k, seqlen_k, BLOCK_N, DV, TILE.BLOCK_DV, False)
        qk = multiply_rows(
            q_rows, k_rows, m_start, n_start, BLOCK_M, BLOCK_N, D, TILE.CHUNK, PRECISION
        )
        dp = multiply_rows(
            do_rows, v_rows, m_start, n_start, BLOCK_M, BLOCK_N, DV, TILE.CHUNK, PRECISION
        )
    else:
        q_tile = load_once(q, seq.batch, seq.head, m_start, seqlen_q, BLOCK_M, D, TILE.BLOCK_D)
        do = load_once(dout, seq.batch, seq.head, m_start, seqlen_q, BLOCK_M, DV, TILE.BLOCK_DV)
        k_tile = load_once(k, seq.batch, head_k, n_start, seqlen_k, BLOCK_N, D, TILE.BLOCK_D)
        v_tile = load_once(v, seq.batch, head_k, n_start, seqlen_k, BLOCK_N, DV, TILE.BLOCK_DV)
        qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
    tile = recompute(qk, dp, row, delta, m_start, n_start, seq, FEATURES, TILE, True, False)
    return acc + tile.ds


@triton.jit
def attn_bwd_dbias_kernel(
    q,
    k,
    v,
    dout,
    dbias,
    stats,
    optionals,
    sizes,
    numbers,
    sharing,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
):
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    tile = tl.program_id(0)
    n_own = tile % sharing.n_blocks
    m_own = tile // sharing.n_blocks % sharing.m_blocks
    head_own = tile // sharing.n_blocks // sharing.m_blocks % sharing.heads
    batch_own = tile // sharing.n_blocks // sharing.m_blocks // sharing.heads

    modifiers = modifiers_of(optionals)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    pairs = sharing.per_row * sharing.per_column
    for i in range(sharing.per_batch * sharing.per_head * pairs):
        n_block = n_own + i % sharing.per_column
        m_block = m_own + i // sharing.per_column % sharing.per_row
        head = head_own + i // pairs % sharing.per_head
        batch = batch_own + i // pairs // sharing.per_head
        seq = sequence_of(batch, head, sizes, optionals, modifiers, numbers, FEATURES)
        m_start, n_start = m_block * BLOCK_M, n_block * BLOCK_N
        is_seen = True
        if FEATURES.MASK_M == 0:
            blocks = key_blocks(m_start, seq, FEATURES, TILE)
            is_seen = (n_block >= blocks.first) & (n_block < blocks.stop)
        if is_seen:
            acc = add_scores(
                acc, q, k, v, dout, stats, seq, m_start, n_start, sizes, FEATURES, TILE
            )

    target = dbias.ptr + batch_own.to(tl.int64) * dbias.batch + head_own.to(tl.int64) * dbias.head
    rows = m_own * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = n_own * BLOCK_N + tl.arange(0, BLOCK_N)
    if dbias.row == 0:
        acc = tl.where((tl.arange(0, BLOCK_M) == 0)[:, None], tl.sum(acc, 0)[None, :], 0.0)
    if dbias.column == 0:
        acc = tl.where((tl.arange(0, BLOCK_N) == 0)[None, :], tl.sum(acc, 1)[:, None], 0.0)
    row_limit = tl.where(dbias.row == 0, 1, sizes.seqlen_q)
    column_limit = tl.where(dbias.column == 0, 1, sizes.seqlen_k)
    exists = (rows < row_limit)[:, None] & (columns < column_limit)[None, :]
    offsets = rows.to(tl.int64)[:, None] * dbias.row + columns.to(tl.int64)[None, :] * dbias.column
    tl.store(target + offsets, acc.to(dbias.ptr.dtype.element_ty), mask=exists)
