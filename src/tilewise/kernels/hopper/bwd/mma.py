"""The matmul warpgroups of the backward: FlashAttention-2, algorithm 2, each with 64 of a tile's
keys.

    S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q    dQ = dS K

S and dP are computed transposed, so that P^T and dS^T are in registers in the layout of wgmma's
left operand. dQ sums over all keys of the tile: dS passes through shared memory, and each warpgroup
computes half of dQ. It does so one block later, when the other's dS has been written: the two
warpgroups need not be in step, and one uses CUDA cores while the other uses tensor cores.

A head of 65 to 96 columns has sums of 96, dK and dV in pieces of 64 and 32 columns and dQ of 64 in
one warpgroup and 32 in the other.

Of a thread's 240 registers dK and dV take 128 at headdim 128, and the tiles of a block up to 80:
addresses and counters share the rest. So the code derives stages and phases from a step counter
instead of keeping pipeline states.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from ....tile.gradient import probabilities, score_gradient
from ....tile.mask import apply_mask
from ....tile.score import load_slope
from ....tile.seqlen import modifiers_of
from ....tile.types import Lengths, Sequence
from ..hide import hide
from ..layouts import accumulator, by_register, column_of, row_of, used_columns, wider_half
from ..operands import joined, multiply_columns, multiply_rows, no_columns, wait_for_columns
from ..pipeline import PipelineState, advance, release, start, state_of, wait_full
from ..work import END
from .bias import read_bias, score_with
from .block_metadata import block_at, block_behind, needs_mask
from .dropout import dropped_operand, marked, select, weight_of
from .dropout_bits import draw_keep_bits
from .epilogue import write_rows
from .hidden import count_hidden, pass_block
from .ordered_add import arrive_added, arrive_tile, wait_to_add
from .query_blocks import block_after, block_index, count_blocks, first_block
from .score_buffers import multiply_scores, share_scores, write_scores
from .work_tile import receive_tile, tile_lengths


class RecomputedBlock(NamedTuple):
    """A recomputed block: probabilities, and the factor of dS."""

    operand: gl.tensor  # (64, BLOCK_M), in 16 bits, as dV takes it
    weight: gl.tensor  # in fp32, times the derivative of the score
    keep_bits: gl.tensor  # bits of dropout, see dropout_bits.py


@gluon.jit
def grad_partition(
    WG: gl.constexpr, rings, outputs, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    M: gl.constexpr = TILE.BLOCK_M
    D: gl.constexpr = used_columns(FEATURES.HEADDIM, TILE.BLOCK_D)
    DV: gl.constexpr = used_columns(FEATURES.HEADDIM_V, TILE.BLOCK_DV)
    dtype: gl.constexpr = rings.keys.k.dtype
    keys = rings.keys
    queries = rings.queries
    score_buffers = rings.score_buffers
    no_scores = gl.zeros([64, M], gl.float32, accumulator(M))
    modifiers = modifiers_of(call.optionals)
    # Of several heads, blocks that are hidden would lie between others
    IS_PLAIN: gl.constexpr = FEATURES.GROUP == 1 and not (TILE.HAS_METADATA or TILE.BIAS_COPIED)
    HIDES_FIRST: gl.constexpr = IS_PLAIN and M == 64 and WG == 1 and FEATURES.RIGHT
    HIDES_LAST: gl.constexpr = IS_PLAIN and M == 64 and WG == 0 and FEATURES.LEFT

    step = gl.to_tensor(0)  # blocks so far
    tiles = gl.to_tensor(0)
    ds_state = start()
    last_ds_state = PipelineState(ds_state.stage + 2, ds_state.phase)
    work = receive_tile(rings.messages, tiles, TILE=TILE)
    while work.start != END:
        dk = no_columns(D)  # (64, D) in pieces, before the factor scale
        dv = no_columns(DV)
        blocks = count_blocks(work, FEATURES)
        block = first_block(work, FEATURES)
        is_seen = blocks > 0 if TILE.RAGGED or FEATURES.MASK_M > 0 else True
        wait_full(keys, PipelineState(0, tiles & 1))
        begin, stop = 0, blocks
        if HIDES_FIRST:
            begin = count_hidden(work, call, WG=WG, FEATURES=FEATURES, TILE=TILE)
            if begin > 0:
                last_ds_state = ds_state
                ds_state, step = pass_block(rings, ds_state, step=step, WG=WG, TILE=TILE)
                block = block_after(block, work, FEATURES=FEATURES, TILE=TILE)
        if HIDES_LAST:
            stop -= count_hidden(work, call, WG=WG, FEATURES=FEATURES, TILE=TILE)
        # S^T = K Q^T: (64, BLOCK_M); the first overlaps with nothing
        wait_full(queries, state_of(step), pred=is_seen)
        minus_lse = load_row(queries.minus_lse, step, like=no_scores)
        pending_s = multiply_queries(keys, WG, queries, step, minus_lse, no_scores, D, TILE)
        s = warpgroup_mma_wait(0, deps=[pending_s])
        for i in range(stop - begin):
            # dP^T = V dO^T - delta, while P is recomputed
            minus_delta = load_row(queries.minus_delta, step, like=no_scores)
            left = half_of(keys.v, WG, step=step)
            pending_dp = multiply_values(left, queries, step, minus_delta, no_scores, COLUMNS=DV)
            k_start = work.start + WG * 64
            visited = block_at(block, queries.metadata, step=step, TILE=TILE)
            bias = read_bias(rings.bias, WG, step=step, TILE=TILE)
            if not TILE.LSE_FIRST:
                minus_lse = load_row(queries.minus_lse, step, like=no_scores)
            tile = recompute(
                s, bias, minus_lse, k_start, work, visited, modifiers, call, dtype, FEATURES, TILE
            )
            dp = warpgroup_mma_wait(0, deps=[pending_dp])
            # dV += P^T dO, while dS is made
            pending_dv = multiply_columns(tile.operand, queries.do.index(step & 1), pieces=dv)
            ds = grad_scores(tile, dp, queries=queries, step=step, FEATURES=FEATURES).to(dtype)
            wait_full(score_buffers, last_ds_state, pred=i + begin > 0)
            share_scores(score_buffers.ds, ds_state.stage, WG=WG, ds=ds, TILE=TILE)
            fence_async_shared()  # makes the threads' stores visible to wgmma
            mbarrier.arrive(score_buffers.full.index(ds_state.stage), count=1)
            write_scores(outputs.dbias, score_buffers.ds, ds_state.stage, WG, work, visited, TILE)
            # dQ of the block before and dK += dS^T Q, then the next block's S^T. Before the first
            # block and after the last one, from what lies there, and not used
            dv = wait_for_columns(pending_dv)
            goes_on = i + begin + 1 < stop
            if TILE.LSE_FIRST:
                wait_full(queries, state_of(step + 1), pred=goes_on)
                minus_lse = load_row(queries.minus_lse, step + 1, like=no_scores)
            pending_dq = multiply_keys(score_buffers, last_ds_state, keys, step, D, WG, TILE)
            pending_dk = multiply_columns(ds, queries.q.index(step & 1), pieces=dk)
            # The atomics overlap with dK, whose left operand is in registers. S^T reads both of its
            # operands from shared memory, by the path that atomics take: overlapped with it they
            # cost 2 to 6 %
            dq = warpgroup_mma_wait(len(pending_dk), deps=[pending_dq])
            if not TILE.LSE_FIRST:
                # Not behind the atomics: what a thread compares would go into a register of their
                # addresses, which are free 270 cycles later (packed, headdim 64: 5 to 7 %)
                wait_full(queries, state_of(step + 1), pred=goes_on)
            if i + begin > 0:
                add_dq_in_order(dq, outputs, rings, work, block, step, WG, call, FEATURES, TILE)
            pending_s = multiply_queries(keys, WG, queries, step + 1, minus_lse, no_scores, D, TILE)
            dk = wait_for_columns(pending_dk, PENDING=len(dk))
            release(queries, state_of(step))
            last_ds_state = ds_state
            ds_state = advance(ds_state, 3)
            block = block_after(block, work, FEATURES=FEATURES, TILE=TILE)
            step += 1
            # No matmul may be in flight at the end of an iteration: the compiler would serialize
            # all
            s = warpgroup_mma_wait(0, deps=[pending_s])
        wait_full(score_buffers, last_ds_state, pred=is_seen)
        if HIDES_LAST:
            if stop < blocks:
                dq_state, last_ds_state = last_ds_state, ds_state
                ds_state, next_step = pass_block(rings, ds_state, step=step, WG=WG, TILE=TILE)
                pending_dq = multiply_keys(score_buffers, dq_state, keys, step, D, WG, TILE)
                dq = warpgroup_mma_wait(0, deps=[pending_dq])
                add_dq_in_order(dq, outputs, rings, work, block, step, WG, call, FEATURES, TILE)
                block, step = block_after(block, work, FEATURES=FEATURES, TILE=TILE), next_step
                wait_full(score_buffers, last_ds_state)
        pending_dq = multiply_keys(score_buffers, last_ds_state, keys, step, D, WG=WG, TILE=TILE)
        dq = warpgroup_mma_wait(0, deps=[pending_dq])
        if is_seen:
            add_dq_in_order(dq, outputs, rings, work, block, step, WG, call, FEATURES, TILE)
        arrive_tile(rings.add_barriers, tiles, TILE=TILE)
        release(keys, PipelineState(0, 0))
        rows = work.start + WG * 64
        dk, dv = joined(dk, TILE.BLOCK_D), joined(dv, TILE.BLOCK_DV)
        if FEATURES.DROPOUT:
            dk *= call.numbers.dropout_factor
            dv *= call.numbers.dropout_factor
        write_rows(dk * call.numbers.scale, outputs.dk, outputs, work, rows, WG, FEATURES)
        write_rows(dv, outputs.dv, outputs=outputs, work=work, start=rows, WG=WG, FEATURES=FEATURES)
        tiles += 1
        work = receive_tile(rings.messages, tiles, TILE=TILE)
    tma.store_wait(0)  # TMA still reads the last tile from shared memory


@gluon.jit
def only_stage(buffers, step, STAGE: gl.constexpr = 0):
    """The one stage of K or V, by an index that is always 0 and that the compiler cannot know; or
    the STAGE that a warpgroup has of Q or dO, or a group of K's columns.

    It would otherwise compute the operands of all wgmma instructions before the loop, 16 registers
    of them for each of K and V, and spill as many. For the same reason two matmuls of one operand
    take different steps.
    """
    return buffers.index(STAGE + (step >> 30))


@gluon.jit
def half_of(buffers, WG: gl.constexpr, step):
    """The warpgroup's 64 rows of K or V: (64, BLOCK_D)."""
    return only_stage(buffers, step).slice(WG * 64, 64, 0)


