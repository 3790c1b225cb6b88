"""The sums of P over keys, in one order whichever operand the rows are: of a tile's rows, or with
operands swapped of its columns.

Of 64 keys, key 16 w + 8 h + g. A thread has both h of some (w, g) in either layout: of one g and w
with operands swapped, of two g and all w else. So it sums over h and the blocks of a piece, and
after the piece sums over g and w are sums of pairs, in one order: of two numbers it decides no bit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def sums_of_threads(p):
    """The sums that each thread has of a block, (BLOCK_M, 4, 8)."""
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([M, N // 64, 4, 2, 8]), 3), 1)


@gluon.jit
def add_sums(l_i, alpha, p):
    """The sums of a block, to those before it."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, l_i.type.layout))
    factor = gl.convert_layout(alpha, layout, assert_trivial=True)
    return l_i * factor[:, None, None] + sums_of_threads(p)


@gluon.jit
def sums_of_warps(l_i):
    """Sums over g: (BLOCK_M, 4)."""
    M: gl.constexpr = l_i.shape[0]
    return gl.sum(gl.sum(gl.sum(l_i.reshape([M, 4, 2, 2, 2]), 2), 2), 2)


@gluon.jit
def whole_sums(of_warps):
    """Sums over w: (BLOCK_M,)."""
    M: gl.constexpr = of_warps.shape[0]
    return gl.sum(gl.sum(of_warps.reshape([M, 2, 2]), 1), 1)
