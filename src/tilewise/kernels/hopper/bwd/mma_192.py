"""The matmul warpgroups of the backward for headdim 129 to 192 with headdim_v up to 128: 128 keys,
64 for each warpgroup, as in `mma`, and blocks of 64 queries, in part by halves.

    of a block:          S^T = K Q^T    dQ = dS K
    of half its queries: dP^T = V dO^T    dV += P^T dO    dK += dS^T Q

Of a thread's 240 registers dK and dV take 160. The tiles of a whole block would take 80 more; dP, P
and dS of one half take 32, and the S of the other 16. With 64 keys, as in `mma_wide`, there is room
for whole blocks. But then twice as many sums of dQ enter the L2 cache, which is an H100's bound.

The columns of Q, K, dK and dQ are three groups of 64. Each warpgroup computes the dQ of one group,
and they alternate in computing that of the third.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....tile.gradient import score_gradient
from ....tile.seqlen import modifiers_of
from ..layouts import accumulator, left_operand
from ..pipeline import PipelineState, advance, release, start, state_of, wait_full
from ..work import END
from .block_metadata import block_behind
from .epilogue import write_rows
from .mma import add_dq, half_of, load_row, only_stage, recompute
from .ordered_add import arrive_added, arrive_tile, wait_to_add
from .query_blocks import block_after, count_blocks, first_block
from .work_tile import receive_tile

HALF = gl.constexpr(32)  # queries
GROUPS = gl.constexpr(3)  # of the columns of Q and K
COLUMNS = gl.constexpr(64)  # of a group


class KeyGrads(NamedTuple):
    """Gradients of a warpgroup's 64 keys."""

    dk: tuple  # (64, COLUMNS) of each group, before the factor scale
    dv: gl.tensor  # (64, BLOCK_DV)


class Visit(NamedTuple):
    """A warpgroup's visit of a block of queries."""

    step: gl.tensor  # blocks so far
    block: tuple
    has_before: gl.tensor  # whether the tile has visited another
    goes_on: gl.tensor  # whether it will visit another
    ds: PipelineState  # of this block's dS
    last_ds: PipelineState  # of that of the block before


