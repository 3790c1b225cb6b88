"""q, k and v to e4m3, and V^T: the steps of `kernels/cpu/quantize.py`, in passes over the tensor.

    statistics   where a mean is taken off: of each block and channel the sum and the extremes; then
                 the means, and the largest magnitude without them, which the extremes tell
    amax         else: of each block, where no scale is given
    cast         the scale of a sequence and key head, then codes, or V^T

A program has ROWS rows of one head and one sequence. Blocks are counted so that no block has rows
of two packed sequences, as the columns of V^T are (`padded_row`). What was computed of a block is
stored by its number and combined in order, so that repeats are bitwise equal.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...tile.bounds import clamp
from ...tile.fp8 import to_e4m3
from ...tile.seqlen import padded_row, rows_of
from ..common.io import head_of
from .fp8_fwd import address_of, load_number
from .fp8_order import COLUMNS, key_of_column
from .hadamard import CHUNK, add_product, hadamard, is_odd, tiles_at_once, with_signs
from .rotary import turned

ROWS = COLUMNS
SEQUENCES_PER_GROUP = tl.constexpr(128)
PARTS = tl.constexpr(64)  # blocks whose results are read at a time


class RowBlocks(NamedTuple):
    """The rows of a (batch, seqlen, nheads, headdim) tensor in blocks."""

    cu_seqlens: Any  # int32 (sequences + 1,), or None
    seqused: Any  # int32 (sequences,), or None
    sequences: int
    seqlen: int  # of packed sequences, of all together
    nheads: int


class Tables(NamedTuple):
    """Rotary tables, and the keys: rows in use are the last of them, or all."""

    cos: Any  # (positions, HALF)
    sin: Any
    positions: int
    keys: RowBlocks


class Statistics(NamedTuple):
    """Of each block of rows: (blocks, nheads, headdim), fp32."""

    sums: Any
    highs: Any  # None where no scale is wanted
    lows: Any


class OfSequence(NamedTuple):
    """Where a sequence's rows and blocks begin, its rows, and how many of them are in use."""

    first_row: tl.tensor
    first_block: tl.tensor
    rows: tl.tensor
    used: tl.tensor


class Block(NamedTuple):
    """The rows of a program."""

    number: tl.tensor
    sequence: tl.tensor
    batch: tl.tensor
    head: tl.tensor
    start: tl.tensor  # the position of its first row
    before: tl.tensor  # keys before the sequence's first row, where rows are turned
    of: OfSequence


@triton.jit
def find_sequence(sequence, blocks):
    """A sequence's rows, whatever the lengths say."""
    if blocks.cu_seqlens is None:
        first_row, rows = sequence * 0, sequence * 0 + blocks.seqlen
        first_block = sequence * tl.maximum(tl.cdiv(blocks.seqlen, ROWS), 1)
    else:
        first_row, rows = rows_of(blocks.cu_seqlens, sequence, sequence + 1, blocks.seqlen)
        first_block = padded_row(first_row, sequence, ROWS) // ROWS
    used = rows
    if blocks.seqused is not None:
        used = clamp(tl.load(blocks.seqused + sequence), 0, rows)
    return OfSequence(first_row, first_block, rows, used)


@triton.jit
def keys_before(sequence, used, tables, HALF: tl.constexpr):
    """The keys before the first of so many rows, which are the last; 0 where none is turned."""
    before = sequence * 0
    if HALF > 0:
        before = find_sequence(sequence, tables.keys).used - used
    return before


