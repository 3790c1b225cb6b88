"""The matmul warpgroups: FlashAttention-2, algorithm 1, over a piece at a time.

The heads of a group and some queries are the rows of a tile: of a decode 8, 16 or 32, and keys are
those of wgmma (swapped.py); of more queries 64 (piece.py). Of many, two warpgroups have 64 rows
each, and read the same keys. Pieces are summed each by itself, in fp32, and folded from left to
right (`tile.split_kv`): by this program as far as it has all pieces so far, else by the slices of
the fold (fold.py).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ....tile.seqlen import modifiers_of
from ....tile.splits import SplitState, fold
from ....tile.types import SplitPipeline
from ..layouts import accumulator, column_of, row_of
from ..pipeline import advance, release_by_threads, start, wait_full
from .barriers import make_ready
from .fold import end_part, fold_slice
from .piece import attend_piece
from .rows import rows_at, store_partial, write_rows
from .scales import sequence_scale
from .swapped import attend_piece_swapped, output_layout
from .work import END, PART, blocks_of, half_of, receive_work, seen_of

FEWEST = 8  # rows of a tile


class Scratch(NamedTuple):
    """Shared memory that one warpgroup uses; 0 where it needs none."""

    state: Any  # (BLOCK_M, BLOCK_DV), folded pieces
    probabilities: Any  # (2, BLOCK_M, BLOCK_N), where operands are swapped
    maxima: Any  # (BLOCK_M, 4), of each warp
    sums: Any  # the same


@gluon.jit
def attend_partition(
    WG: gl.constexpr, rings, smem, output, counters, call,
    FEATURES: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    if TILE.WARPGROUPS == 1:
        make_ready(rings, call.scales, TILE=TILE)
    modifiers = modifiers_of(call.optionals)
    messages_state, q_state, state = start(), start(), start()
    work = receive_work(rings.messages, messages_state)
    while work.kind != END:
        messages_state = advance(messages_state, 2)
        if work.kind == PART:
            wait_full(rings.q, q_state)
            q_smem = rings.q.buffers.index(q_state.stage * TILE.WARPGROUPS + WG)
            half = half_of(work, WG, FEATURES=FEATURES, TILE=TILE)
            if TILE.WARPGROUPS == 1:
                state = attend_rows(
                    half, state, rings, q_smem, smem, output, counters, call, modifiers,
                    FEATURES, TILE,
                )  # fmt: skip
            else:
                fence_async_shared()  # what threads copied, before wgmma reads it
                before, after = blocks_apart(work, half, call=call, FEATURES=FEATURES, TILE=TILE)
                half = seen_of(half, call, FEATURES=FEATURES, ROWS=TILE.ROWS)
                state = skip_blocks(before, state, rings=rings, TILE=TILE)
                if half.start < half.seqlen_q:
                    state = attend_part(
                        half, state, rings, q_smem, smem, output, counters, call, modifiers,
                        FEATURES, TILE,
                    )  # fmt: skip
                state = skip_blocks(after, state, rings=rings, TILE=TILE)
            release_by_threads(rings.q, q_state)
            q_state = advance(q_state, TILE.Q_STAGES)
        elif TILE.WARPGROUPS == 1:
            fold_slice(
                work, output, smem=smem, counters=counters, call=call, FEATURES=FEATURES, TILE=TILE
            )
        else:
            if work.index % TILE.WARPGROUPS == WG:
                fold_slice(
                    work, output, smem=smem, counters=counters, call=call, FEATURES=FEATURES,
                    TILE=TILE,
                )  # fmt: skip
        work = receive_work(rings.messages, messages_state)


@gluon.jit
def attend_rows(
    work, state, rings, q_smem, smem, output, counters, call, modifiers,
    FEATURES: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """`attend_part`, as a tile of 8 rows where its queries are no more."""
    FEW: gl.constexpr = few_of(TILE, FEATURES.CHUNK, FEATURES.GROUP)
    if FEW.BLOCK_M < TILE.BLOCK_M and work.seqlen_q - work.start <= FEW.ROWS // FEATURES.GROUP:
        q_few, smem_few = q_smem.slice(0, FEW.BLOCK_M), few_rows_of(smem, FEW.BLOCK_M)
        state = attend_part(
            work, state, rings, q_few, smem_few, output, counters, call, modifiers, FEATURES, FEW
        )
    else:
        state = attend_part(
            work, state, rings, q_smem, smem, output, counters, call, modifiers, FEATURES, TILE
        )
    return state


@gluon.constexpr_function
def few_of(tile, chunk, group):
    """The tile of 8 rows. Beside chunks no mean of queries says how many decodes have: mostly one,
    whose columns of wgmma and exponentials are then half as many.
    """
    tile = SplitPipeline(*tile)
    may_be_fewer = chunk > 0 and tile.SWAPPED and not tile.STATE_IN_SHARED and group <= FEWEST
    return tile._replace(ROWS=FEWEST, BLOCK_M=FEWEST) if may_be_fewer else tile


@gluon.jit
def few_rows_of(smem, M: gl.constexpr):
    """The first rows of scratch memory, but of P, of which `swapped.share` takes them."""
    return Scratch(smem.state, smem.probabilities, smem.maxima.slice(0, M), smem.sums.slice(0, M))


@gluon.jit
def attend_part(
    work, state, rings, q_smem, smem, output, counters, call, modifiers,
    FEATURES: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """The pieces of a part, and what becomes of them."""
    DV: gl.constexpr = TILE.BLOCK_DV
    M: gl.constexpr = TILE.BLOCK_M
    IS_SWAPPED: gl.constexpr = TILE.SWAPPED
    O_LAYOUT: gl.constexpr = output_layout(M, DV, TILE.CACHE) if IS_SWAPPED else accumulator(DV)
    # The first pieces of a tile are folded on the way; if states are asked for, those of no part.
    # Without that branch Triton (3.6) does not compile the stores
    FOLDED: gl.constexpr = -1 if TILE.STATES else 0
    is_first = work.index == FOLDED
    k_scale = 1.0
    if call.scales.k is not None:
        k_scale = sequence_scale(call.scales, 0, work.batch, work.head_k, work.seqlen_k > 0)
    m_run = gl.full([M], float("-inf"), gl.float32, row_of(O_LAYOUT))
    l_run = gl.zeros([M], gl.float32, row_of(O_LAYOUT))
    run = gl.zeros([M, DV], gl.float32, O_LAYOUT)
    for piece in range(work.piece, work.stop):
        if IS_SWAPPED:
            state, partial = attend_piece_swapped(
                work, piece, state, rings, q_smem, smem, k_scale, call, modifiers, FEATURES, TILE
            )
        else:
            state, partial = attend_piece(
                work, piece, state, rings, q_smem, call, modifiers, FEATURES, TILE
            )
        if is_first:
            if TILE.STATE_IN_SHARED:
                acc_o = partial.acc_o
                if piece > work.piece:
                    folded = fold(SplitState(smem.state.load(O_LAYOUT), m_run, l_i=l_run), partial)
                    acc_o, m_run, l_run = folded.acc_o, folded.m_i, folded.l_i
                else:
                    m_run, l_run = partial.m_i, partial.l_i
                smem.state.store(acc_o)
            else:
                folded = fold(SplitState(run, m_run, l_i=l_run), partial)
                run, m_run, l_run = folded.acc_o, folded.m_i, folded.l_i
        else:
            store_partial(work, piece, partial, output.partials, call, FEATURES, TILE)
    if is_first:
        if TILE.STATE_IN_SHARED:
            if work.piece < work.stop:
                run = smem.state.load(O_LAYOUT)
        whole = SplitState(run, m_run, l_i=l_run)
        if work.parts == 1:
            store_rows(work, whole, output=output, call=call, FEATURES=FEATURES, TILE=TILE)
        else:
            store_partial(work, work.first, whole, output.partials, call, FEATURES, TILE)
    if not TILE.STATES:
        if work.parts > 1:
            end_part(work, output, counters=counters, call=call, FEATURES=FEATURES, TILE=TILE)
    return state


@gluon.jit
def blocks_apart(work, half, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The blocks before and after those of a warpgroup, which only the other's rows see."""
    N: gl.constexpr = TILE.BLOCK_N
    first, stop = blocks_of(work, call, FEATURES=FEATURES, ROWS=TILE.ROWS * TILE.WARPGROUPS, N=N)
    half_first, half_stop = blocks_of(half, call, FEATURES=FEATURES, ROWS=TILE.ROWS, N=N)
    half_first = gl.minimum(half_first, stop)
    half_stop = gl.where(half.start < half.seqlen_q, gl.maximum(half_stop, half_first), half_first)
    return half_first - first, stop - half_stop


@gluon.jit
def skip_blocks(count, state, rings, TILE: gl.constexpr):
    """Releases blocks unread, but not before they are there: a stage counts each warpgroup once."""
    for _ in range(count):
        wait_full(rings.k, state)
        release_by_threads(rings.k, state)
        wait_full(rings.v, state)
        release_by_threads(rings.v, state)
        state = advance(state, TILE.STAGES)
    return state


@gluon.jit
def store_rows(work, state, output, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """Normalises, and writes the rows that are queries."""
    layout: gl.constexpr = state.acc_o.type.layout
    rows = rows_at(work, gl.arange(0, TILE.BLOCK_M, row_of(layout)), FEATURES=FEATURES, TILE=TILE)
    columns = gl.arange(0, TILE.BLOCK_DV, column_of(layout))
    write_rows(work, state, rows, columns, True, output, call, FEATURES)
