"""The rows of q, k or v that a quantising program has, and how they are loaded.

A block has ROWS rows of one head and one sequence. Blocks are counted so that none has rows of two
packed sequences, as the columns of V^T are (`padded_row`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...tile.bounds import clamp
from ...tile.seqlen import padded_row, rows_of
from ..common import quantized
from ..common.io import head_of
from .fp8_order import COLUMNS
from .hadamard import (
    CHUNK,
    Rotation,
    add_product,
    dtype_of_matrix,
    hadamard,
    is_odd,
    mixed,
    one_of,
    signs_of,
    tiles_at_once,
)
from .rotary import turned

ROWS = COLUMNS
WHOLE, EVERY = tl.constexpr(quantized.WHOLE), tl.constexpr(quantized.EVERY)
SEQUENCES_PER_GROUP = tl.constexpr(128)
WARPS = tl.constexpr(4)  # that have room for the rows of a block


class RowBlocks(NamedTuple):
    """The rows of a (batch, seqlen, nheads, headdim) tensor in blocks."""

    cu_seqlens: Any  # int32 (sequences + 1,), or None
    seqused: Any  # int32 (sequences,), or None
    sequences: int
    seqlen: int  # of packed sequences, of all together
    nheads: int


class Operand(NamedTuple):
    """One of q, k and v as kernels take it; None for what it lacks, or is not asked for."""

    x: Any  # Strided
    blocks: RowBlocks
    tables: Any  # where rows are turned: Tables
    keys: Any  # likewise, RowBlocks: rows in use are the last of the keys in use, or all
    count: int  # blocks of rows
    headdim: int
    mean: Any
    statistics: Any  # of each block of rows
    reach: Any
    largest: Any  # magnitudes, by their bits: (sequences, nheads_k)
    beyond: Any  # of those that are larger than what was found in some blocks
    scale: Any
    rounding: Any
    counters: Any  # of programs that wait for each other (quantize_short.py); else None
    out: Any
    # In a branch Triton 3.6 forgets what is constant, such as a stride of 1, in tuples within a
    # tuple, but for those that a constant follows
    end: None = None


class Form(NamedTuple):
    """Constexprs: how one of them is quantised."""

    ROTATION: Rotation
    GROUP: int  # heads that share a scale
    IS_SAMPLED: bool  # whether means and maxima are of some blocks of long sequences
    TRANSPOSED: bool
    HAS_ONE_ROW: bool  # a length that Triton makes a constant


class Tables(NamedTuple):
    """Rotary tables."""

    cos: Any  # (positions, HALF)
    sin: Any
    positions: int


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


@triton.constexpr_function
def rows_at_once(hadamard, half, least):
    """Rows whose tiles have room in the registers of WARPS warps, or so many: where they are turned
    half as many, beside their partners and angles.
    """
    return max(ROWS.value // tiles_at_once(hadamard) // (2 if half else 1), least)


@triton.constexpr_function
def stages_of(hadamard):
    """Parts of a block that are loaded at a time: one warp alone would wait for each; products have
    theirs in registers.
    """
    return 1 if hadamard else 3


@triton.constexpr_function
def chunks_of(headdim, hadamard):
    """Programs that share a block's columns: of channels that are not mixed each has CHUNK."""
    return 1 if hadamard else -(-headdim // CHUNK.value)


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
def keys_before(sequence, used, keys, HALF: tl.constexpr):
    """The keys before the first of so many rows, which are the last; 0 where none is turned."""
    before = sequence * 0
    if HALF > 0:
        before = find_sequence(sequence, keys).used - used
    return before


@triton.jit
def find_block(number, head, blocks, keys, HALF: tl.constexpr):
    """The rows of a block."""
    if blocks.cu_seqlens is None:
        sequence = number // tl.maximum(tl.cdiv(blocks.seqlen, ROWS), 1)
        of = find_sequence(sequence, blocks)
        start = (number - of.first_block) * ROWS
        before = keys_before(sequence, of.used, keys, HALF)
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
        before = keys_before(sequence, of.used, keys, HALF)
        return Block(number, sequence, sequence * 0, head, start, before, of)


@triton.jit
def stride_of(sequence):
    """Blocks of a sequence from one to the next whose means and maxima are found: `sample_of` of
    `kernels/cpu/quantize.py`.
    """
    return tl.where(sequence.used > WHOLE, EVERY, 1)


@triton.jit
def groups_of(operand, BLOCKS: tl.constexpr):
    """Groups of so many blocks, of one sequence each where sequences are not packed."""
    blocks = operand.blocks
    if blocks.cu_seqlens is None:
        return blocks.sequences * tl.cdiv(tl.maximum(tl.cdiv(blocks.seqlen, ROWS), 1), BLOCKS)
    else:
        return tl.cdiv(operand.count, BLOCKS)


@triton.jit
def programs_of(operand, FORM: tl.constexpr, BLOCKS: tl.constexpr):
    """The number of programs of an operand: each has BLOCKS blocks of one head, and CHUNK columns
    or all.
    """
    ROTATION: tl.constexpr = FORM.ROTATION
    CHUNKS: tl.constexpr = chunks_of(ROTATION.D, ROTATION.HADAMARD)
    return groups_of(operand, BLOCKS) * operand.blocks.nheads * CHUNKS


@triton.jit
def find_columns(operand, program, i, FORM: tl.constexpr, BLOCKS: tl.constexpr):
    """Block i of a program, its first column, and whether there is such a block."""
    ROTATION: tl.constexpr = FORM.ROTATION
    CHUNKS: tl.constexpr = chunks_of(ROTATION.D, ROTATION.HADAMARD)
    blocks = operand.blocks
    group, head = program // CHUNKS // blocks.nheads, program // CHUNKS % blocks.nheads
    number = group * BLOCKS + i
    exists = number < operand.count
    if BLOCKS > 1 and blocks.cu_seqlens is None:
        row_blocks = tl.maximum(tl.cdiv(blocks.seqlen, ROWS), 1)
        groups = tl.cdiv(row_blocks, BLOCKS)
        in_sequence = group % groups * BLOCKS + i
        exists = in_sequence < row_blocks
        # Past the last block of the last sequence there are no lengths to be loaded
        number = group // groups * row_blocks + tl.minimum(in_sequence, row_blocks - 1)
    block = find_block(number, head, blocks, operand.keys, ROTATION.HALF)
    return block, program % CHUNKS * CHUNK, exists


@triton.constexpr_function
def columns_of(headdim, hadamard):
    """How many columns a program has, of `find_columns`."""
    return headdim if chunks_of(headdim, hadamard) == 1 else CHUNK.value


@triton.jit
def load_turned(
    row, column, is_used, position, tables, ROTATION: tl.constexpr, COUNT: tl.constexpr
):
    """Loads COUNT columns of rows, in fp32 if rotary tables turn them."""
    HALF: tl.constexpr = ROTATION.HALF
    columns = column + tl.arange(0, COUNT)[None, :]
    exists = is_used & (columns < ROTATION.D)
    tile = tl.load(row + columns, mask=exists, other=0.0)
    if HALF > 0:
        table_rows = position[:, None]
        return turned(tile, row, column, exists, table_rows, tables, HALF, ROTATION.INTERLEAVED)
    else:
        return tile


@triton.jit
def products_of(
    row, is_used, angle, first, tables, ROTATION: tl.constexpr, BY_CHANNEL: tl.constexpr
):
    """The products of each tile of mixed channels, from `first` on, with the matrix of CHUNK."""
    HALF: tl.constexpr = ROTATION.HALF
    # With their partners and angles in fp32, fewer columns at a time have room in registers
    COUNT: tl.constexpr = CHUNK // 2 if HALF > 0 else CHUNK
    DTYPE: tl.constexpr = dtype_of_matrix(row.dtype.element_ty, HALF)
    TILES: tl.constexpr = tiles_at_once(ROTATION.HADAMARD)
    AT_ONCE: tl.constexpr = is_used.shape[0]
    i, j = tl.arange(0, CHUNK)[None, :], tl.arange(0, COUNT)[:, None]
    if BY_CHANNEL:
        i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, COUNT)[None, :]
    loaded = ()
    if HALF == 0:  # all before the first product
        for tile in tl.static_range(TILES):
            of_x = load_turned(row, first + tile * CHUNK, is_used, angle, tables, ROTATION, COUNT)
            loaded = loaded + (of_x,)
    products = ()
    for tile in tl.static_range(TILES):
        if BY_CHANNEL:
            product = tl.zeros([CHUNK, AT_ONCE], tl.float32)
        else:
            product = tl.zeros([AT_ONCE, CHUNK], tl.float32)
        for part in tl.static_range(0, CHUNK, COUNT):
            column = first + tile * CHUNK + part
            if HALF == 0:
                of_x = loaded[tile]
            else:
                of_x = load_turned(row, column, is_used, angle, tables, ROTATION, COUNT)
            bits = hadamard(i, part + j, ROTATION.HADAMARD, one_of(DTYPE)) ^ signs_of(column + j)
            product = add_product(product, of_x, bits.to(DTYPE, bitcast=True), BY_CHANNEL)
        products = products + (product,)
    return products


