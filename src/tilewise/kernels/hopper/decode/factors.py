"""The fold of a slice of a long sequence, with the bits of `tile.splits.fold`: factors of states
are computed once for all threads of a row, each by one lane, and pass through shared memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....tile.split_schedule import FOLD_COLUMNS, FOLD_ROWS
from ....tile.splits import SplitState
from ..compat import reinterpret
from ..layouts import WARPGROUP_WARPS, column_of, row_of
from ..pieces import in_pieces
from .rows import load_partial, rows_at, write_rows
from .work import keys_of, partial_row

STATES_AHEAD = gl.constexpr(16)  # of a group, while which is folded two others are in flight


@gluon.jit
def fold_by_factors(
    work, first_row, first_column, output, smem, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """Folds a slice of rows and columns, and writes it."""
    COUNT: gl.constexpr = STATES_AHEAD
    LAYOUT: gl.constexpr = in_pieces(FOLD_COLUMNS, 2, warps=WARPGROUP_WARPS)
    BY_STATE: gl.constexpr = in_pieces(COUNT, 1, warps=WARPGROUP_WARPS)
    row = first_row + gl.arange(0, FOLD_ROWS, row_of(LAYOUT))
    rows = rows_at(work, row, FEATURES=FEATURES, TILE=TILE)
    columns = first_column + gl.arange(0, FOLD_COLUMNS, column_of(LAYOUT))
    keys = keys_of(work, call, FEATURES=FEATURES, ROWS=TILE.ROWS)
    partials = output.partials
    state = load_partial(work, work.first, True, rows, columns, partials, call, FEATURES)
    acc_o, m_i, l_i = state
    rows_smem = factors_in(smem.probabilities, gl.SwizzledSharedLayout(1, 1, 1, [0]), TILE=TILE)
    rows_smem.index(0).store(m_i)
    m_i = rows_smem.index(0).load(row_of(BY_STATE))
    first = first_state(work, first_row, LAYOUT, call=call, FEATURES=FEATURES, TILE=TILE)
    by_state = first_state(work, first_row, BY_STATE, call=call, FEATURES=FEATURES, TILE=TILE)
    apart = work.seqlen_q * (call.sizes.nheads * FEATURES.GROUP)  # the same rows of two pieces
    place = gl.maximum(work.first + work.length, keys.piece) - work.first
    stop = keys.stop - work.first
    group = load_states(
        place, stop, first=first, by_state=by_state, columns=columns, apart=apart,
        partials=partials, BY_STATE=BY_STATE, FEATURES=FEATURES,
    )  # fmt: skip
    following = load_states(
        place + COUNT, stop, first=first, by_state=by_state, columns=columns, apart=apart,
        partials=partials, BY_STATE=BY_STATE, FEATURES=FEATURES,
    )  # fmt: skip
    while place < stop:
        further = load_states(
            place + 2 * COUNT, stop, first=first, by_state=by_state, columns=columns, apart=apart,
            partials=partials, BY_STATE=BY_STATE, FEATURES=FEATURES,
        )  # fmt: skip
        acc_o, m_i, l_i = fold_states(
            acc_o, m_i, l_i=l_i, group=group, probabilities=smem.probabilities, TILE=TILE
        )
        group = following
        following = further
        place += COUNT
    rows_smem.index(0).store(m_i)
    m_i = rows_smem.index(0).load(row_of(LAYOUT))
    state = SplitState(acc_o, m_i, l_i=l_i)
    write_rows(work, state, rows, columns, first_column == 0, output, call, FEATURES)


@gluon.jit
def factors_in(probabilities, LAYOUT: gl.constexpr, TILE: gl.constexpr):
    """Shared memory of factors where P passes otherwise: rows of FOLD_ROWS numbers, each row of one
    state.
    """
    COUNT: gl.constexpr = TILE.BLOCK_M * TILE.BLOCK_N // FOLD_ROWS
    return reinterpret(probabilities, gl.float32, shape=[COUNT, FOLD_ROWS], layout=LAYOUT)


@gluon.jit
def first_state(
    work, first_row, LAYOUT: gl.constexpr, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """Where the first piece's states of rows lie; of a row that is no query, those of one."""
    row = first_row + gl.arange(0, FOLD_ROWS, row_of(LAYOUT))
    is_query = rows_at(work, row, FEATURES=FEATURES, TILE=TILE).is_query
    some = rows_at(work, gl.where(is_query, row, first_row), FEATURES=FEATURES, TILE=TILE)
    return partial_row(work, work.first, some.token, some.head, call, FEATURES)


@gluon.jit
def load_states(
    place, stop, first, by_state, columns, apart, partials,
    BY_STATE: gl.constexpr, FEATURES: gl.constexpr,
):  # fmt: skip
    """States of STATES_AHEAD pieces from a place on, O in a tuple, of no keys from `stop` on; and
    the maximum before each but the first.
    """
    COUNT: gl.constexpr = STATES_AHEAD
    places = place + gl.arange(0, COUNT, column_of(BY_STATE))[None, :]
    offset = by_state[:, None] + places.to(gl.int64) * apart
    exists = (offset >= 0) & (places < stop)
    m_i = gl.load(partials.m_i + offset, mask=exists, other=float("-inf"), cache_modifier=".cg")
    l_i = gl.load(partials.l_i + offset, mask=exists, other=0.0, cache_modifier=".cg")
    has_one = exists & (places > place)
    ptrs = partials.m_i + (offset - apart)
    before = gl.load(ptrs, mask=has_one, other=float("-inf"), cache_modifier=".cg")
    inside = (columns < FEATURES.HEADDIM_V)[None, :]
    begins = (first + place.to(gl.int64) * apart) * FEATURES.HEADDIM_V
    ptrs = partials.acc_o + begins[:, None] + columns[None, :]
    acc_o = ()
    for i in gl.static_range(COUNT):
        mask = inside & (place + i < stop)
        acc_o = acc_o + (gl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg"),)
        ptrs += apart * FEATURES.HEADDIM_V
    return SplitState(acc_o, m_i, l_i=l_i), before


@gluon.jit
def fold_states(acc_o, m_i, l_i, group, probabilities, TILE: gl.constexpr):
    """O, m and l with states that follow them."""
    states, before = group
    COUNT: gl.constexpr = STATES_AHEAD
    ROWS: gl.constexpr = l_i.type.layout
    rows = factors_in(probabilities, gl.SwizzledSharedLayout(1, 1, 1, [0]), TILE=TILE)
    tile = factors_in(probabilities, gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), TILE=TILE)
    m_before = gl.maximum(m_i[:, None], gl.associative_scan(before, 1, larger))
    m_new = gl.maximum(m_before, states.m_i)
    m_ref = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha, beta = gl.exp2(m_before - m_ref), gl.exp2(states.m_i - m_ref)
    tile.slice(0, COUNT).permute((1, 0)).store(alpha)
    tile.slice(COUNT, COUNT).permute((1, 0)).store(beta)
    tile.slice(2 * COUNT, COUNT).permute((1, 0)).store(states.l_i * beta)
    for i in gl.static_range(COUNT):
        left, right = rows.index(i).load(ROWS), rows.index(COUNT + i).load(ROWS)
        l_i = l_i * left + rows.index(2 * COUNT + i).load(ROWS)
        acc_o = acc_o * left[:, None] + states.acc_o[i] * right[:, None]
    return acc_o, gl.maximum(m_i, gl.max(states.m_i, 1)), l_i


@gluon.jit
def larger(x, y):
    return gl.maximum(x, y)
