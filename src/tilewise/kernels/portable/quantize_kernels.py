"""q, k and v to e4m3, and V^T: the steps of `kernels/cpu/quantize.py`, in passes over the tensor.

    statistics   means and the largest magnitudes, where they are wanted (quantize_statistics.py)
    cast         the scale of a sequence and key head, then codes, or V^T; and once more of those
                 that had larger magnitudes than were found before
    loss         of V without its mean: what rounding took, of each block from the cast; and how far
                 it drifts

A program has ROWS rows of one head and one sequence, some at a time. Sums of blocks are stored by
their number and added in order, so that repeats are bitwise equal.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from ...tile.fp8 import from_e4m3, to_e4m3
from ..common import quantized
from ..common.io import head_of
from .fp8_fwd import address_of, load_number
from .fp8_order import key_of_column
from .hadamard import CHUNK, tiles_at_once
from .quantize_rows import (
    ROWS,
    columns_of,
    find_block,
    find_columns,
    find_sequence,
    load_tiles,
    rows_at_once,
    stride_of,
)
from .quantize_statistics import PARTS

ROOM = tl.constexpr(quantized.ROOM)


class Rounding(NamedTuple):
    """Of each block of V without its mean, in codes: (blocks, nheads, headdim), fp32."""

    lost: Any  # sums of what rounding takes; None of q and k
    squares: Any  # their sums, before rounding; None where no drift is wanted


@triton.jit
def load_smooth(x, tables, mean, block, offs, first, ROTATION: tl.constexpr):
    """Tiles of rows, but for ROTATION.FACTOR; or all of it, less their means."""
    TILES: tl.constexpr = tiles_at_once(ROTATION.HADAMARD)
    tiles = load_tiles(x, tables, block, offs, first, ROTATION)
    if mean is None:
        return tiles
    else:
        smooth = ()
        for i in tl.static_range(TILES):
            columns = first + i * CHUNK + tl.arange(0, CHUNK)
            at = address_of(mean, block.sequence, block.head) + columns
            of_columns = tl.load(at, mask=columns < ROTATION.D, other=0.0)[None, :]
            if ROTATION.HADAMARD > 0:
                smooth = smooth + (tiles[i] * ROTATION.FACTOR - of_columns,)
            else:
                smooth = smooth + (tiles[i] - of_columns,)
        return smooth


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
    x,
    tables,
    mean,
    largest,
    beyond,
    scale,
    rounding,
    out,
    blocks,
    ROTATION: tl.constexpr,
    GROUP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    IS_AGAIN: tl.constexpr,
):
    """Codes as x, 0 where a row is not in use, or V^T. Without `largest` the scale is given. If
    that is of some blocks, the scale has room for ROOM times it, and a larger magnitude is left in
    `beyond`, by its bits: by that the same kernel rounds once more.
    """
    # Last blocks first: those are what the second level of caches still holds
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    block, begin = find_columns(program, blocks, tables, ROTATION)
    COLUMNS: tl.constexpr = columns_of(ROTATION.D, ROTATION.HADAMARD)
    head_k = block.head // GROUP
    of_scale = block.sequence * (blocks.nheads // GROUP) + head_k
    if IS_AGAIN:
        if tl.load(beyond + of_scale) == 0:
            return
    if largest is None:
        factor = load_number(scale, block.sequence, head_k)
    else:
        limit, most = 448.0, tl.load(largest + of_scale).to(tl.float32, bitcast=True)
        if IS_AGAIN:
            most = tl.load(beyond + of_scale).to(tl.float32, bitcast=True)
        elif beyond is not None:
            limit = tl.where(stride_of(block.of) == 1, 448.0, 448.0 / ROOM)
        factor = scale_of(most, limit)
        if (block.start == 0) & (block.head % GROUP == 0) & (begin == 0):
            tl.store(address_of(scale, block.sequence, head_k), factor)
    inverse = tl.div_rn(1.0, factor)
    if mean is None:
        inverse *= ROTATION.FACTOR
    # Products of warpgroups have at least 64 rows, and AMD's of 8 wavefronts spill with fewer
    IS_SMALL: tl.constexpr = cuda_capability_geq(12) or not cuda_capability_geq(9)
    LEAST: tl.constexpr = 32 if cuda_capability_geq(8) and IS_SMALL else 64
    AT_ONCE: tl.constexpr = rows_at_once(ROTATION.HADAMARD, ROTATION.HALF, LEAST)
    TILES: tl.constexpr = tiles_at_once(ROTATION.HADAMARD)
    LOOKS: tl.constexpr = beyond is not None and not IS_AGAIN
    tops = tl.zeros([AT_ONCE], tl.float32)  # of codes before they saturate
    for first in range(begin, begin + COLUMNS, TILES * CHUNK):
        for part in range(0, ROWS, AT_ONCE):
            offs = part + tl.arange(0, AT_ONCE)
            from_rows = key_of_column(offs) if TRANSPOSED else offs
            is_used = (block.start + from_rows < block.of.used)[:, None]
            tiles = load_smooth(x, tables, mean, block, from_rows, first, ROTATION)
            for i in tl.static_range(TILES):
                column, tile = first + i * CHUNK, tl.where(is_used, tiles[i] * inverse, 0.0)
                codes = codes_of(tile, out.ptr.dtype.element_ty)
                if LOOKS:
                    tops = larger(tops, tl.reduce(tl.abs(tile), 1, larger))
                if TRANSPOSED:
                    store_columns(out, codes, block, column, ROTATION.D, blocks)
                else:
                    store_codes(out, codes, block, offs, column, ROTATION.D)
                if rounding.lost is not None:
                    row = tl.cast(block.number, tl.int64) * blocks.nheads + block.head
                    columns = column + tl.arange(0, CHUNK)
                    at, exists = row * ROTATION.D + columns, columns < ROTATION.D
                    near = tile
                    if largest is None:  # what saturates does not count as lost
                        near = tl.minimum(tl.maximum(tile, -448.0), 448.0)
                    lost = near - values_of(codes)
                    if rounding.squares is None:
                        lost_of_block = tl.sum(lost, 0)
                    else:
                        lost_of_block, squares = tl.reduce((lost, tile * tile), 0, add_pairs)
                        tl.store(rounding.squares + at, squares, mask=exists)
                    tl.store(rounding.lost + at, lost_of_block, mask=exists)
    if LOOKS:
        top = tl.reduce(tops, 0, larger)
        is_beyond = (stride_of(block.of) > 1) & ~(top <= 448.0)
        bits = (top * factor).to(tl.int32, bitcast=True) & 0x7FFFFFFF  # NaN is above all
        tl.atomic_max(beyond + of_scale, bits, mask=is_beyond, sem="relaxed")


@triton.jit
def quantize_loss_kernel(
    rounding, mean, reach, scale, drift, blocks, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Adds to the mean of a sequence and head what rounding takes on average, or a share of it
    (`with_loss` of `kernels/cpu/quantize.py`), and finds how far V without its mean drifts
    (`drift_of`), by its bits, where that is wanted.
    """
    sequence, head = tl.program_id(0) // blocks.nheads, tl.program_id(0) % blocks.nheads
    of = find_sequence(sequence, blocks)
    count = tl.cdiv(of.used, ROWS)
    columns = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    of_all = tl.zeros([PARTS], tl.float32)
    least = tl.full([PARTS], float("inf"), tl.float32)
    spread = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, count, PARTS):
        number = first + tl.arange(0, PARTS)
        at = ((of.first_block + number).to(tl.int64) * blocks.nheads + head) * D
        exists = (number < count)[:, None] & (columns < D)[None, :]
        part = tl.load(rounding.lost + at[:, None] + columns[None, :], mask=exists, other=0.0)
        total += tl.sum(part, 0)
        squares = tl.sum(part * part, 1)
        of_all += squares
        keys = tl.maximum(tl.minimum(of.used - number * ROWS, ROWS), 1).to(tl.float32)
        least = tl.minimum(least, tl.where(number < count, squares / keys, float("inf")))
        if drift is not None:
            of_squares = rounding.squares + at[:, None] + columns[None, :]
            spread += tl.sum(tl.load(of_squares, mask=exists, other=0.0), 0)
    used = tl.maximum(of.used, 1).to(tl.float32)
    on_average = tl.maximum(tl.sum(of_all, 0) / used, 1.1754943508222875e-38)
    share = tl.minimum(2.0 * tl.min(least, 0) / on_average, 1.0)
    at = address_of(mean, sequence, head) + columns
    factor = load_number(scale, sequence, head)
    more = share * factor * (total / used)
    tl.store(at, tl.load(at, mask=columns < D, other=0.0) + more, mask=columns < D)
    if drift is not None:
        at = address_of(reach, sequence, head) + columns
        largest = tl.load(at, mask=columns < D, other=0.0) / factor
        largest *= largest
        weighted = tl.where(spread == 0, 0.0, largest / (spread / used) * largest)
        ratio = tl.sum(weighted, 0) / tl.maximum(tl.sum(largest, 0), 1.1754943508222875e-38)
        bits = tl.sqrt(ratio).to(tl.int32, bitcast=True) & 0x7FFFFFFF  # NaN is above all
        tl.atomic_max(drift, bits, sem="relaxed")


