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
from .factors import fold_by_factors
from .rows import load_partial, rows_at, rows_in, write_rows
from .work import keys_of, slices_in, tile_counter


@gluon.jit
def fold_slice(work, output, smem, counters, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """Some rows and columns of a tile. The tile's last slice sets its counter back to 0."""
    across: gl.constexpr = TILE.BLOCK_DV // FOLD_COLUMNS
    row, column = work.index // across * FOLD_ROWS, work.index % across * FOLD_COLUMNS
    if row < rows_in(work, FEATURES, TILE=TILE):
        if TILE.SWAPPED:
            fold_by_factors(
                work, row, column, output=output, smem=smem, call=call, FEATURES=FEATURES, TILE=TILE
            )
        else:
            fold_rows(
                work, row, column, output, call, FOLD_ROWS, FOLD_COLUMNS, 16, FEATURES, TILE
            )  # fmt: skip
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