@triton.jit
def find_block(program, blocks, tables, HALF: tl.constexpr):
    """The rows of a program; heads of a block are neighbours."""
    number, head = program // blocks.nheads, program % blocks.nheads
    if blocks.cu_seqlens is None:
        sequence = number // tl.maximum(tl.cdiv(blocks.seqlen, ROWS), 1)
        of = find_sequence(sequence, blocks)
        start = (number - of.first_block) * ROWS
        before = keys_before(sequence, of.used, tables, HALF)
        return Block(number, sequence, sequence, head, start, before, of)
    else:
        count = number * 0
        for group in range(0, blocks.sequences, SEQUENCES_PER_GROUP):
            other = group + tl.arange(0, SEQUENCES_PER_GROUP)
            is_one = other < blocks.sequences
            first = clamp(
                tl.load(blocks.cu_seqlens + other, mask=is_one, other=0), 0, blocks.seqlen
            )
            begins = padded_row(first, other, ROWS) // ROWS <= number
            count += tl.sum((is_one & begins).to(tl.int32), 0)
        sequence = tl.maximum(count - 1, 0)
        of = find_sequence(sequence, blocks)
        # Blocks before the first sequence have no rows
        start = tl.where(count > 0, (number - of.first_block) * ROWS, of.rows)
        before = keys_before(sequence, of.used, tables, HALF)
        return Block(number, sequence, sequence * 0, head, start, before, of)


@triton.jit
def load_turned(
    row, column, is_used, position, tables, ROTATION: tl.constexpr, COUNT: tl.constexpr
):
    """So many columns of rows, in fp32 where they are turned."""
    HALF: tl.constexpr = ROTATION.HALF
    columns = column + tl.arange(0, COUNT)[None, :]
    exists = is_used & (columns < ROTATION.D)
    tile = tl.load(row + columns, mask=exists, other=0.0)
    if HALF > 0:
        at = position[:, None]
        return turned(tile, row, column, exists, at, tables, HALF, ROTATION.INTERLEAVED)
    else:
        return tile


@triton.jit
def load_tiles(x, tables, block, offs, first, ROTATION: tl.constexpr):
    """Columns of rows from `first` on, turned and rotated, in fp32, as a tuple of tiles of CHUNK
    columns; 0 where a row is not in use.
    """
    HADAMARD: tl.constexpr = ROTATION.HADAMARD
    position = block.start + offs
    row = (block.of.first_row + position).to(tl.int64)[:, None] * x.row
    ptrs = head_of(x, block.batch, block.head) + row
    is_used = (position < block.of.used)[:, None]
    angle = block.before + position
    if HADAMARD == 0:
        found = load_turned(ptrs, first, is_used, angle, tables, ROTATION, CHUNK)
        return (found.to(tl.float32),)
    else:
        # Tiles of channels that are mixed with these, and which of them the first is
        OF_BLOCK: tl.constexpr = HADAMARD // CHUNK if HADAMARD > CHUNK else 1
        of_first = first // CHUNK % OF_BLOCK
        begin = first - of_first * CHUNK
        # With their partners and angles in fp32, fewer columns at a time have room in registers
        COUNT: tl.constexpr = CHUNK // 2 if ROTATION.HALF > 0 else CHUNK
        left = tl.zeros([ROWS, CHUNK], tl.float32)
        right = left
        # Unrolled, four products at once would not fit in registers
        UNROLL: tl.constexpr = OF_BLOCK if OF_BLOCK <= 2 else 1
        for source in tl.range(0, OF_BLOCK, loop_unroll_factor=UNROLL):
            product = tl.zeros([ROWS, CHUNK], tl.float32)
            for part in tl.static_range(0, CHUNK, COUNT):
                column = begin + source * CHUNK + part
                of_x = load_turned(ptrs, column, is_used, angle, tables, ROTATION, COUNT)
                of_x = with_signs(of_x, column + tl.arange(0, COUNT))
                product = add_product(product, of_x, hadamard(part, COUNT, HADAMARD))
            left += tl.where(is_odd(of_first & source), -1.0, 1.0) * product
            if OF_BLOCK > 1:
                right += tl.where(is_odd(of_first + 1 & source), -1.0, 1.0) * product
        tiles = (left * ROTATION.FACTOR,)
        if OF_BLOCK > 1:
            tiles = tiles + (right * ROTATION.FACTOR,)
        return tiles


