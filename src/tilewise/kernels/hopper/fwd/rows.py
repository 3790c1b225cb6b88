"""Rows of a tile: which query and head they are, and where they begin in memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .varlen import place_in, rows_in


@gluon.jit
def query_of_row(m_start, rows, TILE: gl.constexpr):
    """The query of a row of the tile. Where PACK heads share it they are neighbouring rows."""
    return m_start + rows // TILE.PACK


@gluon.jit
def head_of_row(head, rows, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The query head of a row; PACK is the group rounded up, and rows past it are padding."""
    if TILE.PACK > 1:
        return head * FEATURES.GROUP + gl.minimum(rows % TILE.PACK, FEATURES.GROUP - 1)
    else:
        return head


@gluon.jit
def rows_of(x, work, rows, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """Where rows of a tile begin in a `Strided` tensor, and which of them exist."""
    q_idx = query_of_row(work.start, rows, TILE=TILE)
    exists = q_idx < rows_in(work, call, FEATURES=FEATURES)
    if TILE.PACK > 1:
        exists = exists & (rows % TILE.PACK < FEATURES.GROUP)
    batch, first_q = place_in(work, FEATURES)
    heads = gl.to_tensor(head_of_row(work.head, rows, FEATURES=FEATURES, TILE=TILE))
    begins = x.ptr + gl.to_tensor(batch).to(gl.int64) * x.batch + heads.to(gl.int64) * x.head
    # Another in each tile to the compiler, which else keeps its products, more than registers hold
    step = gl.where(work.start >= 0, x.row, 0)
    return begins + (first_q + q_idx).to(gl.int64) * step, exists
