"""q, k and v to e4m3, and V^T: the steps of `kernels/cpu/quantize.py`, in passes over the tensor.

    statistics   means and the largest magnitudes, where they are wanted (quantize_statistics.py)
    cast         the scale of a sequence and key head, then codes, or V^T; and once more of those
                 that had larger magnitudes than were found before
    loss         of V without its mean: what rounding took, of each block from the cast; and how far
                 it drifts

A program has ROWS rows of one head and one sequence, some at a time. q and k, which are treated
alike, are in one launch: two would wait for the last programs of the first. Sums of blocks are
stored by their number and added in order, so that repeats are bitwise equal.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from ...tile.fp8 import from_e4m3, not_constant, to_e4m3
from ..common import quantized
from ..common.io import head_of
from .fp8_fwd import address_of, load_number
from .fp8_order import key_of_column
from .hadamard import CHUNK, tiles_at_once
from .quantize_rows import (
    ROWS,
    WARPS,
    columns_of,
    find_block,
    find_columns,
    find_sequence,
    load_tiles,
    programs_of,
    rows_at_once,
    stages_of,
    stride_of,
)

ROOM = tl.constexpr(quantized.ROOM)


class Rounding(NamedTuple):
    """The rounding of blocks of V without its mean, in codes: (blocks, nheads, headdim), fp32."""

    lost: Any  # sums of what rounding takes; None of q and k
    squares: Any  # their sums, before rounding; None where no drift is wanted


@triton.jit
def load_scaled(operand, block, offs, first, inverse, FORM: tl.constexpr):
    """Tiles of rows times the inverse of the scale, less their means."""
    ROTATION: tl.constexpr = FORM.ROTATION
    TILES: tl.constexpr = tiles_at_once(ROTATION.HADAMARD)
    tiles = load_tiles(operand.x, operand.tables, block, offs, first, ROTATION)
    scaled = ()
    for i in tl.static_range(TILES):
        if operand.mean is None:
            scaled = scaled + (tiles[i] * (inverse * ROTATION.FACTOR),)
        else:
            columns = first + i * CHUNK + tl.arange(0, CHUNK)
            addresses = address_of(operand.mean, block.sequence, block.head) + columns
            tile, of_columns = tiles[i], tl.load(addresses, mask=columns < ROTATION.D, other=0.0)
            if ROTATION.HADAMARD > 0:
                tile *= ROTATION.FACTOR
            scaled = scaled + ((tile - of_columns[None, :]) * inverse,)
    return scaled


@triton.jit
def larger(a, b):
    """NaN where one of them is NaN."""
    return tl.maximum(a, b, tl.PropagateNan.ALL)


@triton.jit
def scale_of(largest, limit):
    """Takes the largest magnitude to so much; NaN where there is NaN."""
    scale = tl.div_rn(largest, limit)
    # The smallest normal number: zeros have it, too
    return tl.where(scale != scale, scale, tl.maximum(scale, 1.1754943508222875e-38))


@triton.jit
def codes_of(x, DTYPE: tl.constexpr):
    """x in e4m3, or its bits, to nearest even and saturated."""
    if DTYPE == tl.uint8:
        return to_e4m3(x)
    elif cuda_capability_geq(8, 9):  # its conversion saturates
        return x.to(DTYPE)
    else:
        near = tl.minimum(tl.maximum(x, -448.0), 448.0)
        return tl.where(x != x, x, near).to(DTYPE)


@triton.jit
def values_of(codes):
    """In fp32."""
    if codes.dtype == tl.uint8:
        return from_e4m3(codes)
    else:
        return codes.to(tl.float32)


@triton.jit
def add_pairs(a, b, other_a, other_b):
    """Two sums in one reduction, so that warps exchange both at once."""
    return a + other_a, b + other_b


@triton.jit
def quantize_cast_kernel(
    a, b, OF_A: tl.constexpr, OF_B: tl.constexpr, BLOCKS: tl.constexpr, IS_AGAIN: tl.constexpr
):
    """Codes, or V^T, of each block of two operands, or of one; BLOCKS a program."""
    # Last blocks first: those are what the second level of caches still holds
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    of_a = programs_of(a, OF_A, BLOCKS)
    if OF_B is None:
        cast(a, program, OF_A, BLOCKS, IS_AGAIN)
    else:
        if program < of_a:
            cast(a, program, OF_A, BLOCKS, IS_AGAIN)
        else:
            cast(b, program - of_a, OF_B, BLOCKS, IS_AGAIN)


@triton.constexpr_function
def rows_of_cast(headdim, hadamard, half):
    """`rows_at_once`, where they are rounded. Of channels that are not mixed a block is for one
    warp, which has room for a quarter of it, or less where rows are turned or not aligned: several
    would wait for each other where V is transposed and where it is summed.
    """
    is_hard = half or headdim % 16
    if not hadamard:
        return ROWS.value // WARPS.value // (2 if is_hard else 1)
    # Products of warpgroups have at least 64 rows, and AMD's of 8 wavefronts spill with fewer
    is_small = cuda_capability_geq(12) or not cuda_capability_geq(9)
    return rows_at_once(hadamard, is_hard, 32 if cuda_capability_geq(8) and is_small else 64)


@triton.jit
def cast(operand, program, FORM: tl.constexpr, BLOCKS: tl.constexpr, IS_AGAIN: tl.constexpr):
    """Codes as x, 0 where a row is not in use, or V^T. Without `largest` the scale is given. If
    that is of some blocks, the scale has room for ROOM times it, and a larger magnitude is left in
    `beyond`, by its bits: the same kernel, again, rounds by that.
    """
    GROUP: tl.constexpr = FORM.GROUP
    nheads_k = operand.blocks.nheads // GROUP
    block, begin, exists = find_columns(operand, program, 0, FORM, BLOCKS)
    of_scale = block.sequence * nheads_k + block.head // GROUP
    if IS_AGAIN:
        end = BLOCKS
        if operand.blocks.cu_seqlens is None:  # all are of one sequence
            end = tl.where(tl.load(operand.beyond + of_scale) > 0, BLOCKS, 0)
        for i in tl.range(0, end, disable_licm=True):
            block, begin, exists = find_columns(operand, program, i, FORM, BLOCKS)
            of_scale = block.sequence * nheads_k + block.head // GROUP
            beyond = tl.load(operand.beyond + of_scale, mask=exists, other=0)
            if beyond > 0:
                scale = scale_of(beyond.to(tl.float32, bitcast=True), 448.0)
                round_block(operand, block, begin, scale, FORM, False)
    elif operand.largest is None:
        scale = load_number(operand.scale, block.sequence, block.head // GROUP)
        round_block(operand, block, begin, scale, FORM, False)
    else:
        largest = tl.load(operand.largest + of_scale).to(tl.float32, bitcast=True)
        is_sampled = False
        if FORM.IS_SAMPLED:
            is_sampled = stride_of(block.of) > 1
        scale = scale_of(largest, tl.where(is_sampled, 448.0 / ROOM, 448.0))
        top = round_block(operand, block, begin, scale, FORM, FORM.IS_SAMPLED)
        if FORM.IS_SAMPLED:
            bits = (top * scale).to(tl.int32, bitcast=True) & 0x7FFFFFFF  # NaN is above all
            is_beyond = is_sampled & ~(top <= 448.0)
            tl.atomic_max(operand.beyond + of_scale, bits, mask=is_beyond, sem="relaxed")


@triton.jit
def round_block(operand, block, begin, factor, FORM: tl.constexpr, LOOKS: tl.constexpr):
    """Rounds a block with a scale; and stores the largest magnitude, if it is wanted."""
    ROTATION: tl.constexpr = FORM.ROTATION
    COLUMNS: tl.constexpr = columns_of(ROTATION.D, ROTATION.HADAMARD)
    GROUP: tl.constexpr = FORM.GROUP
    out, rounding, blocks = operand.out, operand.rounding, operand.blocks
    used = not_constant(block.of.used) if FORM.HAS_ONE_ROW else block.of.used
    if operand.largest is not None:
        if (block.start == 0) & (block.head % GROUP == 0) & (begin == 0):
            at_scale = address_of(operand.scale, block.sequence, block.head // GROUP)
            tl.store(at_scale, factor)
    inverse = tl.div_rn(1.0, factor)
    AT_ONCE: tl.constexpr = rows_of_cast(ROTATION.D, ROTATION.HADAMARD, ROTATION.HALF)
    STAGES: tl.constexpr = stages_of(ROTATION.HADAMARD)
    TILES: tl.constexpr = tiles_at_once(ROTATION.HADAMARD)
    # By rows, whose columns are in few threads after a product
    AXIS: tl.constexpr = 1 if ROTATION.HADAMARD > 0 else None
    top = tl.zeros([AT_ONCE], tl.float32) if ROTATION.HADAMARD > 0 else 0.0
    end = tl.minimum(begin + COLUMNS, operand.headdim)  # no constant, as in `find_largest`
    for first in range(begin, end, TILES * CHUNK):
        row = tl.cast(block.number, tl.int64) * blocks.nheads + block.head
        losts, squares = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        for part in tl.range(0, ROWS, AT_ONCE, num_stages=STAGES, disable_licm=True):
            offs = part + tl.arange(0, AT_ONCE)
            from_rows = key_of_column(offs) if FORM.TRANSPOSED else offs
            is_used = (block.start + from_rows < used)[:, None]
            tiles = load_scaled(operand, block, from_rows, first, inverse, FORM)
            for i in tl.static_range(TILES):
                column, tile = first + i * CHUNK, tl.where(is_used, tiles[i], 0.0)
                codes = codes_of(tile, out.ptr.dtype.element_ty)
                if LOOKS:
                    top = larger(top, tl.reduce(tl.abs(tile), AXIS, larger))
                if FORM.TRANSPOSED:
                    store_columns(out, codes, block, offs, column, ROTATION.D, blocks)
                else:
                    store_codes(out, codes, block, offs, column, ROTATION.D)
                if rounding.lost is not None:
                    near = tile
                    if operand.largest is None:  # what saturates does not count as lost
                        near = tl.minimum(tl.maximum(tile, -448.0), 448.0)
                    lost = near - values_of(codes)
                    if rounding.squares is None:
                        losts += tl.sum(lost, 0)
                    else:
                        block_losts, block_squares = tl.reduce((lost, tile * tile), 0, add_pairs)
                        losts, squares = losts + block_losts, squares + block_squares
        if rounding.lost is not None:
            columns = first + tl.arange(0, CHUNK)
            offsets, exists = row * ROTATION.D + columns, columns < ROTATION.D
            tl.store(rounding.lost + offsets, losts, mask=exists)
            if rounding.squares is not None:
                tl.store(rounding.squares + offsets, squares, mask=exists)
    return tl.reduce(top, 0, larger) if ROTATION.HADAMARD > 0 else top


@triton.jit
def quantize_loss_kernel(v, drift, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Adds to the mean of a sequence and head what rounding takes on average, or a share of it
    (`with_loss` of `kernels/cpu/quantize.py`), and finds how far V without its mean drifts
    (`drift_of`), by its bits, where that is wanted.
    """
    nheads, rounding = v.blocks.nheads, v.rounding
    sequence, head = tl.program_id(0) // nheads, tl.program_id(0) % nheads
    of = find_sequence(sequence, v.blocks)
    count = tl.cdiv(of.used, ROWS)
    PARTS: tl.constexpr = min(128, 2**14 // BLOCK_D)  # blocks that are read at a time
    columns = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    of_all = tl.zeros([PARTS], tl.float32)
    least = tl.full([PARTS], float("inf"), tl.float32)
    spread = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, count, PARTS):
        number = first + tl.arange(0, PARTS)
        offsets = ((of.first_block + number).to(tl.int64) * nheads + head) * D
        exists = (number < count)[:, None] & (columns < D)[None, :]
        part = tl.load(rounding.lost + offsets[:, None] + columns[None, :], mask=exists, other=0.0)
        total += tl.sum(part, 0)
        squares = tl.sum(part * part, 1)
        of_all += squares
        keys = tl.maximum(tl.minimum(of.used - number * ROWS, ROWS), 1).to(tl.float32)
        least = tl.minimum(least, tl.where(number < count, squares / keys, float("inf")))
        if drift is not None:
            of_squares = rounding.squares + offsets[:, None] + columns[None, :]
            spread += tl.sum(tl.load(of_squares, mask=exists, other=0.0), 0)
    used = tl.maximum(of.used, 1).to(tl.float32)
    on_average = tl.maximum(tl.sum(of_all, 0) / used, 1.1754943508222875e-38)
    share = tl.minimum(2.0 * tl.min(least, 0) / on_average, 1.0)
    addresses = address_of(v.mean, sequence, head) + columns
    factor = load_number(v.scale, sequence, head)
    shift = share * factor * (total / used)
    tl.store(addresses, tl.load(addresses, mask=columns < D, other=0.0) + shift, mask=columns < D)
    if drift is not None:
        addresses = address_of(v.reach, sequence, head) + columns
        largest = tl.load(addresses, mask=columns < D, other=0.0) / factor
        largest *= largest
        weighted = tl.where(spread == 0, 0.0, largest / (spread / used) * largest)
        ratio = tl.sum(weighted, 0) / tl.maximum(tl.sum(largest, 0), 1.1754943508222875e-38)
        bits = tl.sqrt(ratio).to(tl.int32, bitcast=True) & 0x7FFFFFFF  # NaN is above all
        tl.atomic_max(drift, bits, sem="relaxed")