@triton.jit
def load_smooth(x, tables, mean, block, offs, first, ROTATION: tl.constexpr):
    """The same less their means; 0 where a row is not in use."""
    TILES: tl.constexpr = tiles_at_once(ROTATION.HADAMARD)
    tiles = load_tiles(x, tables, block, offs, first, ROTATION)
    if mean is None:
        return tiles
    else:
        is_used = (block.start + offs < block.of.used)[:, None]
        smooth = ()
        for i in tl.static_range(TILES):
            columns = first + i * CHUNK + tl.arange(0, CHUNK)
            at = address_of(mean, block.sequence, block.head) + columns
            of_columns = tl.load(at, mask=columns < ROTATION.D, other=0.0)
            smooth = smooth + (tl.where(is_used, tiles[i] - of_columns[None, :], 0.0),)
        return smooth


@triton.jit
def quantize_statistics_kernel(x, tables, found, blocks, ROTATION: tl.constexpr):
    """Of each block."""
    block = find_block(tl.program_id(0), blocks, tables, ROTATION.HALF)
    row = (tl.cast(block.number, tl.int64) * blocks.nheads + block.head) * ROTATION.D
    is_used = (block.start + tl.arange(0, ROWS) < block.of.used)[:, None]
    TILES: tl.constexpr = tiles_at_once(ROTATION.HADAMARD)
    for first in range(0, ROTATION.D, TILES * CHUNK):
        tiles = load_tiles(x, tables, block, tl.arange(0, ROWS), first, ROTATION)
        for i in tl.static_range(TILES):
            columns = first + i * CHUNK + tl.arange(0, CHUNK)
            at, exists = row + columns, columns < ROTATION.D
            tl.store(found.sums + at, tl.sum(tiles[i], 0), mask=exists)
            if found.highs is not None:
                high = tl.max(tl.where(is_used, tiles[i], float("-inf")), 0)
                low = tl.min(tl.where(is_used, tiles[i], float("inf")), 0)
                tl.store(found.highs + at, high, mask=exists)
                tl.store(found.lows + at, low, mask=exists)