@gluon.jit
def load_row(row, step, like):
    """One number per query, (1, BLOCK_M), in a slice of the layout of `like`."""
    return row.index(step & 1).load(like.type.layout)


@gluon.jit
def multiply_queries(
    keys,
    WG: gl.constexpr,
    queries,
    step,
    minus_lse,
    no_scores,
    COLUMNS: gl.constexpr,
    TILE: gl.constexpr,
):
    """Starts S^T - lse = K Q^T - lse, lse in units of a raw score: (64, BLOCK_M)."""
    left = half_of(keys.k, WG, step=step)
    first = minus_lse.broadcast_to(no_scores.shape) if TILE.LSE_FIRST else no_scores
    right = queries.q.index(step & 1)
    return multiply_rows(left, right, first=first, HAS_FIRST=TILE.LSE_FIRST, COLUMNS=COLUMNS)


@gluon.jit
def multiply_values(left, queries, step, minus_delta, no_scores, COLUMNS: gl.constexpr):
    """Starts dP^T - delta = V dO^T - delta: (64, BLOCK_M). The accumulator starts at -delta, which
    saves a subtraction while no wgmma is in flight.
    """
    first = minus_delta.broadcast_to(no_scores.shape)
    right = queries.do.index(step & 1)
    return multiply_rows(left, right, first=first, HAS_FIRST=True, COLUMNS=COLUMNS)