@gluon.jit
def grad_partition_192(
    WG: gl.constexpr, rings, outputs, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    DV: gl.constexpr = TILE.BLOCK_DV
    keys, queries = rings.keys, rings.queries
    modifiers = modifiers_of(call.optionals)

    step = gl.to_tensor(0)
    tiles = gl.to_tensor(0)
    ds_state = start()
    last_ds_state = PipelineState(ds_state.stage + 2, ds_state.phase)
    work = receive_tile(rings.messages, tiles, TILE=TILE)
    while work.start != END:
        no_dk = gl.zeros([64, COLUMNS], gl.float32, accumulator(COLUMNS))
        no_dv = gl.zeros([64, DV], gl.float32, accumulator(DV))
        grads = KeyGrads((no_dk, no_dk, no_dk), no_dv)
        blocks = count_blocks(work, FEATURES)
        block = first_block(work, FEATURES)
        is_seen = blocks > 0 if TILE.RAGGED else True
        # The first S^T overlaps with nothing
        wait_full(keys, PipelineState(0, tiles & 1))
        wait_full(queries, state_of(step), pred=is_seen)
        pending_s = multiply_queries(keys, queries, WG=WG, step=step, TILE=TILE)
        s = warpgroup_mma_wait(0, deps=[pending_s])
        for i in range(blocks):
            visit = Visit(step, block, i > 0, i + 1 < blocks, ds_state, last_ds_state)
            s, grads = visit_block(
                s, grads, visit, WG, work, rings, outputs, modifiers, call, FEATURES, TILE
            )
            last_ds_state = ds_state
            ds_state = advance(ds_state, 3)
            block = block_after(block, work, FEATURES=FEATURES, TILE=TILE)
            step += 1
        wait_full(rings.score_buffers, last_ds_state, pred=is_seen)
        visit = Visit(step, block, is_seen, False, ds_state, last_ds_state)
        dq = warpgroup_mma_wait(0, deps=[multiply_group(visit, WG, rings=rings, step=step)])
        add_groups(dq, visit, WG, work, rings, outputs, call, FEATURES, TILE)
        arrive_tile(rings.add_barriers, tiles, TILE=TILE)
        release(keys, PipelineState(0, 0))
        rows = work.start + WG * 64
        for group in gl.static_range(GROUPS):
            dk = grads.dk[group] * call.numbers.scale
            write_rows(dk, outputs.dk, outputs, work, rows, WG, FEATURES, column=group * COLUMNS)
        write_rows(grads.dv, outputs.dv, outputs, work, start=rows, WG=WG, FEATURES=FEATURES)
        tiles += 1
        work = receive_tile(rings.messages, tiles, TILE=TILE)
    tma.store_wait(0)  # TMA still reads the last tile from shared memory


@gluon.jit
def visit_block(
    s,
    grads,
    visit,
    WG: gl.constexpr,
    work,
    rings,
    outputs,
    modifiers,
    call,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    """Adds to dK and dV what a block gives them, of which S^T is there, and to dQ that of the block
    before. Returns the gradients behind the next block's S^T.
    """
    keys, queries, score_buffers = rings.keys, rings.queries, rings.score_buffers
    step = visit.step
    s_halves = halves_of(s)
    # dP^T of the first half, while its P is recomputed
    pending_dp = multiply_values(keys, queries, WG=WG, PART=0, step=step)
    tile = recompute_half(s_halves, visit, 0, WG, work, queries, modifiers, call, FEATURES, TILE)
    dp = warpgroup_mma_wait(0, deps=[pending_dp])
    # dV += P^T dO, while dS is made
    pending_dv = multiply_gradients(tile, queries, PART=0, step=step, dv=grads.dv)
    wait_full(score_buffers, visit.last_ds, pred=visit.has_before)
    ds = share_half(tile, dp, visit=visit, PART=0, WG=WG, buffers=score_buffers.ds)
    dv = warpgroup_mma_wait(0, deps=[pending_dv])
    # dK += dS^T Q and dP^T of the second half, while its P is recomputed
    dk0, dk1, dk2 = multiply_scores(ds, queries, PART=0, step=step, dk=grads.dk)
    pending_dp = multiply_values(keys, queries, WG=WG, PART=1, step=step)
    tile = recompute_half(s_halves, visit, 1, WG, work, queries, modifiers, call, FEATURES, TILE)
    dk0, dk1, dk2, dp = warpgroup_mma_wait(0, deps=[dk0, dk1, dk2, pending_dp])
    pending_dv = multiply_gradients(tile, queries, PART=1, step=step, dv=dv)
    ds = share_half(tile, dp, visit=visit, PART=1, WG=WG, buffers=score_buffers.ds)
    mbarrier.arrive(score_buffers.full.index(visit.ds.stage), count=1)
    # dQ of the block before, dK, and the next block's S^T; at a tile's ends of what lies there
    pending_dq = multiply_group(visit, WG, rings=rings, step=step)
    dk0, dk1, dk2 = multiply_scores(ds, queries, PART=1, step=step, dk=(dk0, dk1, dk2))
    wait_full(queries, state_of(step + 1), pred=visit.goes_on)
    # The atomics overlap with dK, and S^T is behind them, as in `mma`
    dv, dq = warpgroup_mma_wait(GROUPS, deps=[pending_dv, pending_dq])
    add_groups(dq, visit, WG, work, rings, outputs, call, FEATURES, TILE)
    pending_s = multiply_queries(keys, queries, WG=WG, step=step + 1, TILE=TILE)
    dk0, dk1, dk2 = warpgroup_mma_wait(GROUPS, deps=[dk0, dk1, dk2])
    release(queries, state_of(step))
    # No matmul may be in flight at the end of an iteration
    s = warpgroup_mma_wait(0, deps=[pending_s])
    return s, KeyGrads((dk0, dk1, dk2), dv)


@gluon.jit
def halves_of(s):
    """The columns of (64, 2 HALF) as two tiles: nothing moves."""
    LAYOUT: gl.constexpr = accumulator(HALF)
    first, second = gl.split(s.reshape([64, 2, HALF]).permute(0, 2, 1))
    return gl.convert_layout(first, LAYOUT), gl.convert_layout(second, LAYOUT)


@gluon.jit
def recompute_half(
    s_halves,
    visit,
    PART: gl.constexpr,
    WG: gl.constexpr,
    work,
    queries,
    modifiers,
    call,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    """P^T of half a block."""
    s = s_halves[PART]
    dtype: gl.constexpr = queries.q.dtype
    k_start = work.start + WG * 64
    minus_lse = 0.0
    if not TILE.LSE_FIRST:
        minus_lse = load_half(queries.minus_lse, visit.step, PART=PART, like=s)
    return recompute(
        s, 0, minus_lse, k_start, work, visit.block, modifiers, call, dtype, FEATURES, TILE,
        PART * HALF,
    )  # fmt: skip


@gluon.jit
def share_half(tile, dp, visit, PART: gl.constexpr, WG: gl.constexpr, buffers):
    """dS^T of half a block, which is also stored for dQ."""
    ds = score_gradient(tile.weight, dp, derivative=1.0).to(buffers.dtype)
    buffers.index(visit.ds.stage).slice(WG * 64, 64, 0).slice(PART * HALF, HALF, 1).store(ds)
    fence_async_shared()  # makes the threads' stores visible to wgmma
    return ds


@gluon.jit
def add_groups(
    dq,
    visit,
    WG: gl.constexpr,
    work,
    rings,
    outputs,
    call,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    """Adds a group of columns of the previous block's dQ, in every second block also the third."""
    D: gl.constexpr = TILE.BLOCK_D
    before = block_behind(visit.block, rings.queries.metadata, visit.step, work, FEATURES, TILE)
    if visit.has_before:
        wait_to_add(rings.add_barriers, visit.step - 1, TILE=TILE)
        add_dq(dq, outputs, work, before, WG * COLUMNS, D, call, FEATURES, TILE)
    if (visit.step & 1) == WG:
        dq = warpgroup_mma_wait(0, deps=[multiply_group(visit, 2, rings, step=visit.step + 1)])
        if visit.has_before:
            add_dq(dq, outputs, work, before, 2 * COLUMNS, D, call, FEATURES, TILE)
    if visit.has_before:
        arrive_added(rings.add_barriers, visit.step - 1, TILE=TILE)


@gluon.jit
def multiply_queries(keys, queries, WG: gl.constexpr, step, TILE: gl.constexpr):
    """Starts S^T = K Q^T, - lse where it comes first: (64, BLOCK_M)."""
    s = gl.zeros([64, 2 * HALF], gl.float32, accumulator(2 * HALF))
    if TILE.LSE_FIRST:
        s = load_row(queries.minus_lse, step, like=s).broadcast_to(s.shape)
    for group in gl.static_range(GROUPS):
        left = only_stage(keys.k, step, group).slice(WG * 64, 64, 0)
        right = queries.q.index((step & 1) * GROUPS + group).permute((1, 0))
        s = warpgroup_mma(left, right, s, use_acc=TILE.LSE_FIRST or group > 0, is_async=True)
    return s


@gluon.jit
def multiply_values(keys, queries, WG: gl.constexpr, PART: gl.constexpr, step):
    """Starts dP^T - delta = V dO^T - delta of half a block: (64, HALF)."""
    no_scores = gl.zeros([64, HALF], gl.float32, accumulator(HALF))
    minus_delta = load_half(queries.minus_delta, step, PART=PART, like=no_scores)
    left = half_of(keys.v, WG, step=step + PART)  # not the same step: see `only_stage`
    right = half_of_rows(queries.do, step & 1, PART=PART).permute((1, 0))
    return warpgroup_mma(left, right, minus_delta.broadcast_to(no_scores.shape), is_async=True)


@gluon.jit
def multiply_gradients(tile, queries, PART: gl.constexpr, step, dv):
    """Starts dV += P^T dO of half a block."""
    left = gl.convert_layout(tile.operand, left_operand(dv.type.layout))
    return warpgroup_mma(left, half_of_rows(queries.do, step & 1, PART=PART), dv, is_async=True)


@gluon.jit
def multiply_scores(ds, queries, PART: gl.constexpr, step, dk):
    """Starts dK += dS^T Q of half a block, a group of columns after the other."""
    left = gl.convert_layout(ds, left_operand(accumulator(COLUMNS)))
    first = (step & 1) * GROUPS
    dk0 = warpgroup_mma(left, half_of_rows(queries.q, first, PART=PART), dk[0], is_async=True)
    dk1 = warpgroup_mma(left, half_of_rows(queries.q, first + 1, PART=PART), dk[1], is_async=True)
    dk2 = warpgroup_mma(left, half_of_rows(queries.q, first + 2, PART=PART), dk[2], is_async=True)
    return dk0, dk1, dk2


@gluon.jit
def multiply_group(visit, GROUP: gl.constexpr, rings, step):
    """Starts a group of columns of the previous block's dQ = dS K: (BLOCK_M, COLUMNS)."""
    no_dq = gl.zeros([64, COLUMNS], gl.float32, accumulator(COLUMNS))
    left = rings.score_buffers.ds.index(visit.last_ds.stage + (step >> 30)).permute((1, 0))
    right = only_stage(rings.keys.k, step, GROUP)
    return warpgroup_mma(left, right, no_dq, use_acc=False, is_async=True)


@gluon.jit
def half_of_rows(buffers, index, PART: gl.constexpr):
    """Half of a block's rows of Q or dO: (HALF, columns)."""
    return buffers.index(index).slice(PART * HALF, HALF, 0)


@gluon.jit
def load_half(row, step, PART: gl.constexpr, like):
    """One number per query of half a block, (1, HALF), in a slice of the layout of `like`."""
    return row.index(step & 1).slice(PART * HALF, HALF, 1).load(like.type.layout)
