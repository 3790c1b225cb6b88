"""What quantising must know of q, k and v before it rounds: means, and the largest magnitudes. Of a
long sequence both are of some blocks (`sample_of` of `kernels/cpu/quantize.py`).

    statistics   where a mean is taken off: of each block and channel the sum and the extremes; else
                 the largest magnitude, where no scale is given
    means        and the largest magnitude without them, which the extremes tell

Sums of blocks are stored by their number and added in order, and maxima do not depend on order: so
repeats are bitwise equal.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .fp8_fwd import address_of
from .hadamard import CHUNK, tiles_at_once
from .quantize_rows import (
    ROWS,
    WARPS,
    columns_of,
    find_columns,
    find_sequence,
    load_tiles,
    programs_of,
    rows_at_once,
    stages_of,
    stride_of,
)

PARTS = tl.constexpr(64)  # blocks whose results are read at a time
SHARE = tl.constexpr(16)  # columns of a program that joins them
inf = tl.constexpr(float("inf"))


class Statistics(NamedTuple):
    """The statistics of each block of rows: (blocks, nheads, headdim), fp32."""

    sums: Any
    highs: Any  # None where no scale is wanted
    lows: Any


@triton.constexpr_function
def rows_of_sums(hadamard, half):
    """`rows_at_once`, where sums or extremes of columns are taken. Of channels that are not mixed a
    block is for one warp: several tell each other theirs through shared memory, which took longer
    than the sums (41 us where one warp takes 24).
    """
    return rows_at_once(hadamard, half, 16) if hadamard else ROWS.value // WARPS.value


@triton.jit
def quantize_statistics_kernel(a, b, OF_A: tl.constexpr, OF_B: tl.constexpr, BLOCKS: tl.constexpr):
    """Finds the statistics of each block, or of some, of two operands, or of one; BLOCKS per
    program.
    """
    program = tl.program_id(0)
    of_a = programs_of(a, OF_A, BLOCKS)
    if OF_B is None:
        find_statistics(a, program, OF_A, BLOCKS)
    else:
        if program < of_a:
            find_statistics(a, program, OF_A, BLOCKS)
        else:
            find_statistics(b, program - of_a, OF_B, BLOCKS)


@triton.jit
def find_statistics(operand, program, FORM: tl.constexpr, BLOCKS: tl.constexpr):
    """Finds the statistics of the blocks that count."""
    end = BLOCKS
    if BLOCKS > 1 and operand.blocks.cu_seqlens is None:
        first, _, _ = find_columns(operand, program, 0, FORM, BLOCKS)
        end = tl.where(stride_of(first.of) == BLOCKS, 1, BLOCKS)
    for i in tl.range(0, end, disable_licm=True):
        block, begin, is_one = find_columns(operand, program, i, FORM, BLOCKS)
        if FORM.IS_SAMPLED:
            is_one &= block.start // ROWS % stride_of(block.of) == 0
        if is_one:
            if operand.mean is not None:
                find_sums(operand, block, begin, FORM)
            else:
                find_largest(operand, block, begin, FORM)


@triton.jit
def find_sums(operand, block, begin, FORM: tl.constexpr):
    """Finds the sums of a block's columns, and their extremes if a scale is wanted."""
    ROTATION: tl.constexpr = FORM.ROTATION
    COLUMNS: tl.constexpr = columns_of(ROTATION.D, ROTATION.HADAMARD)
    # Rows along the second dimension of a product are in few threads
    AXIS: tl.constexpr = 1 if ROTATION.HADAMARD > 0 else 0
    AT_ONCE: tl.constexpr = rows_of_sums(ROTATION.HADAMARD, ROTATION.HALF)
    TILES: tl.constexpr = tiles_at_once(ROTATION.HADAMARD)
    STAGES: tl.constexpr = stages_of(ROTATION.HADAMARD)
    x, tables, statistics = operand.x, operand.tables, operand.statistics
    for first in range(begin, begin + COLUMNS, TILES * CHUNK):
        sums, highs, lows = (), (), ()
        for _ in tl.static_range(TILES):
            sums = sums + (tl.zeros([CHUNK], tl.float32),)
            highs = highs + (tl.full([CHUNK], -inf, tl.float32),)
            lows = lows + (tl.full([CHUNK], inf, tl.float32),)
        for part in tl.range(0, ROWS, AT_ONCE, num_stages=STAGES):
            offs = part + tl.arange(0, AT_ONCE)
            tiles = load_tiles(x, tables, block, offs, first, ROTATION, AXIS == 1)
            more_sums, more_highs, more_lows = (), (), ()
            for i in tl.static_range(TILES):
                more_sums = more_sums + (sums[i] + tl.sum(tiles[i], AXIS),)
                high, low = highs[i], lows[i]
                if statistics.highs is not None:
                    used = block.of.used - block.start - part
                    top, bottom = extremes_of(tiles[i], used, AXIS)
                    high, low = tl.maximum(high, top), tl.minimum(low, bottom)
                more_highs, more_lows = more_highs + (high,), more_lows + (low,)
            sums, highs, lows = more_sums, more_highs, more_lows
        for i in tl.static_range(TILES):
            columns = first + i * CHUNK + tl.arange(0, CHUNK)
            row = tl.cast(block.number, tl.int64) * operand.blocks.nheads + block.head
            offsets, exists = row * ROTATION.D + columns, columns < ROTATION.D
            # Rounding keeps order: an extreme times a number is the extreme of products
            tl.store(statistics.sums + offsets, sums[i] * ROTATION.FACTOR, mask=exists)
            if statistics.highs is not None:
                tl.store(statistics.highs + offsets, highs[i] * ROTATION.FACTOR, mask=exists)
                tl.store(statistics.lows + offsets, lows[i] * ROTATION.FACTOR, mask=exists)