@gluon.jit
def grad_scores(tile, dp, queries, step, FEATURES: gl.constexpr):
    """dS^T = P^T (dP^T - delta), times the derivative of the score."""
    if FEATURES.DROPOUT:
        minus_delta = load_row(queries.minus_delta, step, like=dp)
        dp = select(tile.keep_bits, dp, other=minus_delta)
    return score_gradient(tile.weight, dp, derivative=1.0)


@gluon.jit
def multiply_keys(
    buffers, state, keys, step, COLUMNS: gl.constexpr, WG: gl.constexpr, TILE: gl.constexpr
):
    """Starts the warpgroup's half of dQ = dS K."""
    k_smem = only_stage(keys.k, step)
    return multiply_scores(buffers.ds, state.stage, k_smem, COLUMNS=COLUMNS, WG=WG, TILE=TILE)


@gluon.jit
def add_dq_in_order(
    dq,
    outputs,
    rings,
    work,
    block,
    step,
    WG: gl.constexpr,
    call,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    """Adds the warpgroup's part of the previous block's dQ, in order where that is ordered."""
    COLUMNS: gl.constexpr = TILE.BLOCK_M // 64 * used_columns(FEATURES.HEADDIM, TILE.BLOCK_D)
    before = block_behind(block, rings.queries.metadata, step, work, FEATURES, TILE)
    wait_to_add(rings.add_barriers, step - 1, TILE=TILE)
    add_dq(dq, outputs, work, before, WG * wider_half(COLUMNS), COLUMNS, call, FEATURES, TILE)
    arrive_added(rings.add_barriers, step - 1, TILE=TILE)


@gluon.jit
def add_dq(
    dq,
    outputs,
    work,
    block,
    FIRST: gl.constexpr,
    COLUMNS: gl.constexpr,
    call,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    """Adds a part of a block's dQ, which begins with the FIRST of its COLUMNS of 64 rows, to the
    accumulator in memory, in the order of its registers: 16 bytes a thread, 512 neighbours a warp.

    There is no wait, and no use of shared memory, whose bandwidth the matmuls need: through shared
    memory and TMA's reduce-add headdim 64 was 4 to 6 % slower.
    """
    x = in_register_order(dq)
    first = block_index(block, work, call=call, FEATURES=FEATURES, TILE=TILE) * COLUMNS + FIRST
    cells = outputs.dq + first * 64 + gl.arange(0, x.shape[0], x.type.layout)
    gl.atomic_add(cells, x, sem="relaxed")


@gluon.jit
def in_register_order(x):
    """A (64, C) accumulator as a vector, four registers of a thread adjacent: nothing moves."""
    C: gl.constexpr = x.shape[1]
    layout: gl.constexpr = by_register(64 * C)
    # A warp has 16 rows, in halves of 8; a thread has 2 columns of 8 in both halves
    x = x.reshape([4, 2, 8, C // 8, 4, 2]).permute(3, 0, 2, 4, 1, 5).reshape([64 * C])
    return gl.convert_layout(x, layout)


@gluon.jit
def in_accumulator_order(x, layout: gl.constexpr):
    """The (64, C) accumulator that such a vector was."""
    C: gl.constexpr = x.shape[0] // 64
    x = x.reshape([C // 8, 4, 8, 4, 2, 2]).permute(1, 4, 2, 0, 3, 5).reshape([64, C])
    return gl.convert_layout(x, layout)


@gluon.jit
def recompute(
    qk,
    bias,
    minus_lse,
    k_start,
    work,
    block,
    modifiers,
    call,
    dtype: gl.constexpr,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
    FIRST: gl.constexpr = 0,
):
    """P^T of a block, or of its queries from FIRST on, masked where it needs it.

    The branch does more than save the mask: the compiler may not move the wait for dP before it. So
    the exponentials belong inside, and overlap with dP; and so do the conversions that dV waits
    for.
    """
    S_LAYOUT: gl.constexpr = qk.type.layout
    IS_POSITION: gl.constexpr = FEATURES.MASK_MOD is not None or FEATURES.NATURAL
    lengths = tile_lengths(work, call, FEATURES=FEATURES, TILE=TILE)
    q_start = block.m_block * TILE.BLOCK_M + FIRST
    column = gl.arange(0, qk.shape[1], column_of(S_LAYOUT))[None, :]
    origin = 0
    if IS_POSITION or not (TILE.RAGGED or FEATURES.ENDS):
        q_idx = q_start + column
    elif TILE.BLOCK_M == 128:
        # Queries by the key they stand on, which is one number a block: tall blocks have no
        # registers for more
        q_idx = q_start + lengths.diagonal + column
        lengths = Lengths(lengths.seqlen_q, lengths.seqlen_k, diagonal=0)
    else:
        origin = q_start + (column & 6)
        q_idx, lengths = from_block(column, q_start, lengths=lengths)
    slope = load_slope(call.optionals, work.batch, head=block.head, FEATURES=FEATURES)
    seq = Sequence(lengths, slope, call.numbers, work.batch, block.head, modifiers, origin=origin)
    k_idx = (k_start + gl.arange(0, qk.shape[0], row_of(S_LAYOUT)))[:, None]
    minus_lse = 0.0 if TILE.LSE_FIRST else minus_lse  # where it came first it is in qk
    scored = score_with(qk, bias, q_idx=q_idx, k_idx=k_idx, seq=seq, FEATURES=FEATURES, TILE=TILE)
    p = scored.s
    if needs_mask(block, work, TILE=TILE):
        # With the shorter branch packed rows were up to 8 % faster, dense ones 1 to 6 % slower, in
        # two runs of three lengths: why is not known
        if FEATURES.MASK_MOD is not None or FEATURES.ENDS or TILE.RAGGED:
            p = hide(scored.s, q_idx, k_idx=k_idx, seq=seq, FEATURES=FEATURES)
        else:
            p = apply_mask(scored.s, q_idx, k_idx=k_idx, seq=seq, FEATURES=FEATURES)
        p = probabilities(p, minus_lse, seq=seq, FEATURES=FEATURES)
        keep_bits = draw_block(k_start, block, call=call, FEATURES=FEATURES, TILE=TILE)
        p = marked(p, keep_bits, FEATURES=FEATURES, TILE=TILE)
        operand = dropped_operand(p, keep_bits, dtype, True, FEATURES, TILE)
    else:
        p = probabilities(scored.s, minus_lse, seq=seq, FEATURES=FEATURES)
        keep_bits = draw_block(k_start, block, call=call, FEATURES=FEATURES, TILE=TILE)
        p = marked(p, keep_bits, FEATURES=FEATURES, TILE=TILE)
        operand = dropped_operand(p, keep_bits, dtype, False, FEATURES, TILE)
    return RecomputedBlock(operand, weight_of(p, scored.derivative, FEATURES, TILE), keep_bits)


@gluon.jit
def from_block(column, q_start, lengths):
    """Queries counted from a block of them on, as `scores.from_block` counts keys, and for its
    reason: columns are constants then, and no register holds one.
    """
    before = q_start + (column & 6)
    diagonal = lengths.diagonal + before
    return column - (column & 6), Lengths(lengths.seqlen_q - before, lengths.seqlen_k, diagonal)


@gluon.jit
def draw_block(k_start, block, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """A bit for each pair of a block that dropout keeps, where there is dropout."""
    if FEATURES.DROPOUT:
        q_start, threshold = block.m_block * TILE.BLOCK_M, call.numbers.dropout_threshold
        return draw_keep_bits(block.stream, q_start, k_start, threshold, TILE.BLOCK_M)
    else:
        return gl.to_tensor(0)