@triton.jit
def load_tiles(
    x, tables, block, offs, first, ROTATION: tl.constexpr, BY_CHANNEL: tl.constexpr = False
):
    """Columns of rows from `first` on, turned and rotated but for ROTATION.FACTOR, in fp32, as a
    tuple of tiles of CHUNK columns, or of their transposes; 0 where a row is not in use.
    """
    HADAMARD: tl.constexpr = ROTATION.HADAMARD
    position = block.start + offs
    row = (block.of.first_row + position).to(tl.int64)[:, None] * x.row
    row = head_of(x, block.batch, block.head) + row
    is_used = (position < block.of.used)[:, None]
    angle = block.before + position
    if HADAMARD == 0:
        turned_columns = load_turned(row, first, is_used, angle, tables, ROTATION, CHUNK)
        return (turned_columns.to(tl.float32),)
    else:
        WIDTH: tl.constexpr = tiles_at_once(HADAMARD) * CHUNK
        GROUPS: tl.constexpr = HADAMARD // WIDTH if HADAMARD > WIDTH else 1
        begin = first // (GROUPS * WIDTH) * (GROUPS * WIDTH)
        tiles = mixed(products_of(row, is_used, angle, begin, tables, ROTATION, BY_CHANNEL))
        for group in tl.static_range(1, GROUPS):
            first_column = begin + group * WIDTH
            products = mixed(
                products_of(row, is_used, angle, first_column, tables, ROTATION, BY_CHANNEL)
            )
            sign = tl.where(is_odd((first - begin) // WIDTH & group), -1.0, 1.0)
            sums = ()
            for tile in tl.static_range(WIDTH // CHUNK):
                sums = sums + (tiles[tile] + sign * products[tile],)
            tiles = sums
        return tiles
