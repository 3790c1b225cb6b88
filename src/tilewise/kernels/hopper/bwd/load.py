"""The load warp of the backward: a tile of keys once, then the queries that attend to it, block by
block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....tile.seqlen import modifiers_of
from ....tile.varlen import Hint
from ..compat import tma_load
from ..layouts import column_groups
from ..pipeline import advance, start, state_of, wait_empty
from ..tile_messages import send
from ..tma import load_ragged
from ..work import END, Work, is_partial, reset_counter
from .bias import copy_bias
from .block_list import count_listed, listed_block, listed_blocks
from .block_metadata import write_metadata
from .query_blocks import QueryBlock, block_after, count_blocks, first_block
from .work_tile import (
    RaggedWork,
    fetch_tile,
    find_tile,
    is_tile,
    open_tile,
    reset_packed_counter,
    tile_lengths,
)


@gluon.jit
def load_partition(inputs, rings, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The loop over tiles. Of sequences of equal length the host knows their number, of packed ones
    only the device.
    """
    modifiers = modifiers_of(call.optionals)
    messages_state = start()
    keys_state = start()
    step = gl.to_tensor(0)
    tile = fetch_tile(call.queue, True) if TILE.ORDERED else gl.program_id(0)
    key_tile = find_tile(tile, Hint(0, 0), call=call, FEATURES=FEATURES, TILE=TILE)
    while is_tile(key_tile, call, FEATURES=FEATURES):
        work = open_tile(key_tile, modifiers, call=call, FEATURES=FEATURES, TILE=TILE)
        send(rings.messages, messages_state, fields=work, BY_LANE=TILE.RAGGED)
        messages_state = advance(messages_state, 2)
        step = load_visits(inputs, rings, keys_state, step, work, modifiers, call, FEATURES, TILE)
        keys_state = advance(keys_state, 1)
        # Not sooner: others may wait for what a tile adds
        tile = fetch_tile(call.queue, TILE.ORDERED)
        key_tile = find_tile(tile, key_tile.hint, call=call, FEATURES=FEATURES, TILE=TILE)
    if FEATURES.PACKED:
        reset_packed_counter(key_tile, call, TILE=TILE)
    else:
        reset_counter(call.queue, key_tile.tile, tiles=call.queue.tiles)
    send_end(rings.messages, messages_state, TILE=TILE)


@gluon.jit
def send_end(messages, state, TILE: gl.constexpr):
    """No more tiles."""
    if TILE.RAGGED:
        send(messages, state, RaggedWork(END, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), True)
    else:
        send(messages, state, fields=Work(END, 0, 0, 0, 0, 0, 0, 0))


