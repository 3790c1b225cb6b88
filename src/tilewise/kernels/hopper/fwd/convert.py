"""Keys and values of an 8-bit cache between memory and the matmuls: four warps convert each tile.

    load warp -- TMA --> staged tiles, 8 bits -- convert warps --> tiles of K and V, 16 bits

Every e4m3 and int8 is a number of fp16 and of bf16, so that the matmuls see the tiles of a cache
that was converted before, and have its bits. Staged tiles come in the order in which they are
needed: K of a block, V of the block before.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ....tile.score import in_units
from ....tile.types import Table
from ..compat import reinterpret
from ..decode.eight_bits import neighbours
from ..decode.entries import look_up_rows, rows_of
from ..decode.scales import copy_row_scales, have_scales, k_rows, sequence_scale, v_rows
from ..layouts import doublings, shared
from ..pipeline import PipelineState, advance, release, start, wait_empty, wait_full
from ..work import END, key_block, key_head
from .key_blocks import load_rows, seen_keys
from .parts import receive_first, receive_part
from .varlen import lengths_in

WARPS = gl.constexpr(4)
TINY = gl.constexpr(2.0**-100)
ROWS = gl.constexpr(64)  # of a tile that are in registers at a time


@gluon.constexpr_function
def words_of_rows(words):
    """(ROWS, words of four bytes): a thread has 16 bytes, and stores them as 32.

    Eight lanes that load or store at a time meet no bank conflict: they have four neighbouring
    pieces of 16 bytes in each of two rows, which swizzles move to the other half of the banks when
    they load, as the rows are 4 or more apart, and to odd pieces from even ones when they store, as
    one row is odd.
    """
    registers = [[0, 1], [0, 2], *doublings(16, words, dim=1), [32, 0]]
    lanes = [[0, 4], [0, 8], [5, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], [ROWS.value, words])


@gluon.jit
def convert_partition(staged, rings, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    N: gl.constexpr = TILE.BLOCK_N
    scales = call.optionals.scales
    HAVE_SCALES: gl.constexpr = have_scales(scales.k_row, scales.v_row)
    # Without scales of rows only the number of a tile's blocks counts
    HAS_PARTS: gl.constexpr = HAVE_SCALES and call.optionals.parts is not None
    table = Table(None, 0, num_pages=0, page_size=0)
    if call.optionals.pages is not None:
        table = call.optionals.pages
    key_in_block = gl.arange(0, N, gl.BlockedLayout([1], [32], [WARPS], [0]))
    kv_ring = rings.kv_ring
    tile_state, state = start(), start()
    has_values = False  # the first step of all has none
    work, parts, messages_state = receive_first(rings.messages, HAS_PARTS, FEATURES=FEATURES)
    while work.start != END:
        sign = sign_of_keys(work, call, FEATURES=FEATURES, TILE=TILE)
        head_k, _ = key_head(work.head, FEATURES, TILE=TILE)
        keys = seen_keys(work, call, FEATURES=FEATURES)
        key = key_block(work, 0, call, FEATURES, TILE) * N + key_in_block
        ahead = 0, 0
        if HAVE_SCALES:
            ahead = look_up_rows(key, table.page_size, work=work, keys=keys, table=table)
        for i in range(work.last + 1 - work.first):
            wait_empty(kv_ring, state)
            if HAVE_SCALES:
                rows = rows_of(ahead, key, keys=keys, table=table)
                copy_scales(kv_ring, state, scales, head_k=head_k, rows=rows)
                key = key_block(work, i + 1, call, FEATURES, TILE) * N + key_in_block
                ahead = look_up_rows(key, table.page_size, work=work, keys=keys, table=table)
            k_tile = kv_ring.k.index(state.stage)
            tile_state = convert_tile(staged, tile_state, k_tile, sign, TILE)
            if has_values:
                v_tile = kv_ring.v.index(state.stage)
                tile_state = convert_tile(staged, tile_state, v_tile, 0, TILE)
            hand_on(kv_ring, state, HAVE_SCALES)
            state = advance(state, TILE.STAGES)
            has_values = True
        work, parts, messages_state = receive_part(
            rings.messages, messages_state, work, parts, HAS_PARTS, FEATURES
        )
    if has_values:
        wait_empty(kv_ring, state)
        convert_tile(staged, tile_state, kv_ring.v.index(state.stage), 0, TILE)
        hand_on(kv_ring, state, HAVE_SCALES)


@gluon.jit
def hand_on(kv_ring, state, HAVE_SCALES: gl.constexpr):
    """Says that a stage is full; of scales, each thread when its own have landed."""
    if HAVE_SCALES:
        async_copy.mbarrier_arrive(kv_ring.full.index(state.stage), increment_count=False)
    fence_async_shared()  # what threads wrote, before wgmma reads it
    mbarrier.arrive(kv_ring.full.index(state.stage), count=1)


@gluon.jit
def convert_tile(staged, state, to, sign, TILE: gl.constexpr):
    """Converts the next staged tile, whose words are xored with `sign`, and releases it. Returns
    the state of the one after it.
    """
    N: gl.constexpr = to.shape[0]
    WORDS: gl.constexpr = to.shape[1] // 4
    BYTES: gl.constexpr = shared(N, WORDS, dtype=gl.int32)
    PAIRS: gl.constexpr = shared(N, 2 * WORDS, dtype=gl.int32)
    LAYOUT: gl.constexpr = words_of_rows(WORDS)
    wait_full(staged, state)
    tile = staged.buffers.index(state.stage)
    tile = reinterpret(tile, gl.int32, shape=[N, WORDS], layout=BYTES)
    pairs = reinterpret(to, gl.int32, shape=[N, 2 * WORDS], layout=PAIRS)
    for first in gl.static_range(0, N, ROWS):
        codes = tile.slice(first, ROWS).load(LAYOUT)
        if TILE.CACHE == "int8":
            numbers = neighbours(codes, to.dtype, True) ^ sign
        else:
            numbers = neighbours(codes ^ sign, to.dtype, False)
        pairs.slice(first, ROWS).store(numbers)
    release(staged, state)
    return advance(state, TILE.STAGED)


@gluon.jit
def stage_tile(staged, state, sources, block, WHICH: gl.constexpr, exists, TILE: gl.constexpr):
    """Loads a tile of K (WHICH is 0) or V as soon as its stage is empty. Returns the next state, or
    the same where the tile does not exist.
    """
    desc = sources.k if WHICH == 0 else sources.v
    BOXES: gl.constexpr = TILE.BLOCK_N // TILE.PAGE if TILE.PAGE > 0 else 1
    full = staged.full.index(state.stage)
    mbarrier.wait(staged.empty.index(state.stage), state.phase ^ 1, pred=exists)
    mbarrier.expect(full, BOXES * desc.block_type.nbytes, pred=exists)
    buffer = staged.buffers.index(state.stage)
    load_rows(sources, block, WHICH, full=full, buffer=buffer, pred=exists, step=0, TILE=TILE)
    after = advance(state, TILE.STAGED)
    stage = gl.where(exists, after.stage, state.stage)
    return PipelineState(stage, gl.where(exists, after.phase, state.phase))


@gluon.jit
def copy_scales(kv_ring, state, scales, head_k, rows):
    """Starts to copy the scales of a block's rows, where each has its own."""
    if scales.k_row is not None:
        copy_row_scales(k_rows(scales), kv_ring.k_scales.index(state.stage), head_k, rows=rows)
    if scales.v_row is not None:
        copy_row_scales(v_rows(scales), kv_ring.v_scales.index(state.stage), head_k, rows=rows)


