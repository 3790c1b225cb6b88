"""The matmul warpgroups of the backward for wide heads: 64 keys, one warpgroup with their dV, the
other with their dK, each 128 registers a thread.

    S^T = K Q^T    P = exp(S - lse)       dV += P^T dO    dQ = dS K, the first half of its columns
    dP^T = V dO^T  dS = P (dP - delta)    dK += dS^T Q    and the second

Both left operands that come from scores are in registers where they are needed, so shared memory is
read less than with half of the scores in each. P goes from the first to the second in fp32, dS back
in 16 bits, where wgmma reads it. Of a dQ that has a kernel of its own (mma_dq.py) nothing is left
but the barrier of dS, which says that P was read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....tile.seqlen import modifiers_of
from ..layouts import accumulator, by_register, left_operand, used_columns
from ..operands import multiply_rows
from ..pipeline import release, state_of, wait_full
from ..work import END
from .block_metadata import block_at, block_behind
from .dropout import marked_gradient
from .epilogue import store_keys, used_rows
from .mma import add_dq, in_accumulator_order, in_register_order, load_row, only_stage, recompute
from .ordered_add import arrive_added, arrive_tile, wait_to_add
from .query_blocks import block_after, count_blocks, first_block
from .work_tile import receive_tile


@gluon.jit
def value_partition(rings, outputs, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """P and dV, and parts 0 and 1 of the dQ of the block before, whose dS is there by now."""
    M: gl.constexpr = TILE.BLOCK_M
    D: gl.constexpr = TILE.BLOCK_D
    DV: gl.constexpr = TILE.BLOCK_DV
    V_LAYOUT: gl.constexpr = accumulator(DV)
    dtype: gl.constexpr = outputs.dv.dtype
    queries = rings.queries
    score_buffers = rings.score_buffers
    no_scores = gl.zeros([64, M], gl.float32, accumulator(M))
    no_dq = gl.zeros([M, D // 4], gl.float32, accumulator(D // 4))
    COLUMNS: gl.constexpr = used_columns(FEATURES.HEADDIM, D)
    HAS_DERIVATIVE: gl.constexpr = FEATURES.SOFTCAP or FEATURES.SCORE_MOD is not None
    modifiers = modifiers_of(call.optionals)

    step = gl.to_tensor(0)
    tiles = gl.to_tensor(0)
    work = receive_tile(rings.messages, tiles, TILE=TILE)
    while work.start != END:
        dv = gl.zeros([64, DV], gl.float32, V_LAYOUT)
        blocks = count_blocks(work, FEATURES)
        block = first_block(work, FEATURES)
        is_seen = blocks > 0 if TILE.RAGGED or FEATURES.MASK_M > 0 else True
        mbarrier.wait(rings.keys.full.index(0), tiles & 1)
        wait_full(queries, state_of(step), pred=is_seen)
        k_smem = only_stage(rings.keys.k, step)
        pending_s = multiply_queries(k_smem, queries, step, no_scores, COLUMNS, TILE)
        s = warpgroup_mma_wait(0, deps=[pending_s])
        for i in range(blocks):
            visited = block_at(block, queries.metadata, step=step, TILE=TILE)
            before = block_behind(block, queries.metadata, step, work, FEATURES, TILE)
            wait_full(score_buffers, state_of(step - 1), pred=i > 0)
            if TILE.HAS_DQ and not HAS_DERIVATIVE:  # its derivative needs the registers
                pending_dq = multiply_keys(rings, step - 1, step, no_dq, 0)
            minus_lse = 0.0
            if not TILE.LSE_FIRST:
                minus_lse = load_row(queries.minus_lse, step, like=no_scores)
            tile = recompute(
                s, 0, minus_lse, work.start, work, visited, modifiers, call, dtype, FEATURES, TILE
            )
            score_buffers.p.store(in_register_order(tile.weight))
            mbarrier.arrive(score_buffers.p_full, count=1)
            if HAS_DERIVATIVE:
                pending_dq = multiply_keys(rings, step - 1, step, no_dq, 0)
            left = gl.convert_layout(tile.operand, left_operand(V_LAYOUT))
            pending_dv = warpgroup_mma(left, queries.do.index(step & 1), dv, is_async=True)
            if TILE.HAS_DQ:
                dq = warpgroup_mma_wait(1, deps=[pending_dq])
                if i > 0:
                    wait_to_add(rings.add_barriers, step - 1, TILE=TILE)
                    add_dq(dq, outputs, work, before, 0, D, call, FEATURES, TILE)
                pending_dq = multiply_keys(rings, step - 1, step, no_dq, 1)
                dv, dq = warpgroup_mma_wait(0, deps=[pending_dv, pending_dq])
            else:
                dv = warpgroup_mma_wait(0, deps=[pending_dv])
            release(queries, state_of(step))
            # Before S^T starts: its operands come from shared memory, by the path of atomics
            if TILE.HAS_DQ:
                if i > 0:
                    add_dq(dq, outputs, work, before, D // 4, D, call, FEATURES, TILE)
                    arrive_added(rings.add_barriers, step - 1, TILE=TILE)
            wait_full(queries, state_of(step + 1), pred=i + 1 < blocks)
            k_smem = only_stage(rings.keys.k, step)
            pending_s = multiply_queries(k_smem, queries, step + 1, no_scores, COLUMNS, TILE)
            block = block_after(block, work, FEATURES=FEATURES, TILE=TILE)
            step += 1
            s = warpgroup_mma_wait(0, deps=[pending_s])
        if TILE.HAS_DQ:
            if is_seen:
                before = block_behind(block, queries.metadata, step, work, FEATURES, TILE)
                wait_full(score_buffers, state_of(step - 1))
                wait_to_add(rings.add_barriers, step - 1, TILE=TILE)
                for part in gl.static_range(2):
                    pending_dq = multiply_keys(rings, step - 1, step, no_dq, part)
                    dq = warpgroup_mma_wait(0, deps=[pending_dq])
                    add_dq(dq, outputs, work, before, part * D // 4, D, call, FEATURES, TILE)
                arrive_added(rings.add_barriers, step - 1, TILE=TILE)
        arrive_tile(rings.add_barriers, tiles, TILE=TILE)
        if FEATURES.DROPOUT:
            dv *= call.numbers.dropout_factor
        dv = used_rows(dv, work, start=work.start, FEATURES=FEATURES).to(dtype)
        write_tile(dv, rings.keys.v, outputs.dv, rings, work, tiles, FEATURES)
        tiles += 1
        work = receive_tile(rings.messages, tiles, TILE=TILE)


@gluon.jit
def key_partition(rings, outputs, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """dS and dK, and parts 2 and 3 of dQ."""
    M: gl.constexpr = TILE.BLOCK_M
    D: gl.constexpr = TILE.BLOCK_D
    S_LAYOUT: gl.constexpr = accumulator(M)
    K_LAYOUT: gl.constexpr = accumulator(D)
    dtype: gl.constexpr = outputs.dk.dtype
    queries = rings.queries
    score_buffers = rings.score_buffers
    no_scores = gl.zeros([64, M], gl.float32, S_LAYOUT)
    no_dq = gl.zeros([M, D // 4], gl.float32, accumulator(D // 4))
    COLUMNS: gl.constexpr = used_columns(FEATURES.HEADDIM_V, TILE.BLOCK_DV)
    # of the previous block's dQ, which overlaps with the computation of dS
    LAST_PART: gl.constexpr = 2 if used_columns(FEATURES.HEADDIM, D) <= D - D // 4 else 3

    step = gl.to_tensor(0)
    tiles = gl.to_tensor(0)
    work = receive_tile(rings.messages, tiles, TILE=TILE)
    while work.start != END:
        dk = gl.zeros([64, D], gl.float32, K_LAYOUT)  # before the factor scale
        blocks = count_blocks(work, FEATURES)
        block = first_block(work, FEATURES)
        is_seen = blocks > 0 if TILE.RAGGED or FEATURES.MASK_M > 0 else True
        mbarrier.wait(rings.keys.full.index(0), tiles & 1)
        wait_full(queries, state_of(step), pred=is_seen)
        pending_dp = multiply_values(
            only_stage(rings.keys.v, step), queries, step, no_scores, COLUMNS
        )
        dp = warpgroup_mma_wait(0, deps=[pending_dp])
        for i in range(blocks):
            visited = block_at(block, queries.metadata, step=step, TILE=TILE)
            if TILE.HAS_DQ:
                pending_dq = multiply_keys(rings, step - 1, step, no_dq, LAST_PART)
            mbarrier.wait(score_buffers.p_full, step & 1)
            p = in_accumulator_order(score_buffers.p.load(by_register(64 * M)), S_LAYOUT)
            minus_delta = 0.0
            if FEATURES.DROPOUT:
                minus_delta = load_row(queries.minus_delta, step, like=no_scores)
            ds = marked_gradient(p, dp, minus_delta=minus_delta, FEATURES=FEATURES).to(dtype)
            if TILE.HAS_DQ:
                score_buffers.ds.index(step & 1).store(ds)
                fence_async_shared()  # makes the threads' stores visible to wgmma
            mbarrier.arrive(score_buffers.full.index(step & 1), count=1)
            left = gl.convert_layout(ds, left_operand(K_LAYOUT))
            pending_dk = warpgroup_mma(left, queries.q.index(step & 1), dk, is_async=True)
            if TILE.HAS_DQ:
                dq = warpgroup_mma_wait(1, deps=[pending_dq])
                if i > 0:
                    before = block_behind(block, queries.metadata, step, work, FEATURES, TILE)
                    if LAST_PART == 2:
                        wait_to_add(rings.add_barriers, step - 1, TILE=TILE)
                    add_dq(dq, outputs, work, before, LAST_PART * D // 4, D, call, FEATURES, TILE)
                    arrive_added(rings.add_barriers, step - 1, TILE=TILE)
            if LAST_PART == 3 and TILE.HAS_DQ:
                pending_dq = multiply_keys(rings, step, step, no_dq, 2)
                dk, dq = warpgroup_mma_wait(0, deps=[pending_dk, pending_dq])
            else:
                dk = warpgroup_mma_wait(0, deps=[pending_dk])
            release(queries, state_of(step))
            if LAST_PART == 3 and TILE.HAS_DQ:
                wait_to_add(rings.add_barriers, step, TILE=TILE)
                add_dq(dq, outputs, work, visited, D // 2, D, call, FEATURES, TILE)
            wait_full(queries, state_of(step + 1), pred=i + 1 < blocks)
            v_smem = only_stage(rings.keys.v, step)
            pending_dp = multiply_values(v_smem, queries, step + 1, no_scores, COLUMNS)
            block = block_after(block, work, FEATURES=FEATURES, TILE=TILE)
            step += 1
            dp = warpgroup_mma_wait(0, deps=[pending_dp])
        if TILE.HAS_DQ:
            if is_seen:
                pending_dq = multiply_keys(rings, step - 1, step, no_dq, LAST_PART)
                dq = warpgroup_mma_wait(0, deps=[pending_dq])
                before = block_behind(block, queries.metadata, step, work, FEATURES, TILE)
                if LAST_PART == 2:
                    wait_to_add(rings.add_barriers, step - 1, TILE=TILE)
                add_dq(dq, outputs, work, before, LAST_PART * D // 4, D, call, FEATURES, TILE)
                arrive_added(rings.add_barriers, step - 1, TILE=TILE)
        arrive_tile(rings.add_barriers, tiles, TILE=TILE)
        if FEATURES.DROPOUT:
            dk *= call.numbers.dropout_factor
        dk = used_rows(dk * call.numbers.scale, work, start=work.start, FEATURES=FEATURES).to(dtype)
        write_tile(dk, rings.keys.k, outputs.dk, rings, work, tiles, FEATURES)
        tiles += 1
        work = receive_tile(rings.messages, tiles, TILE=TILE)


@gluon.jit
def multiply_queries(k_smem, queries, step, no_scores, COLUMNS: gl.constexpr, TILE: gl.constexpr):
    """Starts K Q^T - lse: (64, BLOCK_M)."""
    first = no_scores
    if TILE.LSE_FIRST:
        minus_lse = load_row(queries.minus_lse, step, like=no_scores)
        first = minus_lse.broadcast_to(no_scores.shape)
    return multiply_rows(k_smem, queries.q.index(step & 1), first, TILE.LSE_FIRST, COLUMNS)


@gluon.jit
def multiply_values(v_smem, queries, step, no_scores, COLUMNS: gl.constexpr):
    """Starts V dO^T - delta: (64, BLOCK_M)."""
    minus_delta = load_row(queries.minus_delta, step, like=no_scores)
    first = minus_delta.broadcast_to(no_scores.shape)
    return multiply_rows(
        v_smem, queries.do.index(step & 1), first=first, HAS_FIRST=True, COLUMNS=COLUMNS
    )


@gluon.jit
def multiply_keys(rings, ds_step, step, no_dq, PART: gl.constexpr):
    """Starts dQ = dS K of the dS of a step: one part of its columns."""
    C: gl.constexpr = no_dq.shape[1]
    left = rings.score_buffers.ds.index(ds_step & 1).permute((1, 0))
    right = only_stage(rings.keys.k, step).slice(PART * C, C, 1)
    return warpgroup_mma(left, right, no_dq, use_acc=False, is_async=True)


@gluon.jit
def write_tile(rows, keys, desc, rings, work, tiles, FEATURES: gl.constexpr):
    """Stores dK or dV through the shared memory of K or V, which both warpgroups have read."""
    mbarrier.arrive(rings.score_buffers.done, count=1)
    mbarrier.wait(rings.score_buffers.done, tiles & 1)
    buffer = keys.index(0)
    buffer.store(rows)
    fence_async_shared()
    store_keys(desc, work, start=work.start, buffer=buffer, FEATURES=FEATURES)
    tma.store_wait(0)
    mbarrier.arrive(rings.keys.empty.index(0), count=1)
