"""The matmul warpgroups of the forward: FlashAttention-2, algorithm 1, one step ahead of itself.

While the tensor cores compute

    S(next) = Q K^T        and        O += P V

the warpgroup waits only for S(next), whose maxima overlap with P V (FlashAttention-3, arXiv
2407.08608, algorithm 2). The last P V of a tile overlaps the first S of the next.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma, warpgroup_mma_wait

from ....tile.seqlen import modifiers_of
from ....tile.softmax import exponentials
from ..bias import copied_bias, release_bias
from ..layouts import accumulator, column_groups, computed_columns, row_of, used_columns
from ..operands import (
    add_sums,
    joined,
    multiply_columns,
    multiply_rows,
    no_columns,
    row_factor,
    row_sums,
    wait_for_columns,
    whole_sums,
)
from ..pipeline import advance, parity_of, release_by_threads, start, wait_full
from ..rescale import THRESHOLD, exponentials_in, in_exponent, lagging_max, rescale, rescale_factors
from ..row_max import integers_suffice
from ..work import END, KernelCall, key_block
from .epilogue import write_tile
from .pairs import from_pairs
from .parts import TileParts, has_more, part_of, parts_of, receive_part
from .scores import (
    dropout,
    open_rows,
    prefetch_bias,
    scale_of,
    scale_scores,
    scales_of_values,
    to_scores,
)
from .varlen import lengths_in, receive_tile, rows_in


class BlockSplit(NamedTuple):
    """The key blocks of a tile: those that a warpgroup computes with, and those after them."""

    blocks: gl.tensor
    masked: gl.tensor  # for all of its rows: skipped
    idle: gl.tensor  # because it has no rows at all


class QueryTile(NamedTuple):
    """The queries of a warpgroup's tile."""

    q: gl.tensor  # in shared memory, or groups of its columns
    q_state: gl.tensor  # of its stage
    rows: gl.tensor  # as `open_rows` gives them
    work: gl.tensor
    blocks: gl.tensor  # of keys
    last_blocks: gl.tensor  # the same; 0 where a part follows that has the same queries


class BlockSoftmax(NamedTuple):
    """The softmax of a block of keys, ready to be multiplied with V."""

    p: gl.tensor  # (64, BLOCK_N) in 16 bits, or pairs of it, see pairs.py
    m_i: gl.tensor
    l_i: gl.tensor  # as `row_sums` keeps it


