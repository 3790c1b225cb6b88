"""The load warp of the forward (producer): it keeps the pipelines full and computes nothing.

One thread of it starts the copies, which TMA carries out. It runs ahead of the matmuls, into the
next tile, until the rings are full.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ....tile.seqlen import modifiers_of
from ....tile.varlen import Hint
from ..bias import copy_bias
from ..compat import tma_load
from ..dependents import await_launch_before
from ..layouts import column_groups
from ..pipeline import PipelineState, advance, start, wait_empty
from ..tile_messages import send
from ..work import (
    END,
    LANE_LAYOUT,
    KernelCall,
    fetch_next_tile,
    fetched_tile,
    find_tile,
    key_block,
    key_head,
    reset_counter,
)
from .convert import stage_tile
from .key_blocks import KeyBlock, block_of, load_rows, nowhere
from .parts import TileParts, open_part, part_of, parts_of
from .runs import arrived_block, await_keys, open_run, open_runs
from .transpose import await_values, leave
from .varlen import no_more, open_in_batch, open_ragged, place_in


class Sources(NamedTuple):
    """The load warp's sources."""

    q: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    bias: tma.tensor_descriptor  # where it is copied, else None
    heads_per_batch: tuple  # with `seqused_k`: heads of K, and of V, from a batch to the next
    v_step: gl.tensor  # where V is flat, elements from a head of it to the next
    transposing: tuple = 0  # where the kernel makes V^T itself: `transpose.Transposing`
    table: tuple = 0  # where keys lie in pages: a `Table`


class Progress(NamedTuple):
    """The warp's pipeline states, and the block whose V is still to be loaded."""

    messages: PipelineState
    q: PipelineState
    kv_state: PipelineState
    bias: PipelineState
    prev_block: KeyBlock
    has_prev: gl.tensor  # the first step of all has no V, the last one no K


