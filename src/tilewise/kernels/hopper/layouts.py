"""Layouts of tiles in a warpgroup's registers or in shared memory.

A warpgroup is four warps. In one wgmma instruction each warp computes 16 rows; a thread holds pairs
of neighbouring columns of two of them, so a row is spread over four threads and no wider: a row's
maximum is two shuffles away.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WARPGROUP_ROWS = gl.constexpr(64)  # the M of every wgmma
WARPGROUP_WARPS = gl.constexpr(4)


@gluon.constexpr_function
def accumulator(columns):
    """A (64, columns) fp32 tile as wgmma leaves it; of more rows 64 after 64."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def transposed_accumulator(rows, columns):
    """A (rows, columns) fp32 tile whose transpose wgmma left: columns lie over lanes and warps."""
    registers = [[1, 0], [0, 8], *doublings(8, rows, dim=0), *doublings(64, columns, dim=1)]
    lanes = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]
    over_warps = [[0, 16], [0, 32]]
    return gl.DistributedLinearLayout(registers, lanes, over_warps, [], [rows, columns])


@gluon.constexpr_function
def numbers_of_warps(rows):
    """(rows, 4), one number for each row and warp: a thread has all of the rows that it has in a
    transposed accumulator.
    """
    registers = [[1, 0], *doublings(8, rows, dim=0), [0, 1], [0, 2]]
    lanes = [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [rows, 4])


@gluon.constexpr_function
def doublings(first, stop, dim):
    """Bases of first, 2 first, ... below stop, in a dimension of two."""
    steps = [first << i for i in range((stop // first).bit_length() - 1)]
    return [[step, 0] if dim == 0 else [0, step] for step in steps]


@gluon.constexpr_function
def row_of(layout):
    """The layout of one number per row of a tile."""
    return gl.SliceLayout(1, layout)


@gluon.constexpr_function
def column_of(layout):
    """The layout of one number per column of a tile."""
    return gl.SliceLayout(0, layout)


@gluon.constexpr_function
def pairs_of(columns):
    """(64, columns) pairs of neighbours, each in the thread that has both in an accumulator."""
    above = [[0, 4 << i] for i in range((columns // 4).bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [[8, 0], *above], lanes, [[16, 0], [32, 0]], [], [64, columns]
    )


@gluon.constexpr_function
def runs_of_pairs(columns):
    """The layout of `pairs_of` with two neighbouring pairs per thread, wide enough for memory."""
    above = [[0, 8 << i] for i in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [8, 0], *above], lanes, [[16, 0], [32, 0]], [], [64, columns]
    )


@gluon.constexpr_function
def half_groups():
    """The half groups of dropout in a (64, 16) accumulator, keys down: (16, 8), two rows of which
    are four keys' and a column two queries'. One a thread, of the two threads that need it.
    """
    return gl.DistributedLinearLayout(
        [], [[0, 2], [0, 4], [0, 1], [1, 0], [2, 0]], [[4, 0], [8, 0]], [], [16, 8]
    )


@gluon.constexpr_function
def quads():
    """(32, 8) times two keys, 8 apart, and two queries, 8 apart: each in the thread that has these
    pairs in an accumulator, keys down.
    """
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1]], lanes, [[8, 0], [16, 0]], [], [32, 8])


@gluon.constexpr_function
def left_operand(accumulator_layout):
    """A tile of 16-bit elements as wgmma reads its A operand from registers: P, for P V."""
    return gl.DotOperandLayout(0, accumulator_layout, 2)


@gluon.constexpr_function
def fp8_accumulator(columns):
    """The accumulator of a product of 8-bit operands, which wgmma sums 32 elements at a time: every
    number is where `accumulator` has it.
    """
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.constexpr_function
def fp8_left_operand(columns):
    """A tile of 8-bit elements as wgmma reads its A operand, for an accumulator of `columns`."""
    return gl.DotOperandLayout(0, fp8_accumulator(columns), 4)


@gluon.constexpr_function
def shared(rows, columns, dtype):
    """A (rows, columns) tile as TMA writes and wgmma reads it: swizzled in rows of 128 bytes, so
    that neither meets a bank conflict.
    """
    return gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)


@gluon.constexpr_function
def column_groups(columns):
    """In how many tiles, side by side, rows of so many columns lie in shared memory: a tile has a
    power of two of them, and 192 are three of 64.
    """
    return 3 if columns == 192 else 1


@gluon.constexpr_function
def used_columns(headdim, padded):
    """How many of `padded` columns a product takes, 96 of 128 for headdim 80: a slice begins at
    128 bytes, as a swizzle does, if every one before it has a multiple of 64.
    """
    return min(-(-headdim // 32) * 32, padded)


@gluon.constexpr_function
def computed_columns(headdim_v, padded, is_flat):
    """The columns of O that are computed, of heads of V that do not begin in columns of another.
    96 for 128 gain nothing (H200, sustained, 0.99 to 1.01); 160 for 256 gain 1.09, and 192 1.14.
    """
    used = used_columns(headdim_v, padded)
    return used if used in (160, 192) and not is_flat else padded


@gluon.constexpr_function
def first_slice(columns):
    """The widest slice that so many columns begin with: a tile has a power of two of them."""
    return 1 << (columns.bit_length() - 1)


@gluon.constexpr_function
def wider_half(columns):
    """The columns of the first of two parts of a tile, 64 of 96, whose widths are powers of two."""
    return first_slice(columns - 1)


@gluon.constexpr_function
def by_register(size):
    """(size,): four neighbours a thread, then the threads of a warpgroup, then their next four."""
    slower = [[512 << i] for i in range((size // 512).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[1], [2], *slower], [[4], [8], [16], [32], [64]], [[128], [256]], [], [size]
    )
