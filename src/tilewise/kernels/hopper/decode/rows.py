"""Rows of a tile: which query and head they are, where they lie, and how they leave."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ....tile.softmax import finish, load_sink
from ....tile.splits import SplitState
from ..layouts import column_of, row_of
from ..pieces import in_pieces
from .scales import sequence_scale
from .work import partial_row


class Rows(NamedTuple):
    """Rows of a tile: row r is token r // GROUP and head r % GROUP."""

    token: gl.tensor  # in the sequence
    head: gl.tensor
    is_query: gl.tensor


class Output(NamedTuple):
    """What is written."""

    out: Any  # Strided
    lse: gl.tensor
    partials: Any  # SplitState of memory, fp32, by the rows of `partial_row`
    tail: Any  # `out` where its rows of no sequence are to be cleared, or None


@gluon.jit
def rows_at(work, row, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """Rows of a tile."""
    GROUP: gl.constexpr = FEATURES.GROUP
    TOKENS: gl.constexpr = TILE.ROWS // GROUP
    token = row // GROUP
    is_query = (token < TOKENS) & (work.start + token < work.seqlen_q)
    return Rows(work.start + token, work.head_k * GROUP + row % GROUP, is_query=is_query)


@gluon.jit
def rows_in(work, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """How many rows of a tile are queries."""
    GROUP: gl.constexpr = FEATURES.GROUP
    return gl.minimum((work.seqlen_q - work.start) * GROUP, TILE.ROWS // GROUP * GROUP)


@gluon.jit
def begins_of(x, work, rows, FEATURES: gl.constexpr):
    """Where rows begin in a `Strided` tensor."""
    batch = 0 if FEATURES.PACKED else work.batch
    ptr = x.ptr + gl.to_tensor(batch).to(gl.int64) * x.batch
    return ptr + (work.first_q + rows.token).to(gl.int64) * x.row + rows.head.to(gl.int64) * x.head


@gluon.jit
def write_rows(work, state, rows, columns, has_lse, output, call, FEATURES: gl.constexpr):
    """Columns of rows, and their lse."""
    sink = load_sink(call.optionals, rows.head, FEATURES=FEATURES)
    rescale, lse = finish(state.m_i, state.l_i, sink_log2=sink, FEATURES=FEATURES)
    out = state.acc_o * rescale[:, None]
    if call.scales.v is not None:
        has_keys = work.seqlen_k > 0
        out = out * sequence_scale(call.scales, 1, work.batch, work.head_k, has_keys)
    out = out.to(output.out.ptr.dtype.element_ty)
    begins = begins_of(output.out, work, rows=rows, FEATURES=FEATURES)
    inside = rows.is_query[:, None] & (columns < FEATURES.HEADDIM_V)[None, :]
    gl.store(begins[:, None] + columns[None, :], out, mask=inside)
    batch = 0 if FEATURES.PACKED else work.batch
    nheads = call.sizes.nheads * FEATURES.GROUP
    row = (gl.to_tensor(batch).to(gl.int64) * nheads + rows.head) * call.sizes.seqlen_q
    ptrs = output.lse + (row + work.first_q + rows.token)
    gl.store(ptrs, lse, mask=rows.is_query & has_lse)


@gluon.jit
def store_partial(work, piece, state, partials, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The state of a piece, unnormalised."""
    layout: gl.constexpr = state.acc_o.type.layout
    rows = rows_at(work, gl.arange(0, TILE.BLOCK_M, row_of(layout)), FEATURES=FEATURES, TILE=TILE)
    offset = partial_row(work, piece, rows.token, rows.head, call, FEATURES, TILE.STATES)
    columns = gl.arange(0, TILE.BLOCK_DV, column_of(layout))
    inside = rows.is_query[:, None] & (columns < FEATURES.HEADDIM_V)[None, :]
    ptrs = partials.acc_o + (offset * FEATURES.HEADDIM_V)[:, None] + columns[None, :]
    # What is read meanwhile is read once, and would push these out of the L2 cache
    gl.store(ptrs, state.acc_o, mask=inside, eviction_policy="evict_last")
    gl.store(partials.m_i + offset, state.m_i, mask=rows.is_query, eviction_policy="evict_last")
    gl.store(partials.l_i + offset, state.l_i, mask=rows.is_query, eviction_policy="evict_last")


@gluon.jit
def load_partial(work, piece, is_seen, rows, columns, partials, call, FEATURES: gl.constexpr):
    """Columns of the state of a piece, from the L2 cache; that of no keys where it is not seen."""
    offset = partial_row(work, piece, rows.token, rows.head, call, FEATURES)
    mask = rows.is_query & is_seen
    inside = mask[:, None] & (columns < FEATURES.HEADDIM_V)[None, :]
    ptrs = partials.acc_o + (offset * FEATURES.HEADDIM_V)[:, None] + columns[None, :]
    acc_o = gl.load(ptrs, mask=inside, other=0.0, cache_modifier=".cg")
    m_i = gl.load(partials.m_i + offset, mask=mask, other=float("-inf"), cache_modifier=".cg")
    l_i = gl.load(partials.l_i + offset, mask=mask, other=0.0, cache_modifier=".cg")
    return SplitState(acc_o, m_i, l_i=l_i)


@gluon.jit
def clear_unused(v_tile, n, keys, ROWS: gl.constexpr, WARPS: gl.constexpr, TILE: gl.constexpr):
    """Zeros in rows of V that are not in use, which may hold NaN: 0 times NaN is NaN. ROWS at a
    time by WARPS.
    """
    N: gl.constexpr = TILE.BLOCK_N
    LAYOUT: gl.constexpr = in_pieces(TILE.BLOCK_DV, 8, warps=WARPS)
    NOTHING: gl.constexpr = 0.0 if TILE.CACHE == "" else 0
    for i in gl.static_range(0, N, ROWS):
        rows = v_tile.slice(i, ROWS)
        row = n + i + gl.arange(0, ROWS, row_of(LAYOUT))
        is_used = (row >= keys.first) & (row < keys.last)
        rows.store(gl.where(is_used[:, None], rows.load(LAYOUT), NOTHING))
    fence_async_shared()  # what threads wrote, before wgmma reads it