@gluon.jit
def load_partition(sources, rings, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    modifiers = modifiers_of(call.optionals)
    call = KernelCall(call.queue, call.optionals, call.sizes, call.numbers, modifiers)
    progress = Progress(start(), start(), start(), start(), nowhere(FEATURES, TILE), False)
    if FEATURES.CHUNK > 0:  # programs may begin when others end
        tile = fetched_tile(fetch_next_tile(call.queue, True), 0)
    else:
        tile = gl.program_id(0)
    if FEATURES.RUNS:
        runs = open_runs(call.optionals.runs)
        call = KernelCall(call.queue, call.optionals, call.sizes, call.numbers, modifiers, runs)
        tiles = runs.tiles * call.queue.nheads
        while tile < tiles:
            work = open_run(tile, call, FEATURES=FEATURES, TILE=TILE)
            progress, tile = load_tile(sources, rings, progress, work, call, FEATURES, TILE)
        has_values = True
    elif FEATURES.PACKED:
        tile_found = find_tile(tile, Hint(0, 0), call=call, FEATURES=FEATURES, TILE=TILE)
        while tile_found.is_tile:
            m_start = tile_found.m_block * TILE.BLOCK_M
            work = open_ragged(m_start, tile_found.head, tile_found.batch, call, FEATURES, TILE)
            progress, tile = load_tile(sources, rings, progress, work, call, FEATURES, TILE)
            tile_found = find_tile(tile, tile_found.hint, call=call, FEATURES=FEATURES, TILE=TILE)
        tiles = tile_found.tiles
        has_values = progress.has_prev  # there may have been no tile
    elif call.optionals.parts is None:
        tiles = call.queue.tiles
        while tile < tiles:
            work = open_in_batch(tile, call, FEATURES=FEATURES, TILE=TILE)
            progress, tile = load_tile(sources, rings, progress, work, call, FEATURES, TILE)
        has_values = True
    else:
        tiles = call.queue.tiles
        while tile < tiles:
            work = open_part(tile, call, FEATURES=FEATURES, TILE=TILE)
            progress, tile = load_tile(sources, rings, progress, work, call, FEATURES, TILE)
        has_values = True
    reset_counter(call.queue, tile, tiles=tiles)
    prev = progress.prev_block
    load_kv(rings.kv_ring, progress.kv_state, sources, prev, False, prev, has_values, TILE)
    send(rings.messages, progress.messages, fields=no_more(END, FEATURES))
    if TILE.TRANSPOSES:
        leave(sources.transposing, 1)
    if FEATURES.CHUNK > 0:
        await_launch_before()


@gluon.jit
def load_tile(sources, rings, progress, work, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """Says what the tile is, and loads its queries and the keys that they visit. Returns the next
    tile's number, too.
    """
    WARPGROUPS: gl.constexpr = TILE.WARPGROUPS
    messages_state, q_state = progress.messages, progress.q
    send(rings.messages, messages_state, fields=work)
    messages_state = advance(messages_state, 2)
    batch, first_q = place_in(work, FEATURES)
    head_k, member = key_head(work.head, FEATURES, TILE=TILE)
    for i in gl.static_range(WARPGROUPS):
        m_start = first_q + work.start + i * (64 // TILE.PACK)
        load_queries(rings.q[i], q_state, sources.q, (batch, head_k, m_start, member), TILE)
    q_state = advance(q_state, TILE.Q_STAGES)
    progress = Progress(
        messages_state,
        q_state,
        kv_state=progress.kv_state,
        bias=progress.bias,
        prev_block=progress.prev_block,
        has_prev=progress.has_prev,
    )
    if call.optionals.parts is None:
        progress, fetched = load_blocks(
            sources, rings, progress, work, True, call, FEATURES=FEATURES, TILE=TILE
        )
    else:
        fetched = gl.zeros([32], gl.int32, LANE_LAYOUT)
        first, last, count, part = parts_of(work)
        count = gl.maximum(count, 1)
        while part < count:
            of_part = part_of(work, TileParts(first, last, count=count, part=part))
            part += 1
            progress, fetched = load_blocks(
                sources, rings, progress, of_part, part == count, call, FEATURES, TILE
            )
    if FEATURES.CHUNK > 0:
        return progress, fetched_tile(fetched, 0)
    else:
        return progress, fetched_tile(fetched)


@gluon.jit
def load_blocks(
    sources, rings, progress, work, is_last, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """Loads the keys that a tile visits, or a part of it; with the last block of the last part it
    fetches the number of the next tile.
    """
    messages_state, q_state, kv_state, bias_state, prev_block, has_prev = progress
    batch, _ = place_in(work, FEATURES)
    head_k, _ = key_head(work.head, FEATURES, TILE=TILE)
    last = work.last - work.first
    blocks_ready = gl.to_tensor(0)  # blocks of the head's V^T that are ready
    fetched = gl.zeros([32], gl.int32, LANE_LAYOUT)
    for i in range(last + 1):
        # The number takes a microsecond, which the full ring hides. One fetched sooner would fall
        # to a program with a long tile still before it, and others would wait for that at the
        # end (headdim 256 causal, 16Ki: 0.97 of FlashAttention-3)
        fetched = fetch_next_tile(call.queue, (i == last) & is_last)
        n_start = key_block(work, i, call=call, FEATURES=FEATURES, TILE=TILE) * TILE.BLOCK_N
        if FEATURES.RUNS:
            arrived = await_keys(work, head_k, n_start, prev_block.arrived, call.runs, TILE)
            block = arrived_block(work, head_k, n_start=n_start, arrived=arrived, runs=call.runs)
        else:
            block = block_of(work, batch, head_k, n_start, sources, call, FEATURES, TILE)
        if TILE.TRANSPOSES:
            head = batch * sources.transposing.nheads_k + head_k
            blocks_ready = await_values(sources.transposing, head, n_start, blocks_ready)
        kv_state = load_kv(
            rings.kv_ring, kv_state, sources, block, True, prev_block, has_prev, TILE
        )
        copy_bias(sources.bias, rings.bias, bias_state, work, n_start, call, TILE)
        bias_state = advance(bias_state, 1)
        prev_block = block
        has_prev = True
    return Progress(messages_state, q_state, kv_state, bias_state, prev_block, has_prev), fetched


@gluon.jit
def load_queries(ring, state, desc, place, TILE: gl.constexpr):
    """Fills a stage of a warpgroup's queries, as soon as it is empty."""
    shape: gl.constexpr = desc.block_type.shape
    GROUPS: gl.constexpr = column_groups(TILE.BLOCK_D)
    wait_empty(ring, state)
    full = ring.full.index(state.stage)
    mbarrier.expect(full, GROUPS * desc.block_type.nbytes)
    for group in gl.static_range(GROUPS):
        buffer = ring.buffers.index(state.stage * GROUPS + group)
        coordinates = [place[0], place[1], place[2], place[3], group * shape[4]]
        tma_load(desc, coordinates, full, buffer.reshape(shape))


@gluon.jit
def load_kv(kv_ring, state, sources, keys, has_keys, values, has_values, TILE: gl.constexpr):
    """Fills a stage with K of one block and V of another, as soon as it is empty; TMA arrives at
    `full` when the last byte of both is there. Returns the next state. Of 8 bits each tile has a
    stage (convert.py).
    """
    if TILE.CACHE != "":
        state = stage_tile(kv_ring, state, sources, keys, 0, has_keys, TILE)
        return stage_tile(kv_ring, state, sources, values, 1, has_values, TILE)
    else:
        load_pair(kv_ring, state, sources, keys, has_keys, values, has_values, TILE)
        return advance(state, TILE.STAGES)


@gluon.jit
def load_pair(kv_ring, state, sources, keys, has_keys, values, has_values, TILE: gl.constexpr):
    """K of one block and V of another, of 16 bits, which share a stage."""
    GROUPS: gl.constexpr = column_groups(TILE.BLOCK_D)
    BOXES: gl.constexpr = TILE.BLOCK_N // TILE.PAGE if TILE.PAGE > 0 else 1
    K_BYTES: gl.constexpr = GROUPS * BOXES * sources.k.block_type.nbytes
    V_BYTES: gl.constexpr = BOXES * sources.v.block_type.nbytes
    wait_empty(kv_ring, state)
    full = kv_ring.full.index(state.stage)
    mbarrier.expect(full, K_BYTES + V_BYTES, pred=has_keys & has_values)
    mbarrier.expect(full, K_BYTES, pred=has_keys & (not has_values))
    mbarrier.expect(full, V_BYTES, pred=(not has_keys) & has_values)
    k, v = kv_ring.k.index(state.stage * GROUPS), kv_ring.v.index(state.stage)
    load_rows(sources, keys, WHICH=0, full=full, buffer=k, pred=has_keys, step=0, TILE=TILE)
    for group in gl.static_range(1, GROUPS):
        k = kv_ring.k.index(state.stage * GROUPS + group)
        load_rows(sources, keys, 0, full, k, has_keys, 0, TILE, group * k.shape[1])
    load_rows(sources, values, 1, full, v, has_values, sources.v_step, TILE)
