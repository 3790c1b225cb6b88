"""The fold of a tile that several programs worked on: its parts' states, from left to right.

The program that ends a tile's last part folds it at once: it knows from the tile's counter that the
others are done, and so does not wait. Of a long sequence that would take longer than all else: of
many pieces, slices of 8 rows and 32 columns are handed out as parts are, and all programs fold.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.split_schedule import FOLD_COLUMNS, FOLD_ROWS
from ....tile.splits import SplitState, fold
from ..compat import barrier
from ..layouts import WARPGROUP_WARPS, column_of, row_of
from ..pieces import in_pieces
from .rows import rows_at, write_rows
from .work import keys_of, partial_row, slices_in, tile_counter

STATES_AHEAD = gl.constexpr(16)  # loaded while as many are folded: both fit in the registers


@gluon.jit
def fold_slice(work, output, counters, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """Some rows and columns of a tile. The tile's last slice sets its counter back to 0."""
    across: gl.constexpr = TILE.BLOCK_DV // FOLD_COLUMNS
    row, column = work.index // across * FOLD_ROWS, work.index % across * FOLD_COLUMNS
    if row < rows_in(work, FEATURES, TILE=TILE):
        fold_ahead(work, row, column, output, call, FEATURES, TILE)
    counter = tile_counter(work, counters, call=call, FEATURES=FEATURES)
    slices = slices_in(work, FEATURES, ROWS=TILE.ROWS, BLOCK_DV=TILE.BLOCK_DV)
    done = gl.atomic_add(counter, 1, sem="relaxed")
    if done == work.parts + slices - 1:
        gl.atomic_xchg(counter, 0, sem="relaxed")


@gluon.jit
def end_part(work, output, counters, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """Says that a part has left its states. The last of a tile's parts folds them, unless slices
    are handed out for that.
    """
    DV: gl.constexpr = TILE.BLOCK_DV
    counter = tile_counter(work, counters, call=call, FEATURES=FEATURES)
    barrier()  # all threads have written what the counter then says is there
    done = gl.atomic_add(counter, 1, sem="acq_rel")
    if (done == work.parts - 1) & (work.is_sliced == 0):
        gl.atomic_xchg(counter, 0, sem="relaxed")
        rows = gl.minimum((work.seqlen_q - work.start) * FEATURES.GROUP, TILE.ROWS)
        if rows <= 4:
            fold_rows(work, 0, 0, output, call, 4, DV, 2048 // DV, FEATURES, TILE)
        else:
            for row in range(0, rows, 8):
                fold_rows(work, row, 0, output, call, 8, DV, 1024 // DV, FEATURES, TILE)


@gluon.jit
def rows_in(work, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """How many rows of a tile are queries."""
    GROUP: gl.constexpr = FEATURES.GROUP
    return gl.minimum((work.seqlen_q - work.start) * GROUP, TILE.ROWS // GROUP * GROUP)


@gluon.jit
def fold_rows(
    work, first_row, first_column, output, call, M: gl.constexpr, COLUMNS: gl.constexpr,
    AT_ONCE: gl.constexpr, FEATURES: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """M rows and COLUMNS columns of a tile, written. AT_ONCE states are asked for together: one by
    one, each would cost a trip to the L2 cache, and the registers hold as many.
    """
    LAYOUT: gl.constexpr = in_pieces(COLUMNS, 4, warps=WARPGROUP_WARPS)
    row = first_row + gl.arange(0, M, row_of(LAYOUT))
    rows = rows_at(work, row, FEATURES=FEATURES, TILE=TILE)
    columns = first_column + gl.arange(0, COLUMNS, column_of(LAYOUT))
    keys = keys_of(work, call, FEATURES=FEATURES, ROWS=TILE.ROWS)
    # What the tile's first part has folded lies where its first piece would
    state = load_partial(work, work.first, True, rows, columns, output.partials, call, FEATURES)
    for piece in range(work.first + work.length, keys.stop, AT_ONCE):
        states = ()
        for i in gl.static_range(AT_ONCE):
            is_seen = (piece + i >= keys.piece) & (piece + i < keys.stop)
            states = states + (
                load_partial(
                    work, piece + i, is_seen, rows, columns, output.partials, call, FEATURES
                ),
            )
        for i in gl.static_range(AT_ONCE):
            acc_o, m_i, l_i = states[i]
            state = fold(state, SplitState(acc_o, m_i, l_i=l_i))
    write_rows(work, state, rows, columns, first_column == 0, output, call, FEATURES)


@gluon.jit
def fold_ahead(
    work, first_row, first_column, output, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """Folds a slice of rows and columns: while STATES_AHEAD states are folded, as many others are
    in flight. Only the first of these groups may be short, so the others are loaded without masks;
    there a row that is no query has the numbers of one.
    """
    AT_ONCE: gl.constexpr = STATES_AHEAD
    LAYOUT: gl.constexpr = in_pieces(FOLD_COLUMNS, 2, warps=WARPGROUP_WARPS)
    partials = output.partials
    row = first_row + gl.arange(0, FOLD_ROWS, row_of(LAYOUT))
    rows = rows_at(work, row, FEATURES=FEATURES, TILE=TILE)
    columns = first_column + gl.arange(0, FOLD_COLUMNS, column_of(LAYOUT))
    keys = keys_of(work, call, FEATURES=FEATURES, ROWS=TILE.ROWS)
    state = load_partial(work, work.first, True, rows, columns, partials, call, FEATURES)
    begin = gl.maximum(work.first + work.length, keys.piece)
    piece = keys.stop - gl.maximum(keys.stop - begin, 0) // AT_ONCE * AT_ONCE
    states = ()
    for i in gl.static_range(AT_ONCE):
        one = piece - AT_ONCE + i
        states = states + (
            load_partial(work, one, one >= begin, rows, columns, partials, call, FEATURES),
        )
    some = rows_at(work, gl.where(rows.is_query, row, first_row), FEATURES=FEATURES, TILE=TILE)
    offset = partial_row(work, piece, some.token, some.head, call, FEATURES).to(gl.int32)
    apart = work.seqlen_q * (call.sizes.nheads * FEATURES.GROUP)  # the same rows of two pieces
    while piece < keys.stop:
        following = ()
        for _ in gl.static_range(AT_ONCE):
            following = following + (load_at(offset, columns, partials, FEATURES),)
            offset += apart
        state = fold_all(state, states)
        states = following
        piece += AT_ONCE
    state = fold_all(state, states)
    write_rows(work, state, rows, columns, first_column == 0, output, call, FEATURES)


@gluon.jit
def fold_all(state, found):
    """A state and those that follow it."""
    for i in gl.static_range(len(found)):
        acc_o, m_i, l_i = found[i]
        state = fold(state, SplitState(acc_o, m_i, l_i=l_i))
    return state


@gluon.jit
def load_at(row, columns, partials, FEATURES: gl.constexpr):
    """Columns of a state in rows of partial states, which are all there."""
    offset = row.to(gl.int64)
    inside = (columns < FEATURES.HEADDIM_V)[None, :]
    ptrs = partials.acc_o + (offset * FEATURES.HEADDIM_V)[:, None] + columns[None, :]
    acc_o = gl.load(ptrs, mask=inside, other=0.0, cache_modifier=".cg")
    m_i = gl.load(partials.m_i + offset, cache_modifier=".cg")
    l_i = gl.load(partials.l_i + offset, cache_modifier=".cg")
    return SplitState(acc_o, m_i, l_i=l_i)


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
