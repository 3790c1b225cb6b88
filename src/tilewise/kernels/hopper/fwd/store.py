"""Two warps that store O where TMA cannot: rows of headdim 100 are not aligned to 16 bytes.

The matmul warpgroups leave O in shared memory, as they do for TMA, and begin the next tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..pieces import TMA_UNIT, in_pieces, piece_of, pieces_of
from ..pipeline import advance, start
from ..work import END, key_head
from .rows import rows_of
from .varlen import receive_tile

WARPS = gl.constexpr(2)


@gluon.constexpr_function
def rows_at_a_time(columns, piece):
    """Whose addresses are in registers together; of shared memory whole groups of 8 that are
    swizzled alike.
    """
    return min(64, max(8, 512 * piece // columns))


@gluon.jit
def store_partition(rings, output, call, v_step, FEATURES: gl.constexpr, TILE: gl.constexpr):
    messages_state = start()
    parity = gl.to_tensor(0)
    work = receive_tile(rings.messages, messages_state, FEATURES=FEATURES, WARPS=WARPS)
    while work.start != END:
        store_tile(output, work, parity, call, v_step, FEATURES, TILE)
        parity ^= 1
        messages_state = advance(messages_state, 2)
        work = receive_tile(rings.messages, messages_state, FEATURES=FEATURES, WARPS=WARPS)


@gluon.jit
def store_tile(output, work, parity, call, v_step, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """Stores O of all warpgroups, each as soon as it is in its buffer."""
    WARPGROUPS: gl.constexpr = TILE.WARPGROUPS
    DV: gl.constexpr = TILE.BLOCK_DV
    BUFFER: gl.constexpr = output.smem.shape[2]
    shift = 0
    if TILE.V_FLAT:  # columns of the head before
        head_k, _ = key_head(work.head, FEATURES, TILE=TILE)
        shift = head_k * v_step % TMA_UNIT
    for i in range(WARPGROUPS * DV // BUFFER):  # not unrolled: its addresses would spill
        half, warpgroup = i // WARPGROUPS, i % WARPGROUPS
        phase = parity if BUFFER == DV else half
        mbarrier.wait(output.full.index(warpgroup), phase)
        store_rows(output, work, warpgroup, half * BUFFER - shift, call, FEATURES, TILE)
        mbarrier.arrive(output.empty.index(warpgroup), count=1)


@gluon.jit
def store_rows(output, work, warpgroup, column, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """Stores the buffer of a warpgroup, columns of O from `column` on."""
    BUFFER: gl.constexpr = output.smem.shape[2]
    PIECE: gl.constexpr = piece_of(FEATURES.HEADDIM_V)
    LAYOUT: gl.constexpr = in_pieces(BUFFER, PIECE, warps=WARPS)
    ROWS: gl.constexpr = rows_at_a_time(BUFFER, PIECE)
    columns = column + gl.arange(0, BUFFER, gl.SliceLayout(0, LAYOUT))
    buffer = output.smem.index(warpgroup)
    for first in gl.static_range(0, 64, ROWS):
        rows = warpgroup * 64 + first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        begins, exists = rows_of(output.target, work, rows, call, FEATURES, TILE)
        ptrs, exist = pieces_of(begins, exists, columns, FEATURES.HEADDIM_V, PIECE)
        gl.store(ptrs, buffer.slice(first, ROWS).load(LAYOUT), mask=exist)
