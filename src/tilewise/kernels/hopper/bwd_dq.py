"""After the backward: dQ, from its fp32 accumulator to the tensor that comes back."""

import triton
import triton.language as tl

from ...tile.schedule import query_tile
from ..io import store_rows


@triton.jit
def hopper_bwd_dq_kernel(
    accumulated, dq, sizes, numbers, FEATURES: tl.constexpr, TILE: tl.constexpr
):
    ROWS: tl.constexpr = TILE.BLOCK_M
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    m_block, head, batch = query_tile(tl.program_id(0), sizes, FEATURES, ROWS)
    heads = batch.to(tl.int64) * sizes.nheads + head
    tile = accumulated + (heads * tl.cdiv(sizes.seqlen_q, ROWS) + m_block) * (ROWS * BLOCK_D)
    rows = tl.arange(0, ROWS)[:, None]
    cells = cell_of(rows, tl.arange(0, BLOCK_D)[None, :], TILE.BLOCK_N, BLOCK_D)
    x = tl.load(tile + cells) * numbers.scale
    store_rows(dq, batch, head, x, m_block * ROWS, sizes.seqlen_q, ROWS, FEATURES.HEADDIM, BLOCK_D)


@triton.jit
def cell_of(row, column, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Where `add_dq` of bwd_mma.py puts an element of 128 rows: after the parts of a block, halves
    of its rows where it is tall and else of its columns, come fours of a thread's registers, then
    threads. Quarters of columns lie as halves do.
    """
    COLUMNS: tl.constexpr = BLOCK_D if BLOCK_M == 128 else BLOCK_D // 2
    part = row // 64 if BLOCK_M == 128 else row // 64 * 2 + column // COLUMNS
    thread = row % 64 // 16 * 32 + row % 8 * 4 + column // 2 % 4
    register = row // 8 % 2 * 2 + column % 2
    return part * (64 * COLUMNS) + (column % COLUMNS // 8 * 128 + thread) * 4 + register