@triton.jit
def quantize_means_kernel(found, mean, largest, blocks, D: tl.constexpr):
    """Of each sequence and head, over its rows in use: (sequences, nheads, headdim), and the bits
    of the largest magnitude without it, of CHUNK columns each: (sequences, chunks, nheads).
    Rounding keeps order, so that this is of an extreme.
    """
    CHUNKS: tl.constexpr = (D + CHUNK - 1) // CHUNK
    part, head = tl.program_id(0) // blocks.nheads, tl.program_id(0) % blocks.nheads
    sequence = part // CHUNKS
    of = find_sequence(sequence, blocks)
    count = tl.cdiv(of.used, ROWS)
    columns = part % CHUNKS * CHUNK + tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float32)
    high = tl.full([CHUNK], float("-inf"), tl.float32)
    low = tl.full([CHUNK], float("inf"), tl.float32)
    for first in range(0, count, PARTS):
        number = first + tl.arange(0, PARTS)
        at = ((of.first_block + number).to(tl.int64) * blocks.nheads + head) * D
        at = at[:, None] + columns[None, :]
        exists = (number < count)[:, None] & (columns < D)[None, :]
        total += tl.sum(tl.load(found.sums + at, mask=exists, other=0.0), 0)
        if largest is not None:
            highs = tl.load(found.highs + at, mask=exists, other=float("-inf"))
            lows = tl.load(found.lows + at, mask=exists, other=float("inf"))
            high, low = tl.maximum(high, tl.max(highs, 0)), tl.minimum(low, tl.min(lows, 0))
    of_columns = total / tl.maximum(of.used, 1).to(tl.float32)
    tl.store(address_of(mean, sequence, head) + columns, of_columns, mask=columns < D)
    if largest is not None:
        # NaN where the mean is NaN or infinite
        off = tl.maximum(high - of_columns, of_columns - low, tl.PropagateNan.ALL)
        off = tl.where((columns < D) & (of.used > 0), off, 0.0)
        top = tl.max(off.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        tl.store(largest + (tl.cast(part, tl.int64) * blocks.nheads + head), top)


@triton.jit
def quantize_amax_kernel(x, tables, largest, blocks, headdim, ROTATION: tl.constexpr):
    """Of each block: (blocks, nheads), the bits of the largest magnitude, which are in its order,
    and NaN's above all.

    `headdim` is no constant, so that the loop stays one: Triton 3.6 makes no code for sm_100 of a
    product's maximum by columns and then by rows without a loop between.
    """
    block = find_block(tl.program_id(0), blocks, tables, ROTATION.HALF)
    found = tl.zeros([CHUNK], tl.int32)
    TILES: tl.constexpr = tiles_at_once(ROTATION.HADAMARD)
    for first in range(0, headdim, TILES * CHUNK):
        tiles = load_tiles(x, tables, block, tl.arange(0, ROWS), first, ROTATION)
        bits = tl.zeros([ROWS, CHUNK], tl.int32)
        for i in tl.static_range(TILES):
            bits = tl.maximum(bits, tiles[i].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        found = tl.maximum(found, tl.max(bits, 0))
    row = largest + tl.cast(block.number, tl.int64) * blocks.nheads
    tl.store(row + block.head, tl.max(found, 0))


@triton.jit
def scale_of(
    largest, first_row, count, block, blocks, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr
):
    """Takes the largest magnitude of a sequence and key head to 448; NaN where there is NaN. It is
    in `count` rows of `largest`.
    """
    first_head, heads = block.head // GROUP * GROUP, tl.arange(0, BLOCK_GROUP)
    found = block.number * 0
    for first in range(0, count, PARTS):
        number = first + tl.arange(0, PARTS)
        at = (first_row + number).to(tl.int64) * blocks.nheads + first_head
        exists = (number < count)[:, None] & (heads < GROUP)[None, :]
        part = tl.load(largest + at[:, None] + heads[None, :], mask=exists, other=0)
        found = tl.maximum(found, tl.max(tl.max(part, 1), 0))
    scale = tl.div_rn(found.to(tl.float32, bitcast=True), 448.0)
    # The smallest normal number: zeros have it, too
    return tl.where(scale != scale, scale, tl.maximum(scale, 1.1754943508222875e-38))


@triton.jit
def quantize_cast_kernel(
    x,
    tables,
    mean,
    largest,
    scale,
    out,
    blocks,
    ROTATION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """Codes as x, 0 where a row is not in use, or V^T. Without `largest` the scale is given."""
    block = find_block(tl.program_id(0), blocks, tables, ROTATION.HALF)
    head_k = block.head // GROUP
    if largest is None:
        factor = load_number(scale, block.sequence, head_k)
    else:
        row, count = block.of.first_block, tl.cdiv(block.of.used, ROWS)
        if mean is not None:  # found with it, of the whole sequence
            CHUNKS: tl.constexpr = (ROTATION.D + CHUNK - 1) // CHUNK
            row, count = block.sequence * CHUNKS, block.number * 0 + CHUNKS
        factor = scale_of(largest, row, count, block, blocks, GROUP, BLOCK_GROUP)
        if (block.start == 0) & (block.head % GROUP == 0):
            tl.store(address_of(scale, block.sequence, head_k), factor)
    inverse = tl.div_rn(1.0, factor)
    offs = tl.arange(0, ROWS)
    if TRANSPOSED:
        offs = key_of_column(offs)
    is_used = (block.start + offs < block.of.used)[:, None]
    TILES: tl.constexpr = tiles_at_once(ROTATION.HADAMARD)
    for first in range(0, ROTATION.D, TILES * CHUNK):
        tiles = load_smooth(x, tables, mean, block, offs, first, ROTATION)
        for i in tl.static_range(TILES):
            tile = tl.where(is_used, tiles[i] * inverse, 0.0)
            if out.ptr.dtype.element_ty == tl.uint8:
                codes = to_e4m3(tile)
            else:
                codes = tl.minimum(tl.maximum(tile, -448.0), 448.0)
                codes = tl.where(tile != tile, tile, codes).to(out.ptr.dtype.element_ty)
            if TRANSPOSED:
                store_columns(out, codes, block, first + i * CHUNK, ROTATION.D, blocks)
            else:
                store_codes(out, codes, block, first + i * CHUNK, ROTATION.D)


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
def store_codes(out, codes, block, column, D: tl.constexpr):
    """Rows of a sequence, those that are not in use among them."""
    position, columns = block.start + tl.arange(0, ROWS), column + tl.arange(0, CHUNK)
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