@triton.jit
def extremes_of(tile, used, AXIS: tl.constexpr):
    """The largest and the smallest of the first rows, which lie along AXIS."""
    if used >= tile.shape[AXIS]:
        high, low = tl.max(tile, AXIS), tl.min(tile, AXIS)
    else:
        is_used = tl.expand_dims(tl.arange(0, tile.shape[AXIS]) < used, 1 - AXIS)
        high = tl.max(tl.where(is_used, tile, -inf), AXIS)
        low = tl.min(tl.where(is_used, tile, inf), AXIS)
    return high, low


@triton.jit
def find_largest(operand, block, begin, FORM: tl.constexpr):
    """The bits of the largest magnitude of a sequence and key head: (sequences, nheads / GROUP)."""
    GROUP: tl.constexpr = FORM.GROUP
    bits = largest_of(operand, block, begin, FORM)
    group = block.sequence * (operand.blocks.nheads // GROUP) + block.head // GROUP
    tl.atomic_max(operand.largest + group, bits, sem="relaxed")


@triton.jit
def largest_of(operand, block, begin, FORM: tl.constexpr):
    """The bits of the largest magnitude of a block, which are in its order, and NaN's above all.

    `headdim` is no constant, so that the loop stays one: Triton 3.6 makes no code for sm_100 of a
    product's maximum by columns and then by rows without a loop between.
    """
    ROTATION: tl.constexpr = FORM.ROTATION
    COLUMNS: tl.constexpr = columns_of(ROTATION.D, ROTATION.HADAMARD)
    AXIS: tl.constexpr = 1 if ROTATION.HADAMARD > 0 else 0
    AT_ONCE: tl.constexpr = rows_of_sums(ROTATION.HADAMARD, ROTATION.HALF)
    TILES: tl.constexpr = tiles_at_once(ROTATION.HADAMARD)
    x, tables, end = operand.x, operand.tables, tl.minimum(begin + COLUMNS, operand.headdim)
    largest_bits = tl.zeros([CHUNK], tl.int32)
    for first in range(begin, end, TILES * CHUNK):
        for part in range(0, ROWS, AT_ONCE):
            offs = part + tl.arange(0, AT_ONCE)
            tiles = load_tiles(x, tables, block, offs, first, ROTATION, AXIS == 1)
            bits = tiles[0].to(tl.int32, bitcast=True) & 0x7FFFFFFF
            for i in tl.static_range(1, TILES):
                bits = tl.maximum(bits, tiles[i].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            largest_bits = tl.maximum(largest_bits, tl.max(bits, AXIS))
    top = tl.max(largest_bits, 0).to(tl.float32, bitcast=True) * ROTATION.FACTOR
    return top.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def largest_without(mean, high, low, exists):
    """The bits of the largest magnitude of what the mean is taken off, by its extremes: NaN's where
    the mean is NaN or infinite.
    """
    off = tl.maximum(high - mean, mean - low, tl.PropagateNan.ALL)
    off = tl.where(exists, off, 0.0)
    return tl.max(off.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def quantize_means_kernel(a, b, OF_A: tl.constexpr, OF_B: tl.constexpr):
    """Finds the means of each sequence and head of one operand or two, and the largest magnitudes
    without them.
    """
    program = tl.program_id(0)
    if OF_B is None:
        find_mean(a, program, OF_A)
    else:
        of_a = a.blocks.sequences * a.blocks.nheads * shares_of(OF_A.ROTATION.D)
        if program < of_a:
            find_mean(a, program, OF_A)
        else:
            find_mean(b, program - of_a, OF_B)


@triton.constexpr_function
def shares_of(headdim):
    """Programs of a sequence and head, of SHARE columns each."""
    return -(-headdim // SHARE.value)


@triton.jit
def find_mean(operand, program, FORM: tl.constexpr):
    """(sequences, nheads, headdim), over rows in use, and the bits of the largest magnitude without
    it, of SHARE columns. Rounding keeps order, so that this is of an extreme. `reach` is the
    largest sum without it, over blocks that follow each other, for `drift_of` of
    `kernels/cpu/quantize.py`: of all blocks.
    """
    D: tl.constexpr = FORM.ROTATION.D
    SHARES: tl.constexpr = shares_of(D)
    nheads, statistics = operand.blocks.nheads, operand.statistics
    part, head = program // nheads, program % nheads
    sequence = part // SHARES
    of = find_sequence(sequence, operand.blocks)
    count, stride, taken = tl.cdiv(of.used, ROWS), 1, of.used
    if FORM.IS_SAMPLED:
        stride = stride_of(of)
        apart = stride * ROWS
        taken = of.used // apart * ROWS + tl.minimum(of.used % apart, ROWS)
    columns = part % SHARES * SHARE + tl.arange(0, SHARE)
    total = tl.zeros([SHARE], tl.float32)
    high, low = total - inf, total + inf
    for first in range(0, count, PARTS * stride):
        number = first + tl.arange(0, PARTS) * stride
        offsets = ((of.first_block + number).to(tl.int64) * nheads + head) * D
        offsets = offsets[:, None] + columns[None, :]
        exists = (number < count)[:, None] & (columns < D)[None, :]
        total += tl.sum(tl.load(statistics.sums + offsets, mask=exists, other=0.0), 0)
        if operand.largest is not None:
            highs = tl.load(statistics.highs + offsets, mask=exists, other=-inf)
            lows = tl.load(statistics.lows + offsets, mask=exists, other=inf)
            high, low = tl.maximum(high, tl.max(highs, 0)), tl.minimum(low, tl.min(lows, 0))
    of_columns = total / tl.maximum(taken, 1).to(tl.float32)
    at_mean = address_of(operand.mean, sequence, head) + columns
    tl.store(at_mean, of_columns, mask=columns < D)
    if operand.largest is not None:
        top = largest_without(of_columns, high, low, (columns < D) & (of.used > 0))
        tl.atomic_max(operand.largest + sequence * nheads + head, top, sem="relaxed")
    if operand.reach is not None:
        end = tl.zeros([SHARE], tl.float32)
        most, least = end, end
        for first in range(0, count, PARTS):
            number = first + tl.arange(0, PARTS)
            offsets = ((of.first_block + number).to(tl.int64) * nheads + head) * D
            exists = (number < count)[:, None] & (columns < D)[None, :]
            sums = tl.load(
                statistics.sums + offsets[:, None] + columns[None, :],
                mask=exists,
                other=0.0,
            )
            keys = tl.minimum(of.used - number * ROWS, ROWS).to(tl.float32)
            smooth = tl.where(exists, sums - keys[:, None] * of_columns[None, :], 0.0)
            ends = end[None, :] + tl.cumsum(smooth, 0)
            most = tl.maximum(most, tl.max(ends, 0))
            least = tl.minimum(least, tl.min(ends, 0))
            end += tl.sum(smooth, 0)
        at_reach = address_of(operand.reach, sequence, head) + columns
        tl.store(at_reach, most - least, mask=columns < D)
