"""The kernel of dQ for headdim 256: FlashAttention-2, algorithm 2, over tiles of queries.

    S = Q K^T    P = exp(S - lse)    dP = dO V^T    dS = P (dP - delta)    dQ += dS K

Where tiles of keys add to dQ in memory, their reductions fill the way into the L2 cache. Here S and
dP are computed a second time, and dQ stays in registers: seven matmuls for five, no sums in memory,
and the same bits in every run.

Each of two warpgroups has 64 queries, whose Q and dO stay in shared memory. Keys pass through a
ring of three tiles, V before K, which dQ needs once more. In a warpgroup nothing overlaps: one uses
CUDA cores while the other uses the tensor cores.
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

from ....tile.gradient import probabilities, score_gradient
from ....tile.schedule import query_tile_in_group
from ....tile.seqlen import lengths_in, offsets_of
from ....tile.types import Sequence, Tile
from ....tile.varlen import Hint, VarlenTile
from ..compat import tma_store
from ..hide import hide
from ..layouts import accumulator, column_of, row_of, shared, used_columns
from ..operands import multiply_rows, operand
from ..pipeline import (
    PipelineState,
    advance,
    make_ring,
    release_by_threads,
    start,
    wait_empty,
    wait_full,
)
from ..tile_messages import send
from ..tma import store_ragged
from ..work import (
    END,
    KernelCall,
    fetch_next_tile,
    fetched_tile,
    find_tile,
    is_partial,
    query_work,
    reset_counter,
)
from .load import load_queries, load_rows, send_end
from .mma import only_stage
from .query_blocks import QueryBlock
from .rings import Rings, Sources, make_queries, make_tile_messages
from .work_tile import receive_tile, tile_lengths, with_sequence

STAGES = gl.constexpr(3)  # for tiles of V and K


@gluon.jit
def hopper_bwd_query_kernel(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    stats_desc,
    dq_desc,
    heads_per_batch,
    queue,
    optionals,
    sizes,
    numbers,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    N: gl.constexpr = TILE.BLOCK_N
    D: gl.constexpr = TILE.BLOCK_D
    queries = make_queries(dtype, TILE)  # the stage of each warpgroup
    keys = make_ring(dtype, [N, D], shared(N, D, dtype=dtype), STAGES, 1, 256)
    messages = make_tile_messages(TILE)
    fence_async_shared()  # barriers are made before a copy arrives at one
    inputs = Sources(q_desc, do_desc, k_desc, v_desc, stats_desc, None, heads_per_batch)
    rings = Rings(keys, queries, score_buffers=0, messages=messages, add_barriers=0)
    call = KernelCall(queue, optionals, sizes=sizes, numbers=numbers)
    gl.warp_specialize(
        [
            (query_partition, (0, rings, dq_desc, call, FEATURES, TILE)),
            (query_partition, (1, rings, dq_desc, call, FEATURES, TILE)),
            (load_partition, (inputs, rings, call, FEATURES, TILE)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.constexpr_function
def of_both(block_m, block_n):
    """The rows of a tile of both warpgroups."""
    return Tile(2 * block_m, block_n, BLOCK_D=0, BLOCK_DV=0, DESCRIPTORS=True)


@gluon.jit
def load_partition(inputs, rings, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The load warp: a tile's queries once, as they are needed among its first keys, and its keys,
    block by block.
    """
    BOTH: gl.constexpr = of_both(TILE.BLOCK_M, TILE.BLOCK_N)
    k_step, v_step = inputs.heads_per_batch
    messages_state, state, step = start(), start(), gl.to_tensor(0)
    tile = gl.program_id(0)
    query_tile = find_queries(tile, Hint(0, 0), call=call, FEATURES=FEATURES, TILE=BOTH)
    while query_tile.is_tile:
        work = open_queries(query_tile, call, BOTH, FEATURES=FEATURES, TILE=TILE)
        send(rings.messages, messages_state, fields=work, BY_LANE=TILE.RAGGED)
        messages_state = advance(messages_state, 2)
        block = QueryBlock(work.head, work.start // TILE.BLOCK_M)
        fetched = fetch_next_tile(call.queue, False)
        for n_block in range(work.first, work.last + 1):
            fetched = fetch_next_tile(call.queue, n_block == work.last)
            load_block(inputs.v, rings.keys, state, work, n_block, v_step, FEATURES, TILE)
            if n_block == work.first:
                load_queries(inputs, rings, step, work, block, False, call, FEATURES, TILE)
            state = advance(state, STAGES)
            load_block(inputs.k, rings.keys, state, work, n_block, k_step, FEATURES, TILE)
            if n_block == work.first:
                block = QueryBlock(work.head, block.m_block + 1)
                load_queries(inputs, rings, step + 1, work, block, False, call, FEATURES, TILE)
            state = advance(state, STAGES)
        step += 2
        tile = fetched_tile(fetched)
        query_tile = find_queries(tile, query_tile.hint, call, FEATURES=FEATURES, TILE=BOTH)
    reset_counter(call.queue, tile, tiles=query_tile.tiles)
    send_end(rings.messages, messages_state, TILE=TILE)


@gluon.jit
def find_queries(tile, hint, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The tile of queries that a number is, no smaller than the hint's."""
    if FEATURES.PACKED:
        return find_tile(tile, hint, call=call, FEATURES=FEATURES, TILE=TILE)
    else:  # where it lies is found when it is opened: the warp has few registers
        tiles = call.queue.tiles
        return VarlenTile(tile, tile, tile, 0, is_tile=tile < tiles, hint=hint, tiles=tiles)


@gluon.jit
def open_queries(query_tile, call, BOTH: gl.constexpr, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The work tile of a tile of queries, of BOTH warpgroups."""
    m_block, head, batch = query_tile.m_block, query_tile.head, query_tile.batch
    if not FEATURES.PACKED:
        rows = call.sizes.seqlen_q
        m_block, head, batch = query_tile_in_group(m_block, call.queue, rows, BOTH.BLOCK_M)
    m_start = m_block * BOTH.BLOCK_M
    offsets = offsets_of(batch, call.sizes, optionals=call.optionals, FEATURES=FEATURES)
    lengths = lengths_in(offsets, batch, optionals=call.optionals, FEATURES=FEATURES)
    work = query_work(m_start, head, batch, lengths, call=call, FEATURES=FEATURES, TILE=BOTH)
    return with_sequence(work, offsets, lengths, FEATURES=FEATURES, TILE=TILE)


@gluon.jit
def load_block(
    desc, ring, state, work, n_block, heads_per_batch, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """Fills a stage with V or K of a block, as soon as it is empty."""
    wait_empty(ring, state)
    full, buffer = ring.full.index(state.stage), ring.buffers.index(state.stage)
    mbarrier.expect(full, desc.block_type.nbytes)
    head, n_start = work.head // FEATURES.GROUP, n_block * TILE.BLOCK_N
    load_rows(desc, work, head, n_start, heads_per_batch, full, buffer, FEATURES, TILE)


@gluon.jit
def query_partition(
    WG: gl.constexpr, rings, dq_desc, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """A warpgroup: dQ of its 64 queries of a tile, over all keys that they attend to."""
    N: gl.constexpr = TILE.BLOCK_N
    D: gl.constexpr = TILE.BLOCK_D
    S_LAYOUT: gl.constexpr = accumulator(N)
    Q_LAYOUT: gl.constexpr = accumulator(D)
    COLUMNS: gl.constexpr = used_columns(FEATURES.HEADDIM, D)
    COLUMNS_V: gl.constexpr = used_columns(FEATURES.HEADDIM_V, TILE.BLOCK_DV)
    dtype: gl.constexpr = dq_desc.dtype
    keys, queries = rings.keys, rings.queries
    no_scores = gl.zeros([64, N], gl.float32, S_LAYOUT)

    tiles = gl.to_tensor(0)
    v_state = start()
    work = receive_tile(rings.messages, tiles, TILE=TILE)
    while work.start != END:
        dq = gl.zeros([64, D], gl.float32, Q_LAYOUT)  # before the factor scale
        wait_full(queries, PipelineState(WG, tiles & 1))
        minus_lse = queries.minus_lse.index(WG).permute((1, 0)).load(S_LAYOUT)
        minus_delta = queries.minus_delta.index(WG).permute((1, 0)).load(S_LAYOUT)
        if TILE.LSE_FIRST:  # in units of a raw score
            minus_lse *= call.numbers.scale_log2
        m_start = work.start + WG * 64
        for n_block in range(work.first, work.last + 1):
            wait_full(keys, v_state)
            first = minus_delta.broadcast_to(no_scores.shape)
            do_tile = only_stage(queries.do, v_state.stage, WG)
            v_tile = keys.buffers.index(v_state.stage)
            pending_dp = multiply_rows(do_tile, v_tile, first, True, COLUMNS_V)
            k_state = advance(v_state, STAGES)
            wait_full(keys, k_state)
            q_tile = only_stage(queries.q, k_state.stage, WG)
            k_tile = keys.buffers.index(k_state.stage)
            pending_s = multiply_rows(q_tile, k_tile, no_scores, False, COLUMNS)
            dp = warpgroup_mma_wait(1, deps=[pending_dp])
            release_by_threads(keys, v_state)
            s = warpgroup_mma_wait(0, deps=[pending_s])
            if is_partial(n_block, work):
                ds = grad_scores(
                    s, dp, minus_lse, m_start, n_block, work, call,
                    HIDES=True, FEATURES=FEATURES, TILE=TILE,
                )  # fmt: skip
            else:
                ds = grad_scores(
                    s, dp, minus_lse, m_start, n_block, work, call,
                    HIDES=False, FEATURES=FEATURES, TILE=TILE,
                )  # fmt: skip
            left = operand(ds.to(dtype), Q_LAYOUT)
            pending_dq = warpgroup_mma(left, k_tile, dq, is_async=True)
            # Not later: with the next dP behind it, dQ would have longer to wait for the other
            # warpgroup (16Ki, causal: 8 %)
            dq = warpgroup_mma_wait(0, deps=[pending_dq])
            release_by_threads(keys, k_state)
            v_state = advance(k_state, STAGES)
        # Through the memory of Q, which was read for the last time
        buffer = queries.q.index(WG)
        buffer.store((dq * call.numbers.scale).to(dtype))
        fence_async_shared()
        store_queries(dq_desc, work, m_start, buffer, call, FEATURES)
        tma.store_wait(0)
        mbarrier.arrive(queries.empty.index(WG), count=2)
        tiles += 1
        work = receive_tile(rings.messages, tiles, TILE=TILE)


@gluon.jit
def store_queries(desc, work, m_start, buffer, call, FEATURES: gl.constexpr):
    """Stores a buffer as rows of dQ, also of queries that are not used, of which it is 0; TMA
    writes none past their end.
    """
    if FEATURES.PACKED:
        rows = offsets_of(work.batch, call.sizes, optionals=call.optionals, FEATURES=FEATURES)
        store_ragged(desc, rows.first_q + rows.rows_q, rows.rows_q, work.head, m_start, buffer)
    else:
        shape: gl.constexpr = desc.block_type.shape
        tma_store(desc, [work.batch, work.head, m_start, 0], buffer.reshape(shape))


@gluon.jit
def grad_scores(
    qk,
    dp,
    minus_lse,
    m_start,
    n_block,
    work,
    call,
    HIDES: gl.constexpr,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    """dS of a block of keys; HIDES: of which some are masked."""
    lengths = tile_lengths(work, call, FEATURES=FEATURES, TILE=TILE)
    seq = Sequence(lengths, 0.0, numbers=call.numbers)
    q_idx = (m_start + gl.arange(0, 64, row_of(qk.type.layout)))[:, None]
    k_idx = n_block * TILE.BLOCK_N + gl.arange(0, TILE.BLOCK_N, column_of(qk.type.layout))[None, :]
    if HIDES:
        qk = hide(qk, q_idx, k_idx=k_idx, seq=seq, FEATURES=FEATURES)
    p = probabilities(qk, minus_lse, seq=seq, FEATURES=FEATURES)
    return score_gradient(p, dp, derivative=1.0)