@triton.jit
def transpose_values_kernel(v, v_t, blocks, D: tl.constexpr):
    """V^T of codes, given as bytes."""
    number, head = tl.program_id(0) // blocks.nheads, tl.program_id(0) % blocks.nheads
    block = find_block(number, head, blocks, None, 0)
    offs = key_of_column(tl.arange(0, ROWS))
    for column in range(0, D, CHUNK):
        # (ROWS, CHUNK)
        position, columns = block.start + offs, column + tl.arange(0, CHUNK)
        row = (block.of.first_row + position).to(tl.int64)[:, None] * v.row
        exists = (position < block.of.used)[:, None] & (columns < D)[None, :]
        addresses = head_of(v, block.batch, block.head) + row + columns[None, :]
        tile = tl.load(addresses, mask=exists, other=0)
        store_columns(v_t, tile, block, tl.arange(0, ROWS), column, D, blocks)


@triton.jit
def store_codes(out, codes, block, offs, column, D: tl.constexpr):
    """Rows of a sequence, those that are not in use among them."""
    position, columns = block.start + offs, column + tl.arange(0, CHUNK)
    row = (block.of.first_row + position).to(tl.int64)[:, None] * out.row
    exists = (position < block.of.rows)[:, None] & (columns < D)[None, :]
    tl.store(head_of(out, block.batch, block.head) + row + columns[None, :], codes, mask=exists)


@triton.jit
def store_columns(v_t, codes, block, offs, column, D: tl.constexpr, blocks):
    """Columns of V^T: packed ones by the number of the block, others by their sequence's."""
    first = block.number
    if blocks.cu_seqlens is None:
        first = block.number - block.of.first_block
    keys = first.to(tl.int64) * ROWS + offs
    rows = column + tl.arange(0, CHUNK)
    row_addresses = head_of(v_t, block.batch, block.head) + rows.to(tl.int64)[:, None] * v_t.row
    # Without keys there are no columns
    exists = (rows < D)[:, None] & (keys < v_t.row)[None, :]
    tl.store(row_addresses + keys[None, :], tl.trans(codes), mask=exists)