@gluon.jit
def attend_partition(
    WG: gl.constexpr, rings, output, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    N: gl.constexpr = TILE.BLOCK_N
    DV: gl.constexpr = TILE.BLOCK_DV
    STAGES: gl.constexpr = TILE.STAGES
    S_LAYOUT: gl.constexpr = accumulator(N)
    UNEVEN: gl.constexpr = is_uneven(TILE.WARPGROUPS, TILE.BLOCK_N, is_banded=FEATURES.RIGHT)
    # Waited for before the exponentials, the next step needs no wait after them; but with two
    # stages it has not landed that early
    EARLY: gl.constexpr = STAGES > 2
    HAS_PARTS: gl.constexpr = call.optionals.parts is not None
    dtype: gl.constexpr = output.smem.dtype
    q_ring = rings.q[WG]
    kv_ring = rings.kv_ring
    rows = WG * 64 + gl.arange(0, 64, row_of(S_LAYOUT))
    no_scores = gl.zeros([64, N], gl.float32, S_LAYOUT)
    no_sums = row_sums(no_scores)
    no_max = gl.full([64], float("-inf"), gl.float32, row_of(S_LAYOUT))
    modifiers = modifiers_of(call.optionals)
    call = KernelCall(call.queue, call.optionals, call.sizes, call.numbers, modifiers)

    messages_state = start()
    q_state = start()
    state = start()
    # The first S overlaps with nothing. S = Q K^T: (64, BLOCK_N)
    work = receive_tile(rings.messages, messages_state, FEATURES=FEATURES)
    messages_state = advance(messages_state, 2)
    parts = TileParts(0, 0, count=0, part=0)
    if HAS_PARTS:
        parts = parts_of(work)
        work = part_of(work, parts)
    split = split_blocks(work, WG, call=call, FEATURES=FEATURES, TILE=TILE)
    # Of packed sequences only the device knows how many tiles there are: there may be none for us,
    # and then nothing comes. S is computed from what lies there, as after the last tile.
    has_tile = work.start != END if FEATURES.PACKED else True
    wait_full(q_ring, q_state, pred=has_tile)
    wait_full(kv_ring, state, pred=has_tile)
    q_tile = query_tile(q_ring, q_state, TILE=TILE)
    pending_s = multiply_keys(q_tile, kv_ring, state, no_scores, FEATURES, TILE)
    tile = open_rows(work, rows, call=call, FEATURES=FEATURES, TILE=TILE)
    n_block = key_block(work, 0, call=call, FEATURES=FEATURES, TILE=TILE)
    bias = prefetch_bias(tile, n_block, call=call, FEATURES=FEATURES, TILE=TILE)
    s = scale_scores(warpgroup_mma_wait(0, deps=[pending_s]), kv_ring, state, call, TILE)
    v_scales = scales_of_values(kv_ring, state, call, TILE)
    bias = copied_bias(bias, rings.bias, WG=WG, parity=0, pred=has_tile, TILE=TILE)
    if has_tile:
        release_by_threads(kv_ring, state)
    state = advance(state, STAGES)
    s, m_i = to_scores(s, bias, tile, 0, n_block, no_max, None, call, dtype, True, FEATURES, TILE)
    release_bias(rings.bias, WG, TILE=TILE)
    scale = scale_of(tile, call, FEATURES=FEATURES, TILE=TILE)
    exponent = in_exponent(no_max, m_i, scale=scale, FEATURES=FEATURES)
    p, alpha = exponentials(s, exponent.m_before, exponent.m_i, exponent.factor, True)
    step = softmax_step(
        p, m_i, alpha, no_sums, v_scales, tile, n_block, call, dtype, FEATURES, TILE
    )
    if EARLY:
        wait_full(kv_ring, state, pred=split.blocks > 1)

    while work.start != END:
        acc_o = no_columns(computed_columns(FEATURES.HEADDIM_V, DV, is_flat=TILE.V_FLAT))
        last_blocks = split.blocks
        if HAS_PARTS:
            last_blocks = gl.where(has_more(parts), 0, last_blocks)
        query = QueryTile(q_tile, q_state, tile, work, split.blocks, last_blocks)
        for i in range(1, split.blocks):
            step, acc_o, state = attend_block(
                i, step, acc_o, state, query, rings, call, WG, dtype, FEATURES, TILE
            )
        if UNEVEN:
            state = skip(kv_ring, state, count=split.idle, STAGES=STAGES)

        # The last P V of this tile overlaps with the first S of the next
        q_state = leave_queries(q_ring, query, HAS_PARTS, TILE=TILE)
        upcoming, parts, messages_state = receive_part(
            rings.messages, messages_state, work, parts, HAS_PARTS, FEATURES
        )
        goes_on = upcoming.start != END
        wait_full(q_ring, q_state, pred=goes_on)
        wait_full(kv_ring, state)
        k_state = state
        if UNEVEN:
            for _ in range(split.masked):
                k_state = advance(k_state, STAGES)
                wait_full(kv_ring, k_state)
        q_tile = query_tile(q_ring, q_state, TILE=TILE)
        # After the last tile S is computed from what lies there, and not used
        pending_s = multiply_keys(q_tile, kv_ring, k_state, no_scores, FEATURES, TILE)
        pending_o = multiply_values(step.p, kv_ring, state=state, acc_o=acc_o)
        tile = open_rows(upcoming, rows, call=call, FEATURES=FEATURES, TILE=TILE)
        n_block = key_block(upcoming, 0, call=call, FEATURES=FEATURES, TILE=TILE)
        bias = prefetch_bias(tile, n_block, call=call, FEATURES=FEATURES, TILE=TILE)
        s = warpgroup_mma_wait(len(pending_o), deps=[pending_s])
        s = scale_scores(s, kv_ring, k_state, call, TILE)
        bias = copied_bias(bias, rings.bias, WG, parity_of(state, STAGES), goes_on, TILE)
        s, m_i = to_scores(
            s, bias, tile, 0, n_block, no_max, None, call, dtype, True, FEATURES, TILE
        )
        release_bias(rings.bias, WG, TILE=TILE)
        acc_o = wait_for_columns(pending_o)
        v_scales = scales_of_values(kv_ring, k_state, call, TILE)
        if UNEVEN:
            for _ in range(split.masked):
                release_by_threads(kv_ring, state)
                state = advance(state, STAGES)
        release_by_threads(kv_ring, state)
        state = advance(state, STAGES)
        next_scale = scale_of(tile, call, FEATURES=FEATURES, TILE=TILE)
        exponent = in_exponent(no_max, m_i, scale=next_scale, FEATURES=FEATURES)
        p, alpha = exponentials(s, exponent.m_before, exponent.m_i, exponent.factor, True)
        begun = softmax_step(
            p, m_i, alpha, no_sums, v_scales, tile, n_block, call, dtype, FEATURES, TILE
        )
        l_i = whole_sums(step.l_i, row_of(S_LAYOUT))
        parity = parity_of(q_state, TILE.Q_STAGES) ^ 1  # of this tile; q_state is the next one's
        write_tile(joined(acc_o, DV), step.m_i, l_i, work, output, call, parity, WG, FEATURES, TILE)
        step = begun
        work = upcoming
        split = split_blocks(work, WG, call=call, FEATURES=FEATURES, TILE=TILE)
        if EARLY:
            wait_full(kv_ring, state, pred=goes_on & (split.blocks > 1))
    tma.store_wait(0)  # TMA still reads the last tile from shared memory


@gluon.jit
def attend_block(
    i,
    step,
    acc_o,
    state,
    query,
    rings,
    call,
    WG: gl.constexpr,
    dtype: gl.constexpr,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    """Starts S of block i and P V of the block before, then computes the softmax of block i.
    Returns it, O and the state of the ring of V.
    """
    N: gl.constexpr = TILE.BLOCK_N
    STAGES: gl.constexpr = TILE.STAGES
    MASKED: gl.constexpr = (
        FEATURES.LEFT or FEATURES.RIGHT or FEATURES.ENDS or FEATURES.MASK_MOD is not None
    )
    EARLY: gl.constexpr = STAGES > 2
    # Rescale factors overlap with P V, for which three warpgroups have no registers
    PINNED: gl.constexpr = TILE.WARPGROUPS == 2
    # And a quarter of the exponentials (+2 %). With a mask in the loop, or at other headdims, it
    # gains nothing; half of them lose 3 %, as their conversions to P then stand alone
    QUARTER: gl.constexpr = PINNED and TILE.BLOCK_DV == 128 and not MASKED
    kv_ring = rings.kv_ring
    tile = query.rows
    n_block = key_block(query.work, i, call, FEATURES, TILE)  # a list may have to be read
    if not EARLY:
        wait_full(kv_ring, state)
    no_scores = gl.zeros([64, N], gl.float32, accumulator(N))
    pending_s = multiply_keys(query.q, kv_ring, state, no_scores, FEATURES, TILE)
    pending_o = multiply_values(step.p, kv_ring, state=state, acc_o=acc_o)
    bias = prefetch_bias(tile, n_block, call=call, FEATURES=FEATURES, TILE=TILE)
    by_integers = integers_suffice(step.m_i, THRESHOLD)  # a vote, before the wait for S
    s = warpgroup_mma_wait(len(pending_o), deps=[pending_s])
    s = scale_scores(s, kv_ring, state, call, TILE)
    bias = copied_bias(bias, rings.bias, WG, parity_of(state, STAGES), True, TILE)
    if TILE.Q_STAGES == 1:
        if i + 1 == query.last_blocks:
            release_by_threads(rings.q[WG], query.q_state)
    s, m_i = to_scores(
        s, bias, tile, i, n_block, step.m_i, by_integers, call, dtype, MASKED, FEATURES, TILE
    )
    m_i = lagging_max(step.m_i, m_i)
    release_bias(rings.bias, WG, TILE=TILE)
    scale = scale_of(tile, call, FEATURES=FEATURES, TILE=TILE)
    m_before, m_ref, factor = in_exponent(step.m_i, m_i, scale=scale, FEATURES=FEATURES)
    if PINNED:
        alpha, grows = rescale_factors(m_before, m_ref, query.work.start, not QUARTER)
    if QUARTER:
        s = exponentials_in(s, m_ref, factor, 0, 1, True, FEATURES.NATURAL)
    if EARLY:
        wait_full(kv_ring, advance(state, STAGES), pred=i + 1 < query.blocks)
    acc_o = wait_for_columns(pending_o)
    v_scales = scales_of_values(kv_ring, state, call, TILE)
    release_by_threads(kv_ring, state)
    state = advance(state, STAGES)
    if not PINNED:
        alpha, grows = rescale_factors(m_before, m_ref, start=query.work.start, PINNED=False)
    # Before the exponentials: behind a branch at their end, no conversion to P would stand
    # beside them (headdim 128 causal, 16Ki: 0.957 of FlashAttention-3, and 0.995)
    acc_o = rescale_pieces(acc_o, alpha, grows)
    if QUARTER:
        p = exponentials_in(s, m_ref, factor, 1, 4, False, FEATURES.NATURAL)
    else:
        p, _ = exponentials(s, m_before, m_new=m_ref, exp_scale=factor, MASKED=True)
    step = softmax_step(
        p, m_i, alpha, step.l_i, v_scales, tile, n_block, call, dtype, FEATURES, TILE
    )
    return step, acc_o, state


@gluon.jit
def leave_queries(q_ring, query, HAS_PARTS: gl.constexpr, TILE: gl.constexpr):
    """Releases the queries of a tile behind its last part. Returns the stage of those that follow.
    Q of one stage is released after the last S, and full again when the next tile begins.
    """
    q_state = query.q_state
    if not HAS_PARTS or query.last_blocks > 0:
        if TILE.Q_STAGES > 1 or query.blocks < 2:
            release_by_threads(q_ring, q_state)
        q_state = advance(q_state, TILE.Q_STAGES)
    return q_state


@gluon.constexpr_function
def is_uneven(warpgroups, block_n, is_banded):
    """Whether warpgroups compute with different blocks: three of them, or two that are taller
    together than a block, under a mask that hides the last one from the first.
    """
    return warpgroups == 3 or (is_banded and block_n < 64 * warpgroups)


@gluon.jit
def split_blocks(work, WG: gl.constexpr, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """What a warpgroup does with the blocks of a tile: it computes with all where they are even."""
    blocks = work.last + 1 - work.first
    if not is_uneven(TILE.WARPGROUPS, TILE.BLOCK_N, is_banded=FEATURES.RIGHT):
        return BlockSplit(blocks, 0, idle=0)
    else:
        ROWS: gl.constexpr = 64 // TILE.PACK
        m_start = work.start + WG * ROWS
        has_rows = m_start < rows_in(work, call, FEATURES=FEATURES)
        masked = 0
        if FEATURES.RIGHT:
            lengths = lengths_in(work, call, FEATURES=FEATURES)
            last_seen = m_start + ROWS - 1 + lengths.diagonal + call.numbers.right
            masked = work.last - gl.maximum(last_seen // TILE.BLOCK_N, work.first)
            # While it holds the last V it saw, the ring has no room for more to pass
            masked = gl.maximum(gl.minimum(masked, TILE.STAGES - 1), 0)
            masked = gl.where(has_rows, masked, 0)
        idle = gl.where(has_rows, 0, blocks - 1)
        return BlockSplit(blocks - masked - idle, masked, idle=idle)


@gluon.jit
def skip(kv_ring, state, count, STAGES: gl.constexpr):
    """Releases `count` stages unread."""
    for _ in range(count):
        wait_full(kv_ring, state)
        release_by_threads(kv_ring, state)
        state = advance(state, STAGES)
    return state


@gluon.jit
def query_tile(q_ring, q_state, TILE: gl.constexpr):
    """Q of a stage, or groups of its columns."""
    if column_groups(TILE.BLOCK_D) == 1:
        return q_ring.buffers.index(q_state.stage)
    else:
        first = q_state.stage * 3
        buffers = q_ring.buffers
        return buffers.index(first), buffers.index(first + 1), buffers.index(first + 2)


@gluon.jit
def multiply_keys(q_tile, kv_ring, state, no_scores, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """Starts S = Q K^T: (64, BLOCK_N)."""
    if column_groups(TILE.BLOCK_D) == 1:
        COLUMNS: gl.constexpr = used_columns(FEATURES.HEADDIM, TILE.BLOCK_D)
        return multiply_rows(q_tile, kv_ring.k.index(state.stage), no_scores, False, COLUMNS)
    else:
        s = no_scores
        for group in gl.static_range(3):
            k_tile = kv_ring.k.index(state.stage * 3 + group).permute((1, 0))
            s = warpgroup_mma(q_tile[group], k_tile, s, use_acc=group > 0, is_async=True)
        return s


@gluon.jit
def multiply_values(p, kv_ring, state, acc_o):
    """Starts O += P V, of the columns that O has."""
    v = kv_ring.v.index(state.stage)
    if p.dtype == gl.int32:
        p = from_pairs(p, v.dtype)
    return multiply_columns(p, v, pieces=acc_o)


@gluon.jit
def rescale_pieces(acc_o, alpha, grows):
    """The pieces of O times alpha, in warps in which a row grows."""
    LAYOUT: gl.constexpr = acc_o[0].type.layout
    piece = rescale(acc_o[0], row_factor(alpha, LAYOUT), row_factor(grows, LAYOUT))
    if len(acc_o) > 1:
        return (piece,) + rescale_pieces(acc_o[1:], alpha, grows)
    else:
        return (piece,)


@gluon.jit
def softmax_step(
    p,
    m_i,
    alpha,
    l_i,
    v_scales,
    tile,
    n_block,
    call,
    dtype: gl.constexpr,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    """The softmax of a block with exponentials p, after blocks with the sums l_i."""
    weighed = p * v_scales if TILE.CACHE != "" else p
    dropped = dropout(weighed, tile, n_block, call, dtype, FEATURES, TILE)
    return BlockSoftmax(dropped, m_i, add_sums(l_i, alpha, row_sums(p)))
