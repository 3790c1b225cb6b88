"""Postprocessing of the backward: dQ, from its fp32 accumulator to the returned tensor."""

import triton
import triton.language as tl
from triton.language.extra import cuda

from ....tile.schedule import find_query_tile
from ....tile.seqlen import offsets_of, padded_row
from ....tile.types import Strided
from ...common.io import from_row, store_rows
from .tile_counts import await_tiles, count_place, first_block_of


@triton.jit
def hopper_bwd_dq_kernel(
    accumulated,
    dq,
    counts,
    optionals,
    sizes,
    numbers,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    ROWS: tl.constexpr = TILE.BLOCK_M
    GROUPS: tl.constexpr = 3 if TILE.BLOCK_D % 3 == 0 else 1  # of columns: 96 or 192
    BLOCK_D: tl.constexpr = TILE.BLOCK_D // GROUPS
    # The last heads first, of which most is still in the L2 cache (H100, sustained, 512 and 1Ki:
    # together with the same in `bwd_delta_kernel` 0.4 to 1.5 %)
    tile, lane = tl.program_id(0), tl.arange(0, 32)
    if counts is None:
        tile = tl.num_programs(0) - 1 - tile
    m_block, head, batch = find_query_tile(tile, lane, sizes, optionals, FEATURES, ROWS)
    if FEATURES.PACKED:
        if batch >= sizes.packed:
            end_with_main(IS_EARLY)
            return
    offsets = offsets_of(batch, sizes, optionals=optionals, FEATURES=FEATURES)
    first = padded_row(offsets.first_q, batch, ROWS=ROWS) if FEATURES.PACKED else 0
    dq = from_row(dq, offsets.first_q)
    block = first_block_of(batch, head, first, sizes=sizes, FEATURES=FEATURES)
    if IS_EARLY:
        of_keys = head // FEATURES.GROUP * FEATURES.GROUP
        place = count_place(batch, of_keys, first, sizes=sizes, FEATURES=FEATURES)
        await_tiles(counts + place, offsets.rows_k, TILE.BLOCK_N)
    tile = accumulated + (block + m_block).to(tl.int64) * (ROWS * TILE.BLOCK_D)
    cells = tl.arange(0, ROWS * BLOCK_D)
    if GROUPS > 1:  # a block of 64 rows has one group behind the other
        cells += cells // (64 * BLOCK_D) * ((GROUPS - 1) * 64 * BLOCK_D)
    for group in tl.static_range(GROUPS):
        x = tl.load(tile + group * 64 * BLOCK_D + cells)
        x = in_rows(x, ROWS, BLOCK_D=BLOCK_D) * numbers.scale
        if FEATURES.DROPOUT:
            x *= numbers.dropout_factor
        columns = Strided(dq.ptr + group * BLOCK_D, dq.batch, dq.row, dq.head)
        store_rows(
            columns, offsets.batch, head, x, m_block * ROWS, offsets.rows_q, ROWS,
            FEATURES.HEADDIM - group * BLOCK_D, BLOCK_D,
        )  # fmt: skip
    end_with_main(IS_EARLY)


@triton.jit
def end_with_main(IS_EARLY: tl.constexpr):
    """What follows this kernel follows the main kernel, too: the last program waits for it."""
    if IS_EARLY:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            cuda.gdc_wait()


@triton.jit
def in_rows(x, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of dQ, from the order that `add_dq` of mma.py leaves them in: 64 rows, 8 columns
    of them, four warps of 16 rows, in which a thread has 2 columns of two rows that are 8 apart.
    Halves of rows, halves and quarters of columns all lie like this.
    """
    x = x.reshape(ROWS // 64, BLOCK_D // 8, 4, 8, 4, 2, 2)
    return x.permute(0, 2, 5, 3, 1, 4, 6).reshape(ROWS, BLOCK_D)
