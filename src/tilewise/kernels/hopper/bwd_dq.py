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
    x = in_rows(tl.load(tile + tl.arange(0, ROWS * BLOCK_D)), ROWS, BLOCK_D) * numbers.scale
    store_rows(dq, batch, head, x, m_block * ROWS, sizes.seqlen_q, ROWS, FEATURES.HEADDIM, BLOCK_D)


@triton.jit
def in_rows(x, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of dQ, from the order that `add_dq` of bwd_mma.py leaves them in: 64 rows, 8 columns
    of them, four warps of 16 rows, in which a thread has 2 columns of two rows that are 8 apart.
    Halves of rows, halves and quarters of columns all lie like this.
    """
    x = x.reshape(ROWS // 64, BLOCK_D // 8, 4, 8, 4, 2, 2)
    return x.permute(0, 2, 5, 3, 1, 4, 6).reshape(ROWS, BLOCK_D)
