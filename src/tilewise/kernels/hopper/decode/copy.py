"""The copy warps: keys and values of pages that are no boxes of TMA, 16 bytes a thread at a time.

A page may have any number of keys, so that the neighbours in a block may lie anywhere. Warps
look up where each row begins and start its copies (cp.async); the barrier of a stage completes when
those of all threads have landed. Rows that are not in use are zeros and not read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..compat import copy_async
from ..layouts import column_of, row_of
from ..pieces import in_pieces
from ..pipeline import advance, start, wait_empty
from .entries import look_up_rows, rows_of
from .scales import copy_row_scales, k_rows, v_rows
from .work import END, PART, blocks_of, keys_of, receive_work


@gluon.jit
def copy_partition(sources, rings, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    messages_state, state = start(), start()
    work = receive_work(rings.messages, messages_state, WARPS=TILE.COPY_WARPS)
    while work.kind != END:
        messages_state = advance(messages_state, 2)
        if work.kind == PART:
            state = copy_part(work, sources, rings, state, call, FEATURES, TILE)
        work = receive_work(rings.messages, messages_state, WARPS=TILE.COPY_WARPS)


@gluon.jit
def copy_part(work, sources, rings, state, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The keys and values of a part, block by block. Entries of the page table are loaded a block
    ahead, so that nothing waits for them.
    """
    N: gl.constexpr = TILE.BLOCK_N
    D: gl.constexpr = TILE.BLOCK_D
    DV: gl.constexpr = TILE.BLOCK_DV
    ROWS: gl.constexpr = TILE.ROWS * TILE.WARPGROUPS
    PIECE: gl.constexpr = 128 // sources.k.ptr.dtype.element_ty.primitive_bitwidth
    LANES: gl.constexpr = by_lane(N, D, piece=PIECE, warps=TILE.COPY_WARPS)
    table, scales = sources.table, call.scales
    keys = keys_of(work, call, FEATURES=FEATURES, ROWS=ROWS)
    first, stop = blocks_of(work, call, FEATURES=FEATURES, ROWS=ROWS, N=N)
    key = first * N + gl.arange(0, N, LANES)
    ahead = look_up_rows(key, table.page_size, work=work, keys=keys, table=table)
    for _ in range(first, stop):
        rows = rows_of(ahead, key, keys=keys, table=table)
        key += N
        ahead = look_up_rows(key, table.page_size, work=work, keys=keys, table=table)
        k_at, v_at = rings.k.full.index(state.stage), rings.v.full.index(state.stage)
        copy_block(sources.k, rings.k, state, work, rows, D, FEATURES.HEADDIM, TILE)
        if scales.k_row is not None:
            copy_row_scales(k_rows(scales), rings.k_scales.index(state.stage), work.head_k, rows)
        async_copy.mbarrier_arrive(k_at, increment_count=False)
        copy_block(sources.v, rings.v, state, work, rows, DV, FEATURES.HEADDIM_V, TILE)
        if scales.v_row is not None:
            copy_row_scales(v_rows(scales), rings.v_scales.index(state.stage), work.head_k, rows)
        async_copy.mbarrier_arrive(v_at, increment_count=False)
        state = advance(state, TILE.STAGES)
    return state


@gluon.constexpr_function
def by_lane(rows, columns, piece, warps):
    """One number per row, of the rows that a warp copies (`in_pieces`): each lane has another one,
    as far as there are so many.
    """
    across = min(32, columns // piece)
    together = 32 // across  # rows that a warp copies by one instruction
    bits = [[1 << i] for i in range(rows.bit_length() - 1)]
    first = together.bit_length() - 1  # bits of rows that are in lanes, then those of warps
    stop = (together * warps).bit_length() - 1
    count = across.bit_length() - 1
    lanes = bits[:first] + (bits[stop:] + [[0]] * count)[:count]
    return gl.DistributedLinearLayout(bits[stop + count :], lanes, bits[first:stop], [], [rows])


@gluon.jit
def copy_block(
    x, ring, state, work, rows, BLOCK: gl.constexpr, HEADDIM: gl.constexpr, TILE: gl.constexpr
):
    """Starts to copy a block of keys or values, (N, BLOCK)."""
    PIECE: gl.constexpr = 128 // x.ptr.dtype.element_ty.primitive_bitwidth
    LAYOUT: gl.constexpr = in_pieces(BLOCK, PIECE, warps=TILE.COPY_WARPS)
    N: gl.constexpr = TILE.BLOCK_N
    columns = gl.arange(0, BLOCK, column_of(LAYOUT))
    wait_empty(ring, state)
    # Each lane multiplies for one row; those that copy it read that. Below 0: not in use
    begins = gl.where(rows.is_used, rows.page * x.batch + rows.row * x.row, -1)
    begins = gl.convert_layout(begins, row_of(LAYOUT))[:, None]
    ptrs = x.ptr + work.head_k.to(gl.int64) * x.head + begins + columns[None, :]
    ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [1, 16]), [1, PIECE])
    inside = gl.max_constancy((begins >= 0) & (columns < HEADDIM)[None, :], [1, PIECE])
    buffer = ring.buffers.index(state.stage).reshape((N, BLOCK))
    copy_async(buffer, ptrs, mask=inside)
