"""q, k and v to e4m3 where sequences have at most WHOLE rows: all passes of `quantize_kernels` at
once, with the same bits.

A program has a block of rows, as in the cast. It stores the statistics of its block and waits for
those of all blocks that share its scale. Then it loads its rows again, from the second level of
caches, and rounds them. The last program of V adds what rounding took to the mean.

Programs take their blocks from a counter, those of a key head one after another. So a program waits
only for blocks that others have taken, or take once programs of other key heads end: all programs
that share a scale fit on the GPU at a time (`waits_for_heads`).
"""

import triton
import triton.language as tl

from .fp8_fwd import address_of, load_number
from .hadamard import CHUNK
from .quantize_kernels import round_block, scale_of
from .quantize_rows import ROWS, WHOLE, chunks_of, find_block, programs_of
from .quantize_statistics import find_sums, inf, largest_of, largest_without

BLOCKS = tl.constexpr(WHOLE.value // ROWS.value)  # of a sequence, at most


@triton.jit
def quantize_short_kernel(a, b, OF_A: tl.constexpr, OF_B: tl.constexpr):
    """Codes, or V^T, their scales and means, of two operands, or of one."""
    if OF_B is None:
        quantize_block(a, OF_A)
    else:
        if tl.program_id(0) < programs_of(a, OF_A, 1):
            quantize_block(a, OF_A)
        else:
            quantize_block(b, OF_B)


@triton.jit
def quantize_block(operand, FORM: tl.constexpr):
    """Measures a block, and rounds it once all are measured that share its scale."""
    ROTATION: tl.constexpr = FORM.ROTATION
    CHUNKS: tl.constexpr = chunks_of(ROTATION.D, ROTATION.HADAMARD)
    nheads_k = operand.blocks.nheads // FORM.GROUP
    row_blocks = tl.maximum(tl.cdiv(operand.blocks.seqlen, ROWS), 1)
    together = FORM.GROUP * row_blocks * CHUNKS  # programs that share a scale
    taken = tl.atomic_add(operand.counters, 1, sem="relaxed")
    scale, place = taken // together, taken % together
    number = scale // nheads_k * row_blocks + place // CHUNKS % row_blocks
    head = scale % nheads_k * FORM.GROUP + place // CHUNKS // row_blocks
    block = find_block(number, head, operand.blocks, operand.keys, ROTATION.HALF)
    begin = place % CHUNKS * CHUNK
    measured = operand.counters + 1 + scale
    if operand.mean is not None:
        find_sums(operand, block, begin, FORM)
    else:
        tl.store(operand.largest + taken, largest_of(operand, block, begin, FORM))
    tl.debug_barrier()  # all threads have stored
    tl.atomic_add(measured, 1, sem="release")
    while tl.atomic_add(measured, 0, sem="acquire") < together:
        pass
    if operand.mean is not None:
        bits = join_means(operand, block, FORM)
        tl.debug_barrier()  # the mean is stored, by each of the programs
    else:
        bits = join_largest(operand, scale * together, together)
    factor = scale_of(bits.to(tl.float32, bitcast=True), 448.0)
    round_block(operand, block, begin, factor, FORM, False)
    if operand.rounding.lost is not None:
        rounded = measured + operand.blocks.sequences * nheads_k
        tl.debug_barrier()
        if tl.atomic_add(rounded, 1, sem="acq_rel") == together - 1:
            add_loss(operand, block, ROTATION.D)


@triton.jit
def tree_sum(x):
    """The sum of BLOCKS tensors, in the order in which a reduction adds the lanes of a warp."""
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))


@triton.jit
def load_blocks(x, block, nheads, columns, D: tl.constexpr, other):
    """Numbers of each block of a sequence and head, by column."""
    count = tl.cdiv(block.of.used, ROWS)
    row = (block.of.first_block.to(tl.int64) * nheads + block.head) * D
    loaded = ()
    for i in tl.static_range(BLOCKS):
        exists = (columns < D) & (i < count)
        loaded = loaded + (tl.load(x + row + columns + i * nheads * D, mask=exists, other=other),)
    return loaded


@triton.jit
def join_means(operand, block, FORM: tl.constexpr):
    """`find_mean` of all columns: stores the mean, and returns the bits of the largest magnitude
    without it.
    """
    D: tl.constexpr = FORM.ROTATION.D
    nheads, statistics = operand.blocks.nheads, operand.statistics
    columns = tl.arange(0, triton.next_power_of_2(D))
    total = 0.0 + tree_sum(load_blocks(statistics.sums, block, nheads, columns, D, 0.0))
    highs = load_blocks(statistics.highs, block, nheads, columns, D, -inf)
    lows = load_blocks(statistics.lows, block, nheads, columns, D, inf)
    high, low = highs[0], lows[0]
    for i in tl.static_range(1, BLOCKS):
        high, low = tl.maximum(high, highs[i]), tl.minimum(low, lows[i])
    mean = total / tl.maximum(block.of.used, 1).to(tl.float32)
    tl.store(address_of(operand.mean, block.sequence, block.head) + columns, mean, mask=columns < D)
    return largest_without(mean, high, low, (columns < D) & (block.of.used > 0))


@triton.jit
def join_largest(operand, first, count):
    """The largest of the bits that programs found."""
    largest = tl.zeros([BLOCKS], tl.int32)
    for start in range(0, count, BLOCKS):
        place = start + tl.arange(0, BLOCKS)
        bits = tl.load(operand.largest + first + place, mask=place < count, other=0)
        largest = tl.maximum(largest, bits)
    return tl.max(largest, 0)


@triton.jit
def add_loss(v, block, D: tl.constexpr):
    """`quantize_loss_kernel` of a V whose drift is not asked for."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
    columns, nheads, of = tl.arange(0, BLOCK_D), v.blocks.nheads, block.of
    lost = load_blocks(v.rounding.lost, block, nheads, columns, D, 0.0)
    squares, least = (), inf
    for i in tl.static_range(BLOCKS):
        square = tl.sum(lost[i] * lost[i], 0)
        squares = squares + (square,)
        keys = tl.maximum(tl.minimum(of.used - i * ROWS, ROWS), 1).to(tl.float32)
        least = tl.where(i * ROWS < of.used, tl.minimum(least, square / keys), least)
    used = tl.maximum(of.used, 1).to(tl.float32)
    on_average = tl.maximum(tree_sum(squares) / used, 1.1754943508222875e-38)
    share = tl.minimum(2.0 * least / on_average, 1.0)
    addresses = address_of(v.mean, block.sequence, block.head) + columns
    factor = load_number(v.scale, block.sequence, block.head)
    shift = share * factor * ((0.0 + tree_sum(lost)) / used)
    tl.store(addresses, tl.load(addresses, mask=columns < D, other=0.0) + shift, mask=columns < D)
