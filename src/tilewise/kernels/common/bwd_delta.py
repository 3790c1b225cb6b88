"""Preprocessing of the backward: delta = rowsum(dO * O) - dlse, and the gradient of the sinks.

delta is what softmax's Jacobian subtracts from every dP of a row (FlashAttention-2, algorithm 2,
line 4). A gradient that comes in through lse adds dlse * P to dS, which is the same as a smaller
delta. A sink is a logit without a value: its dS is P_sink (0 - delta) with P_sink = exp(sink -
lse), summed here over a tile's rows and on the host over tiles.

Where dQ is accumulated in memory, this kernel zeroes its rows, and the semaphores that say so.

The main kernel may recompute P' = 2^rest P, of rows whose lse has lost a part (`bwd_rest`). As P
enters all gradients in products with dO and delta alone, a copy of dO comes times 2^-rest, and so
does delta.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ...tile.schedule import find_query_tile, query_tile
from ...tile.seqlen import lengths_in, offsets_of, padded_row
from ...tile.softmax import load_sink, lse_or_inf, lse_to_log2
from ...tile.types import Strided
from .io import from_row, load_once, row_stats, store_rows


class Accumulated(NamedTuple):
    """Memory of a backward by tiles of keys: this kernel fills it."""

    dq: tl.tensor  # (batch, nheads, padded, BLOCK_D), fp32; not written where no semaphores are
    stats: tl.tensor  # (batch, nheads, 2, padded), fp32: -lse and -delta
    padded: int  # seqlen_q in whole tiles; of packed sequences the end of `padded_row`
    lse_unit: float  # what the stored lse is a multiple of, in base 2
    delta_unit: float = 1.0  # and the stored delta: the factor of what dropout keeps


class Scaled(NamedTuple):
    """What is `Accumulated` where a bias or score function adds to scores: lse is natural there."""

    dq: tl.tensor
    stats: tl.tensor
    padded: int
    lse_unit: float
    delta_unit: float
    rest: tl.tensor  # what lse has lost, see `bwd_rest`
    dout: Strided  # of the main kernel: dO times 2^-rest, as delta then is


@triton.jit
def bwd_delta_kernel(
    out,
    dout,
    lse,
    dlse,
    delta,
    accumulated,
    dq_semaphore,
    sink_parts,
    optionals,
    sizes,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
):
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_DV: tl.constexpr = TILE.BLOCK_DV
    DV: tl.constexpr = FEATURES.HEADDIM_V
    tile = tl.program_id(0)
    if accumulated is not None:
        # The last heads first: the kernel behind begins with those whose dO and zeros are still in
        # the L2 cache (H100, sustained, 512 and 1Ki: 0.1 to 1 %)
        tile = tl.num_programs(0) - 1 - tile
    # Without an accumulator a row's delta needs no sequence: packed ones are one long one
    BY_SEQUENCE: tl.constexpr = FEATURES.PACKED and accumulated is not None
    if BY_SEQUENCE:
        lane = tl.arange(0, 32)
        m_block, head, batch = find_query_tile(tile, lane, sizes, optionals, FEATURES, BLOCK_M)
        if batch >= sizes.packed:
            return
        offsets = offsets_of(batch, sizes, optionals, FEATURES)
        first, seqlen_q = offsets.first_q, lengths_in(offsets, batch, optionals, FEATURES).seqlen_q
        padded_first = padded_row(first, batch, BLOCK_M)
        tile = head * (accumulated.padded // BLOCK_M) + padded_first // BLOCK_M + m_block
        batch = offsets.batch
        out, dout = from_row(out, first), from_row(dout, first)
    else:
        m_block, head, batch = query_tile(tile, sizes, FEATURES, BLOCK_M)
        first, seqlen_q, padded_first = 0, sizes.seqlen_q, 0
    m_start = m_block * BLOCK_M
    q_idx = m_start + tl.arange(0, BLOCK_M)
    exists = q_idx < seqlen_q

    o = load_once(out, batch, head, m_start, seqlen_q, BLOCK_M, DV, BLOCK_DV)
    do = load_once(dout, batch, head, m_start, seqlen_q, BLOCK_M, DV, BLOCK_DV)
    factor = 1.0
    IS_SCALED: tl.constexpr = FEATURES.NATURAL and accumulated is not None
    if IS_SCALED:
        rest = row_stats(accumulated.rest, batch, head, sizes) + first
        factor = tl.exp2(-tl.load(rest + q_idx, mask=exists, other=0.0))
        do = do.to(tl.float32) * factor[:, None]
        scaled = from_row(accumulated.dout, first)
        store_rows(scaled, batch, head, do, m_start, seqlen_q, BLOCK_M, DV, BLOCK_DV)
    row_delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    lse_rows = row_stats(lse, batch, head, sizes) + first
    lse_row = tl.load(lse_rows + q_idx, mask=exists, other=float("-inf"))
    if dlse is not None:
        dlse_rows = row_stats(dlse, batch, head, sizes) + first
        dlse_row = tl.load(dlse_rows + q_idx, mask=exists, other=0.0)
        # a row without keys has no gradient
        row_delta -= tl.where(lse_row == float("-inf"), 0.0, dlse_row * factor)
    if delta is not None:
        tl.store(row_stats(delta, batch, head, sizes) + q_idx, row_delta, mask=exists)
    if accumulated is not None:
        batch_head = batch.to(tl.int64) * sizes.nheads + head
        row = accumulated.stats + batch_head * 2 * accumulated.padded + padded_first
        # rows past the end count as rows without keys
        if IS_SCALED:
            tl.store(row + q_idx, -lse_or_inf(lse_row))
        else:
            tl.store(row + q_idx, lse_to_log2(lse_row) * (-1.0 / accumulated.lse_unit))
        minus_delta = -row_delta
        if FEATURES.DROPOUT:
            minus_delta *= 1.0 / accumulated.delta_unit
        tl.store(row + accumulated.padded + q_idx, minus_delta)
        if dq_semaphore is not None:  # int32, two a tile
            # A tile has a power of two of columns: 96 and 192 are three groups
            GROUPS: tl.constexpr = 3 if TILE.BLOCK_D % 3 == 0 else 1
            BLOCK_D: tl.constexpr = TILE.BLOCK_D // GROUPS
            cells = tl.arange(0, BLOCK_M)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
            zeros = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            row_of_dq = batch_head * accumulated.padded + padded_first + m_start
            for group in tl.static_range(GROUPS):
                first_cell = row_of_dq * (GROUPS * BLOCK_D) + group * BLOCK_M * BLOCK_D
                tl.store(accumulated.dq + first_cell + cells, zeros)
            tl.store(dq_semaphore + tile * 2 + tl.arange(0, 2), tl.zeros([2], tl.int32))
    if FEATURES.SINKS:
        p_sink = tl.exp2(load_sink(optionals, head, FEATURES) - lse_to_log2(lse_row))
        of_rows = p_sink * row_delta
        if FEATURES.PACKED:  # padding rows have no sink, and may hold anything
            of_rows = tl.where(lse_row == float("-inf"), 0.0, of_rows)
        tl.store(sink_parts + tile, -tl.sum(of_rows, 0))
