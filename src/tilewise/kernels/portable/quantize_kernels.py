"""q, k and v to e4m3, and V^T: the steps of `kernels/cpu/quantize.py`, in passes over the tensor.

    sums   of each block of rows, where a mean is taken off; then the means
    amax   of each block, where no scale is given
    cast   the scale of a sequence and key head from its blocks, then codes, or V^T

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
from .rotary import turned

ROWS = COLUMNS
SEQUENCES_PER_GROUP = tl.constexpr(128)
PARTS = tl.constexpr(64)  # blocks whose results are read at a time
CHUNK = tl.constexpr(64)  # columns of a head that a tile has


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


class Rotation(NamedTuple):
    """Constexprs: the head dim, how its channels are mixed, and which pairs of them are turned."""

    D: int
    HADAMARD: int  # channels of a block, a power of two; 0 for none
    FACTOR: float  # its inverse square root
    HALF: int = 0  # pairs
    INTERLEAVED: bool = True  # pairs are of neighbours


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
def rotation(source, columns, HADAMARD: tl.constexpr):
    """Entries of Hadamard's matrix times the signs of channels: minus where an odd number of bits
    is 1 in both indices, and, Rudin and Shapiro's sign, of pairs of adjacent bits of the channel's.
    """
    i, j = columns[None, :], source[:, None]
    bits = (i & j & (HADAMARD - 1)) ^ (j & (j >> 1))
    bits = bits ^ (bits >> 8)
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)
    return tl.where(i // HADAMARD == j // HADAMARD, 1.0 - 2.0 * (bits & 1), 0.0)


@triton.jit
def add_product(acc, x, matrix):
    """acc + x matrix, whose products with 1 and -1 are exact in any dtype. fp32 is the sum of three
    bf16 numbers, and so multiplies in the tensor cores.
    """
    if x.dtype == tl.float32:
        matrix = matrix.to(tl.bfloat16)
        for _ in tl.static_range(3):
            part = x.to(tl.bfloat16)
            acc = tl.dot(part, matrix, acc)
            x -= part.to(tl.float32)
        return acc
    else:
        return tl.dot(x, matrix.to(x.dtype), acc)


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
def load_tile(x, tables, block, offs, column, ROTATION: tl.constexpr):
    """CHUNK columns of rows, turned and rotated, in fp32; 0 where a row is not in use."""
    HADAMARD: tl.constexpr = ROTATION.HADAMARD
    position = block.start + offs
    row = (block.of.first_row + position).to(tl.int64)[:, None] * x.row
    ptrs = head_of(x, block.batch, block.head) + row
    is_used = (position < block.of.used)[:, None]
    angle = block.before + position
    if HADAMARD == 0:
        found = load_turned(ptrs, column, is_used, angle, tables, ROTATION, CHUNK)
        return found.to(tl.float32)
    else:
        # Channels that are mixed with these
        WIDTH: tl.constexpr = HADAMARD if HADAMARD > CHUNK else CHUNK
        first = column // WIDTH * WIDTH
        columns = column + tl.arange(0, CHUNK)
        tile = tl.zeros([ROWS, CHUNK], tl.float32)
        # With their partners and angles in fp32, fewer at a time have room in registers
        COUNT: tl.constexpr = CHUNK // 2 if ROTATION.HALF > 0 else CHUNK
        for more in range(0, WIDTH, COUNT):
            of_x = load_turned(ptrs, first + more, is_used, angle, tables, ROTATION, COUNT)
            source = first + more + tl.arange(0, COUNT)
            tile = add_product(tile, of_x, rotation(source, columns, HADAMARD))
        return tile * ROTATION.FACTOR


@triton.jit
def load_smooth(x, tables, mean, block, offs, column, ROTATION: tl.constexpr):
    """The same less its mean; 0 where a row is not in use."""
    tile = load_tile(x, tables, block, offs, column, ROTATION)
    if mean is not None:
        columns = column + tl.arange(0, CHUNK)
        at = address_of(mean, block.sequence, block.head) + columns
        of_columns = tl.load(at, mask=columns < ROTATION.D, other=0.0)
        is_used = (block.start + offs < block.of.used)[:, None]
        tile = tl.where(is_used, tile - of_columns[None, :], 0.0)
    return tile


@triton.jit
def quantize_sums_kernel(x, tables, sums, blocks, ROTATION: tl.constexpr):
    """Of each block: sums (blocks, nheads, headdim)."""
    block = find_block(tl.program_id(0), blocks, tables, ROTATION.HALF)
    row = sums + (tl.cast(block.number, tl.int64) * blocks.nheads + block.head) * ROTATION.D
    for column in range(0, ROTATION.D, CHUNK):
        tile = load_tile(x, tables, block, tl.arange(0, ROWS), column, ROTATION)
        columns = column + tl.arange(0, CHUNK)
        tl.store(row + columns, tl.sum(tile, 0), mask=columns < ROTATION.D)


@triton.jit
def quantize_means_kernel(sums, mean, blocks, D: tl.constexpr):
    """Of each sequence and head, over its rows in use: (sequences, nheads, headdim)."""
    sequence, head = tl.program_id(0) // blocks.nheads, tl.program_id(0) % blocks.nheads
    of = find_sequence(sequence, blocks)
    count = tl.cdiv(of.used, ROWS)
    for column in range(0, D, CHUNK):
        columns = column + tl.arange(0, CHUNK)
        total = tl.zeros([CHUNK], tl.float32)
        for first in range(0, count, PARTS):
            number = first + tl.arange(0, PARTS)
            at = ((of.first_block + number).to(tl.int64) * blocks.nheads + head) * D
            exists = (number < count)[:, None] & (columns < D)[None, :]
            part = tl.load(sums + at[:, None] + columns[None, :], mask=exists, other=0.0)
            total += tl.sum(part, 0)
        found = total / tl.maximum(of.used, 1).to(tl.float32)
        tl.store(address_of(mean, sequence, head) + columns, found, mask=columns < D)


@triton.jit
def quantize_amax_kernel(x, tables, mean, largest, blocks, headdim, ROTATION: tl.constexpr):
    """Of each block: (blocks, nheads), the bits of the largest magnitude, which are in its order,
    and NaN's above all.

    `headdim` is no constant, so that the loop stays one: Triton 3.6 makes no code for sm_100 of a
    product's maximum by columns and then by rows without a loop between.
    """
    block = find_block(tl.program_id(0), blocks, tables, ROTATION.HALF)
    found = tl.zeros([CHUNK], tl.int32)
    for column in range(0, headdim, CHUNK):
        tile = load_smooth(x, tables, mean, block, tl.arange(0, ROWS), column, ROTATION)
        bits = tile.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        found = tl.maximum(found, tl.max(bits, 0))
    row = largest + tl.cast(block.number, tl.int64) * blocks.nheads
    tl.store(row + block.head, tl.max(found, 0))


@triton.jit
def scale_of(largest, block, blocks, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr):
    """Takes the largest magnitude of a sequence and key head to 448; NaN where there is NaN."""
    of, first_head = block.of, block.head // GROUP * GROUP
    count, heads = tl.cdiv(of.used, ROWS), tl.arange(0, BLOCK_GROUP)
    found = block.number * 0
    for first in range(0, count, PARTS):
        number = first + tl.arange(0, PARTS)
        at = (of.first_block + number).to(tl.int64) * blocks.nheads + first_head
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
        factor = scale_of(largest, block, blocks, GROUP, BLOCK_GROUP)
        if (block.start == 0) & (block.head % GROUP == 0):
            tl.store(address_of(scale, block.sequence, head_k), factor)
    offs = tl.arange(0, ROWS)
    if TRANSPOSED:
        offs = key_of_column(offs)
    is_used = (block.start + offs < block.of.used)[:, None]
    for column in range(0, ROTATION.D, CHUNK):
        tile = load_smooth(x, tables, mean, block, offs, column, ROTATION)
        tile = tl.where(is_used, tl.div_rn(tile, tl.zeros_like(tile) + factor), 0.0)
        if out.ptr.dtype.element_ty == tl.uint8:
            codes = to_e4m3(tile)
        else:
            codes = tl.minimum(tl.maximum(tile, -448.0), 448.0)
            codes = tl.where(tile != tile, tile, codes).to(out.ptr.dtype.element_ty)
        if TRANSPOSED:
            store_columns(out, codes, block, column, ROTATION.D, blocks)
        else:
            store_codes(out, codes, block, column, ROTATION.D)


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