@gluon.jit
def load_keys(inputs, keys, state, work, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """K and V of a tile."""
    GROUPS: gl.constexpr = column_groups(TILE.BLOCK_D)
    BYTES: gl.constexpr = GROUPS * inputs.k.block_type.nbytes + inputs.v.block_type.nbytes
    wait_empty(keys, state)
    full = keys.full.index(0)
    mbarrier.expect(full, BYTES)
    v = keys.v.index(0)
    head, start, steps = work.head, work.start, inputs.heads_per_batch
    for group in gl.static_range(GROUPS):
        k = keys.k.index(group)
        column = group * k.shape[1]
        load_rows(inputs.k, work, head, start, steps[0], full, k, FEATURES, TILE, column=column)
    load_rows(inputs.v, work, head, start, steps[1], full, buffer=v, FEATURES=FEATURES, TILE=TILE)


@gluon.jit
def load_rows(
    desc,
    work,
    head,
    n_start,
    heads_per_batch,
    full,
    buffer,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
    column: gl.constexpr = 0,
):
    """Rows of K or V from n_start on, of the tile's sequence."""
    if TILE.RAGGED:
        stop = work.seqlen_k
        if FEATURES.PACKED:
            stop += work.stop_k - work.rows_k
        else:
            head += work.batch * heads_per_batch
        load_ragged(desc, stop, work.seqlen_k, head, n_start, full, buffer, column=column)
    else:
        load_tile(desc, work.batch, head=head, row=n_start, full=full, buffer=buffer, column=column)


@gluon.jit
def load_visits(
    inputs,
    rings,
    keys_state,
    step,
    work,
    modifiers,
    call,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    """Keys, and the blocks of queries that a tile visits; returns the step that the next tile
    begins with.

    Wide heads store dK and dV through the memory of K and V, for which the next keys wait. So the
    first queries come before them (H100, sustained: 1 % at 512 and 1Ki; nothing at headdim 128).
    """
    IS_PLAIN: gl.constexpr = not (TILE.RAGGED or TILE.HAS_METADATA)  # else the warp would spill
    QUERIES_FIRST: gl.constexpr = TILE.BLOCK_N == 64 and IS_PLAIN
    if not QUERIES_FIRST:
        load_keys(inputs, rings.keys, state=keys_state, work=work, FEATURES=FEATURES, TILE=TILE)
    if FEATURES.MASK_M > 0:
        is_whole = work.start + TILE.BLOCK_N <= tile_lengths(work, call, FEATURES, TILE).seqlen_k
        for member in range(FEATURES.GROUP * (work.last >= 0).to(gl.int32)):
            head = work.head * FEATURES.GROUP + member
            listed = listed_blocks(work.start, work.batch, head, modifiers, call, FEATURES, TILE)
            for i in range(count_listed(listed, FEATURES, TILE=TILE)):
                m_block, is_listed_partial = listed_block(listed, i, FEATURES=FEATURES, TILE=TILE)
                block = QueryBlock(head, m_block)
                masked = is_listed_partial | ~is_whole
                load_queries(inputs, rings, step, work, block, masked, call, FEATURES, TILE)
                copy_bias(inputs.bias, rings, step, work, block, modifiers, TILE)
                step += 1
    else:
        block = first_block(work, FEATURES)
        for i in range(count_blocks(work, FEATURES)):
            masked = is_partial(block.m_block, work)
            load_queries(inputs, rings, step, work, block, masked, call, FEATURES, TILE)
            if QUERIES_FIRST:
                if i == 0:
                    load_keys(inputs, rings.keys, keys_state, work, FEATURES=FEATURES, TILE=TILE)
            copy_bias(inputs.bias, rings, step, work, block, modifiers, TILE)
            step += 1
            block = block_after(block, work, FEATURES=FEATURES, TILE=TILE)
    return step


@gluon.jit
def load_queries(
    inputs, rings, step, work, block, masked, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """Q and dO of a block, with -lse and -delta of its rows."""
    GROUPS: gl.constexpr = column_groups(TILE.BLOCK_D)
    BYTES: gl.constexpr = GROUPS * inputs.q.block_type.nbytes + inputs.do.block_type.nbytes
    STATS: gl.constexpr = inputs.stats.block_type.nbytes
    stats: gl.constexpr = inputs.stats.block_type.shape
    batch, head, m_start = work.batch, block.head, block.m_block * TILE.BLOCK_M
    queries, state = rings.queries, state_of(step)
    wait_empty(queries, state)
    full = queries.full.index(state.stage)
    if TILE.HAS_METADATA:
        write_metadata(queries.metadata, state, work, block, masked, call, FEATURES)
    mbarrier.expect(full, BYTES + 2 * STATS)
    do = queries.do.index(state.stage)
    if FEATURES.PACKED:
        stop, size = work.stop_q, work.seqlen_q
        for group in gl.static_range(GROUPS):
            q = queries.q.index(state.stage * GROUPS + group)
            load_ragged(inputs.q, stop, size, head, m_start, full, q, True, group * q.shape[1])
        load_ragged(inputs.do, stop, size=size, head=head, row=m_start, full=full, buffer=do)
        batch = 0
        m_start += work.padded_q
    else:
        for group in gl.static_range(GROUPS):
            q = queries.q.index(state.stage * GROUPS + group)
            load_tile(inputs.q, batch, head, m_start, full, q, group * q.shape[1])
        load_tile(inputs.do, batch, head=head, row=m_start, full=full, buffer=do)
    minus_lse = queries.minus_lse.index(state.stage).reshape(stats)
    tma_load(inputs.stats, [batch, head, 0, m_start], full, minus_lse)
    minus_delta = queries.minus_delta.index(state.stage).reshape(stats)
    tma_load(inputs.stats, [batch, head, 1, m_start], full, minus_delta)


@gluon.jit
def load_tile(desc, batch, head, row, full, buffer, column: gl.constexpr = 0):
    shape: gl.constexpr = desc.block_type.shape
    tma_load(desc, [batch, head, row, column], full, buffer.reshape(shape))