@triton.jit
def transpose_values_kernel(v, v_t, blocks, D: tl.constexpr):
    """V^T of codes, given as bytes."""
    block = find_block(tl.program_id(0), blocks, None, 0)
    offs = key_of_column(tl.arange(0, ROWS))
    for column in range(0, D, CHUNK):
        # (ROWS, CHUNK)
        position, columns = block.start + offs, column + tl.arange(0, CHUNK)
        row = (block.of.first_row + position).to(tl.int64)[:, None] * v.row
        exists = (position < block.of.used)[:, None] & (columns < D)[None, :]
        at = head_of(v, block.batch, block.head) + row + columns[None, :]
        tile = tl.load(at, mask=exists, other=0)
        store_columns(v_t, tile, block, column, D, blocks)


@triton.jit
def store_codes(out, codes, block, offs, column, D: tl.constexpr):
    """Rows of a sequence, those that are not in use among them."""
    position, columns = block.start + offs, column + tl.arange(0, CHUNK)
    row = (block.of.first_row + position).to(tl.int64)[:, None] * out.row
    exists = (position < block.of.rows)[:, None] & (columns < D)[None, :]
    tl.store(head_of(out, block.batch, block.head) + row + columns[None, :], codes, mask=exists)


@triton.jit
def store_columns(v_t, codes, block, column, D: tl.constexpr, blocks):
    """Columns of V^T: packed ones by the number of the block, others by their sequence's."""
    first = block.number
    if blocks.cu_seqlens is None:
        first = block.number - block.of.first_block
    keys = first.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = column + tl.arange(0, CHUNK)
    at = head_of(v_t, block.batch, block.head) + rows.to(tl.int64)[:, None] * v_t.row
    # Without keys there are no columns
    exists = (rows < D)[:, None] & (keys < v_t.row)[None, :]
    tl.store(at + keys[None, :], tl.trans(codes), mask=exists)
