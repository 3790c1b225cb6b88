"""Operands of wgmma: scores in registers, the sums of their rows, tiles without their padding."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .layouts import accumulator, first_slice, left_operand, row_of


@gluon.jit
def operand(p, O_LAYOUT: gl.constexpr):
    """A tile as wgmma's left operand: the registers stay where they are."""
    return gl.convert_layout(p, left_operand(O_LAYOUT))


@gluon.jit
def row_factor(x, layout: gl.constexpr):
    """One number per row, in a slice of this layout."""
    return gl.convert_layout(x, row_of(layout))


@gluon.jit
def row_sums(p):
    """Sums over keys, as far as one thread holds a row: (64, 4). The four threads of a row meet
    once a tile, instead of once a block.
    """
    # A thread holds columns 8 i + 2 t and 8 i + 2 t + 1
    even, odd = gl.split(p.reshape([64, p.shape[1] // 8, 4, 2]))
    return sum_in_order(even + odd, before=None)


@gluon.jit
def sum_in_order(x, before):
    """`before`, if anything is, and the n parts of (64, n, 4), from the first on: (64, 4).

    `gl.sum` does so in Triton 3.6. In later versions it adds as a tree, which has another sum, and
    the exponentials of a block begin later (headdims 64 and 128: 1.5 to 2 %).
    """
    if x.shape[1] == 1:
        part = x.reshape([64, 4])
        return part if before is None else before + part
    else:
        halves = x.reshape([64, 2, x.shape[1] // 2, 4]).permute(0, 2, 3, 1)
        first, last = gl.split(halves)
        return sum_in_order(last, before=sum_in_order(first, before=before))


@gluon.jit
def add_sums(l_i, alpha, sums):
    """The sums of a block, to those before it."""
    layout: gl.constexpr = l_i.type.layout
    return l_i * row_factor(alpha, layout)[:, None] + sums


@gluon.jit
def whole_sums(l_i, layout: gl.constexpr):
    """The sums of whole rows."""
    return gl.convert_layout(gl.sum(l_i, 1), layout)


@gluon.jit
def multiply_rows(
    left, right, first, HAS_FIRST: gl.constexpr, COLUMNS: gl.constexpr, START: gl.constexpr = 0
):
    """Starts `first` + left right^T, of two tiles of rows in shared memory, over their COLUMNS."""
    WIDTH: gl.constexpr = first_slice(COLUMNS)
    if WIDTH < left.shape[1]:
        columns = left.slice(START, WIDTH, 1), right.slice(START, WIDTH, 1).permute((1, 0))
    else:
        columns = left, right.permute((1, 0))
    sum = warpgroup_mma(columns[0], columns[1], first, use_acc=HAS_FIRST, is_async=True)
    if COLUMNS > WIDTH:
        return multiply_rows(left, right, sum, True, COLUMNS - WIDTH, START + WIDTH)
    else:
        return sum


@gluon.jit
def no_columns(COLUMNS: gl.constexpr):
    """(64, COLUMNS) zeros, in pieces: an accumulator has a power of two of columns."""
    WIDTH: gl.constexpr = first_slice(COLUMNS)
    zeros = gl.zeros([64, WIDTH], gl.float32, accumulator(WIDTH))
    if COLUMNS > WIDTH:
        return (zeros,) + no_columns(COLUMNS - WIDTH)
    else:
        return (zeros,)


@gluon.jit
def multiply_columns(left, right, pieces, START: gl.constexpr = 0):
    """Starts `pieces` + left right, of a tile in registers and one in shared memory, over the
    columns that the pieces have.
    """
    WIDTH: gl.constexpr = pieces[0].shape[1]
    columns = right.slice(START, WIDTH, 1) if WIDTH < right.shape[1] else right
    left_piece = operand(left, accumulator(WIDTH))
    sum = warpgroup_mma(left_piece, columns, pieces[0], is_async=True)
    if len(pieces) > 1:
        return (sum,) + multiply_columns(left, right, pieces=pieces[1:], START=START + WIDTH)
    else:
        return (sum,)


@gluon.jit
def wait_for_columns(pending, PENDING: gl.constexpr = 0):
    """The pieces of a product, once all but PENDING wgmma are done."""
    if len(pending) > 1:
        return warpgroup_mma_wait(PENDING, deps=pending)
    else:
        return (warpgroup_mma_wait(PENDING, deps=pending),)


@gluon.jit
def joined(pieces, COLUMNS: gl.constexpr):
    """The pieces of an accumulator side by side, and zeros up to COLUMNS: nothing moves."""
    HALF: gl.constexpr = COLUMNS // 2
    WIDTH: gl.constexpr = pieces[0].shape[1]
    if WIDTH == COLUMNS:
        return pieces[0]
    else:
        left = joined(pieces, HALF)
        right = gl.zeros([64, HALF], gl.float32, accumulator(HALF))
        if WIDTH == HALF and len(pieces) > 1:
            right = joined(pieces[1:], HALF)
        whole = gl.join(left, right).permute(0, 2, 1).reshape([64, COLUMNS])
        return gl.convert_layout(whole, accumulator(COLUMNS))
