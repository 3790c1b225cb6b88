"""The query warp: it brings the queries of the next part while the warpgroup computes with these.

A tile's rows are few and lie anywhere, one for each query and head of a group: they are read by
addresses, not by TMA, a round trip to memory that nothing else has to wait for. Those of two
warpgroups are many, and copied by cp.async, so that all are one round trip.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...common.io import clear_tail
from ..compat import copy_async
from ..layouts import column_of, row_of
from ..pieces import in_pieces, piece_of, pieces_of
from ..pipeline import advance, start, wait_empty
from .eight_bits import even_before_odd
from .rows import begins_of, rows_at
from .work import END, PART, half_of, receive_work

ROWS = gl.constexpr(8)  # that a warp has registers for


@gluon.jit
def query_partition(rings, q, output, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    messages_state, state = start(), start()
    work = receive_work(rings.messages, messages_state, WARPS=1)
    while work.kind != END:
        messages_state = advance(messages_state, 2)
        if work.kind == PART:
            wait_empty(rings.q, state)
            WARPGROUPS: gl.constexpr = TILE.WARPGROUPS
            for wg in gl.static_range(WARPGROUPS):
                half = half_of(work, wg, FEATURES=FEATURES, TILE=TILE)
                buffer = rings.q.buffers.index(state.stage * WARPGROUPS + wg)
                load_queries(half, q, buffer=buffer, FEATURES=FEATURES, TILE=TILE)
            if WARPGROUPS == 1:
                fence_async_shared()  # what threads wrote, before wgmma reads it
                mbarrier.arrive(rings.q.full.index(state.stage), count=1)
            else:
                async_copy.mbarrier_arrive(rings.q.full.index(state.stage), increment_count=False)
            state = advance(state, TILE.Q_STAGES)
        work = receive_work(rings.messages, messages_state, WARPS=1)
    if FEATURES.PACKED:  # here, where nothing waits for it
        LAYOUT: gl.constexpr = in_pieces(TILE.BLOCK_DV, piece_of(FEATURES.HEADDIM_V), warps=1)
        clear_tail(
            output.tail,
            output.lse,
            starts=call.optionals.cu_seqlens_q,
            sequences=call.sizes.packed,
            total=call.sizes.seqlen_q,
            nheads=call.sizes.nheads * FEATURES.GROUP,
            program=gl.program_id(0),
            programs=gl.num_programs(0),
            columns=gl.arange(0, TILE.BLOCK_DV, column_of(LAYOUT)),
            D=FEATURES.HEADDIM_V,
        )


@gluon.jit
def load_queries(work, q, buffer, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """(BLOCK_M, BLOCK_D), as far as there are queries; what is in other rows stays in these."""
    PIECE: gl.constexpr = piece_of(FEATURES.HEADDIM)
    LAYOUT: gl.constexpr = in_pieces(TILE.BLOCK_D, PIECE, warps=1)
    columns = gl.arange(0, TILE.BLOCK_D, column_of(LAYOUT))
    stop = (work.seqlen_q - work.start) * FEATURES.GROUP
    M: gl.constexpr = TILE.BLOCK_M
    for first in gl.static_range(0, M, ROWS):
        if first < stop:
            row = first + gl.arange(0, ROWS, row_of(LAYOUT))
            rows = rows_at(work, row, FEATURES=FEATURES, TILE=TILE)
            begins = begins_of(q, work, rows=rows, FEATURES=FEATURES)
            ptrs, exist = pieces_of(begins, rows.is_query, columns, FEATURES.HEADDIM, PIECE)
            if TILE.WARPGROUPS == 1:
                loaded = gl.load(ptrs, mask=exist, other=0.0)
                if TILE.CACHE != "":
                    loaded = even_before_odd(loaded)
                buffer.slice(first, ROWS).store(loaded)
            else:
                copy_async(buffer.slice(first, ROWS), ptrs, mask=exist)