@gluon.jit
def sign_of_keys(work, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """What words of keys, of e4m3 or of 16 bits, are xored with: K's scale joins that of scores, a
    factor of the exponent that must be positive, and its sign joins K.
    """
    if call.optionals.scales.k is None or call.optionals.scales.k_row is not None:
        return 0
    else:
        NEGATIVE: gl.constexpr = -0x7FFF8000 if TILE.CACHE == "int8" else -0x7F7F7F80
        scale = scale_in(work, 0, call=call, FEATURES=FEATURES, TILE=TILE)
        return gl.where(scale < 0.0, NEGATIVE, 0)


@gluon.jit
def scale_in(work, WHICH: gl.constexpr, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The `sequence_scale` of a tile's keys (WHICH is 0), or values; 1 without keys."""
    head_k, _ = key_head(work.head, FEATURES, TILE=TILE)
    has_keys = lengths_in(work, call, FEATURES=FEATURES).seqlen_k > 0
    return sequence_scale(call.optionals.scales, WHICH, work.batch, head_k, has_keys)


@gluon.jit
def unit_of_keys(work, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The unit of a tile's scores: K's scale without its sign, or 1. Never 0, as a hidden score is
    -inf: a number so small that all others become equal.
    """
    scales = call.optionals.scales
    if TILE.CACHE == "" or scales.k is None or scales.k_row is not None:
        return 1.0
    else:
        scale = scale_in(work, 0, call=call, FEATURES=FEATURES, TILE=TILE)
        return gl.where(scale == 0.0, TINY, gl.abs(scale))


@gluon.jit
def numbers_in(unit, call, TILE: gl.constexpr):
    """The numbers of a tile whose scores have this unit."""
    if TILE.CACHE == "":
        return call.numbers
    else:
        return in_units(call.numbers, unit)
