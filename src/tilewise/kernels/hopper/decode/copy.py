"""The copy warps: keys and values of pages that are no boxes of TMA, 16 bytes a thread at a time.

A page may have any number of keys, so that the neighbours in a block may lie anywhere. Warps
look up where each row begins and start its copies (cp.async); the barrier of a stage completes when
those of all threads have landed. Rows that are not in use are zeros and not read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ....tile.bounds import clamp
from ....tile.splits import piece_keys
from ..layouts import column_of, row_of
from ..pieces import in_pieces
from ..pipeline import advance, start, wait_empty
from .scales import copy_scales, k_rows, v_rows
from .work import END, PART, copied, keys_of, receive_work


@gluon.jit
def copy_partition(sources, rings, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    messages_state, state = start(), start()
    work = receive_work(rings.messages, messages_state, TILE.COPY_WARPS)
    while work.kind != END:
        messages_state = advance(messages_state, 2)
        if work.kind == PART:
            state = copy_part(work, sources, rings, state, call, FEATURES, TILE)
        work = receive_work(rings.messages, messages_state, TILE.COPY_WARPS)


@gluon.jit
def copy_part(work, sources, rings, state, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The keys and values of a part, block by block."""
    N: gl.constexpr = TILE.BLOCK_N
    D: gl.constexpr = TILE.BLOCK_D
    DV: gl.constexpr = TILE.BLOCK_DV
    STAGES: gl.constexpr = TILE.STAGES if TILE.CACHE == "" else TILE.CACHE_STAGES
    into = copied(rings, TILE)
    table = sources.table
    keys = keys_of(work, call, FEATURES, TILE.ROWS * TILE.WARPGROUPS)
    split_size = call.sizes.split_size
    for piece in range(work.piece, work.stop):
        first, stop = piece_keys(piece * split_size, split_size, keys, N)
        for n in range(first, stop, N):
            k_at, v_at = into.k.full.index(state.stage), into.v.full.index(state.stage)
            copy_block(sources.k, into.k, state, work, n, keys, table, D, FEATURES.HEADDIM, TILE)
            if call.scales.k_row is not None:
                smem = into.k_scales.index(state.stage)
                copy_scales(k_rows(call.scales), smem, work, n, keys, table, TILE.COPY_WARPS)
            async_copy.mbarrier_arrive(k_at, increment_count=False)
            copy_block(sources.v, into.v, state, work, n, keys, table, DV, FEATURES.HEADDIM_V, TILE)
            if call.scales.v_row is not None:
                smem = into.v_scales.index(state.stage)
                copy_scales(v_rows(call.scales), smem, work, n, keys, table, TILE.COPY_WARPS)
            async_copy.mbarrier_arrive(v_at, increment_count=False)
            state = advance(state, STAGES)
    return state


@gluon.jit
def copy_block(
    x, ring, state, work, n, keys, table,
    BLOCK: gl.constexpr, HEADDIM: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Starts to copy a block of keys or values, (N, BLOCK)."""
    PIECE: gl.constexpr = 128 // x.ptr.dtype.element_ty.primitive_bitwidth
    LAYOUT: gl.constexpr = in_pieces(BLOCK, PIECE, TILE.COPY_WARPS)
    N: gl.constexpr = TILE.BLOCK_N
    key = n + gl.arange(0, N, row_of(LAYOUT))
    columns = gl.arange(0, BLOCK, column_of(LAYOUT))
    is_seen = (key >= keys.first) & (key < keys.last)
    place = key // table.page_size
    entry = work.batch.to(gl.int64) * table.stride + place
    page = gl.load(table.page_table + entry, mask=is_seen, other=0)
    page = clamp(page, 0, table.num_pages - 1).to(gl.int64)
    row = (key - place * table.page_size).to(gl.int64)
    begins = x.ptr + work.head_k.to(gl.int64) * x.head + page * x.batch + row * x.row
    ptrs = begins[:, None] + columns[None, :]
    ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [1, 16]), [1, PIECE])
    inside = gl.max_constancy(is_seen[:, None] & (columns < HEADDIM)[None, :], [1, PIECE])
    wait_empty(ring, state)
    buffer = ring.buffers.index(state.stage).reshape((N, BLOCK))
    async_copy.async_copy_global_to_shared(buffer, ptrs, mask=inside)
