"""Keys of a tile divided into parts, of which several programs compute one each: FlashDecoding's
split of the keys (https://crfm.stanford.edu/2023/10/12/flashdecoding.html) on the schedule of the
training forward, for chunks whose tiles are fewer than SMs.

A part leaves its state, unnormalised, in fp32. A second kernel folds those of a tile from left to
right and writes the rows, on all SMs: alone, the program that ends a tile's last part
took 5 to 15 us longer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.schedule import query_tile_in_group
from ....tile.softmax import finish, load_sink
from ....tile.splits import SplitState, fold
from ..layouts import column_of, row_of
from ..operands import row_factor
from ..pieces import in_pieces
from .rows import head_of_row, query_of_row
from .varlen import Ragged, open_in_batch

FEWEST_BLOCKS = gl.constexpr(6)  # of a part, where there are several
FOLD_ROWS = gl.constexpr(8)  # of a program of the fold
AT_ONCE = gl.constexpr(4)  # states that it loads before it folds the first


@gluon.jit
def open_part(number, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The part of a number: neighbours are different tiles, which mostly read the same keys. A
    sequence of few keys does not use all parts: one without blocks takes a block of no keys.
    """
    count = call.optionals.parts.count
    tiles = call.queue.tiles // count
    tile, part = number % tiles, number // tiles
    work = open_in_batch(tile, call, FEATURES=FEATURES, TILE=TILE)
    blocks = work.last + 1 - work.first
    used = gl.minimum(gl.maximum(blocks // FEWEST_BLOCKS, 1), count)
    is_empty = part >= used
    first = work.first + gl.where(is_empty, 0, blocks * part // used)
    stop = work.first + gl.where(is_empty, 1, blocks * (part + 1) // used)
    return Ragged(
        work.start,
        work.head,
        batch=work.batch,
        last=stop - 1,
        first=first,
        full_first=work.full_first,
        full_stop=gl.where(is_empty, 0, work.full_stop),
        seqlen_q=work.seqlen_q,
        seqlen_k=gl.where(is_empty, 0, work.seqlen_k),
        diagonal=work.diagonal,
        first_q=tile,
        first_k=work.first_k,
        rows_q=part,
    )


@gluon.jit
def leave_part(acc_o, m_i, l_i, work, parts, WG: gl.constexpr, TILE: gl.constexpr):
    """Writes the state of a warpgroup's rows; O where there are keys."""
    LAYOUT: gl.constexpr = acc_o.type.layout
    first = ((work.first_q * TILE.WARPGROUPS + WG) * parts.count + work.rows_q) * 64
    rows = first + gl.arange(0, 64, row_of(LAYOUT))
    if work.seqlen_k > 0:
        gl.store(state_ptrs(parts, rows, LAYOUT=LAYOUT, TILE=TILE), acc_o)
    gl.store(parts.m_i + rows, row_factor(m_i, LAYOUT))
    gl.store(parts.l_i + rows, row_factor(l_i, LAYOUT))


@gluon.jit
def fold_parts_kernel(
    out, lse, parts, queue, sizes, optionals, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """FOLD_ROWS rows of a tile, from the states of its parts."""
    M: gl.constexpr = FOLD_ROWS
    LAYOUT: gl.constexpr = in_pieces(TILE.BLOCK_DV, 4, warps=4)
    group = gl.program_id(0) // (64 // M)  # of a warpgroup's rows
    row = gl.program_id(0) % (64 // M) * M + gl.arange(0, M, row_of(LAYOUT))
    rows = group * parts.count * 64 + row
    state = load_state(parts, 0, rows, LAYOUT=LAYOUT, TILE=TILE)
    for part in range(1, parts.count, AT_ONCE):
        states = ()
        for i in gl.static_range(AT_ONCE):
            states = states + (load_state(parts, part + i, rows, LAYOUT=LAYOUT, TILE=TILE),)
        for i in gl.static_range(AT_ONCE):
            acc_o, m_i, l_i = states[i]
            state = fold(state, SplitState(acc_o, m_i, l_i=l_i))
    tile, warpgroup = group // TILE.WARPGROUPS, group % TILE.WARPGROUPS
    m_block, head, batch = query_tile_in_group(tile, queue, sizes.seqlen_q, TILE.BLOCK_M)
    row += warpgroup * 64
    q_idx = query_of_row(m_block * TILE.BLOCK_M, row, TILE=TILE)
    heads = gl.to_tensor(head_of_row(head, row, FEATURES=FEATURES, TILE=TILE))
    exists = q_idx < sizes.seqlen_q
    if TILE.PACK > 1:
        exists = exists & (row % TILE.PACK < FEATURES.GROUP)
    sink = load_sink(optionals, heads, FEATURES)
    rescale, row_lse = finish(state.m_i, state.l_i, sink, FEATURES)
    batch = gl.to_tensor(batch).to(gl.int64)
    begins = batch * out.batch + q_idx.to(gl.int64) * out.row + heads.to(gl.int64) * out.head
    columns = gl.arange(0, TILE.BLOCK_DV, column_of(LAYOUT))
    inside = exists[:, None] & (columns < FEATURES.HEADDIM_V)[None, :]
    rounded = (state.acc_o * rescale[:, None]).to(out.ptr.dtype.element_ty)
    gl.store(out.ptr + begins[:, None] + columns[None, :], rounded, mask=inside)
    place = (batch * sizes.nheads + heads) * sizes.seqlen_q + q_idx
    gl.store(lse + place, row_lse, mask=exists)


@gluon.jit
def state_ptrs(parts, rows, LAYOUT: gl.constexpr, TILE: gl.constexpr):
    """Where rows of O lie, by tile, warpgroup, part."""
    columns = gl.arange(0, TILE.BLOCK_DV, column_of(LAYOUT))
    return parts.acc_o + (rows.to(gl.int64) * TILE.BLOCK_DV)[:, None] + columns[None, :]


@gluon.jit
def load_state(parts, part, rows, LAYOUT: gl.constexpr, TILE: gl.constexpr):
    """A state; that of no keys past the last part."""
    rows += part * 64
    exists = part + rows * 0 < parts.count
    ptrs = state_ptrs(parts, rows, LAYOUT=LAYOUT, TILE=TILE)
    m_i = gl.load(parts.m_i + rows, mask=exists, other=float("-inf"))
    acc_o = gl.load(ptrs, mask=(m_i != float("-inf"))[:, None], other=0.0)
    return SplitState(acc_o, m_i, l_i=gl.load(parts.l_i + rows, mask=exists, other=0.0))
