"""Rows in pieces of up to 16 bytes, as threads read and write them where TMA does not."""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TMA_UNIT = gl.constexpr(8)  # elements of 16 bits in 16 bytes


@gluon.constexpr_function
def piece_of(headdim):
    """The elements, up to 16 bytes, that the rows of a dense tensor are multiples of."""
    return math.gcd(TMA_UNIT.value, headdim)


@gluon.constexpr_function
def in_pieces(columns, piece, warps):
    """A tile whose threads have `piece` neighbours each, and whose warps have whole rows."""
    across = min(32, columns // piece)
    return gl.BlockedLayout([1, piece], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def pieces_of(begins, exists, columns, HEADDIM: gl.constexpr, PIECE: gl.constexpr):
    """Addresses of these columns of rows, and which of them exist: whole pieces."""
    BYTES: gl.constexpr = PIECE * begins.dtype.element_ty.primitive_bitwidth // 8
    ptrs = begins[:, None] + columns[None, :]
    ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [1, BYTES]), [1, PIECE])
    exist = exists[:, None] & ((columns >= 0) & (columns < HEADDIM))[None, :]
    return ptrs, gl.max_constancy(exist, [1, PIECE])
