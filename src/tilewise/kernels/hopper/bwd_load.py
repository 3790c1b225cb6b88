"""The load warp of the backward: a tile of keys once, then the queries that see it, one block after
the other.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .bwd_blocks import block_after, count_blocks, first_block
from .compat import tma_load
from .pipeline import after, start, wait_empty
from .work import END, Work, close, draw_late, open_key_tile, send


@gluon.jit
def load_partition(inputs, rings, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    K_BYTES: gl.constexpr = inputs.k.block_type.nbytes + inputs.v.block_type.nbytes
    mail = start()
    keys_at = start()
    at = start()
    tile = draw_late(call.queue, True) if TILE.ORDERED else gl.program_id(0)
    while tile < call.queue.tiles:
        work = open_key_tile(tile, call, FEATURES, TILE)
        send(rings.mail, mail, work)
        mail = after(mail, 2)
        wait_empty(rings.keys, keys_at)
        full = rings.keys.full.index(0)
        mbarrier.expect(full, K_BYTES)
        load_tile(inputs.k, work.batch, work.head, work.start, full, rings.keys.k.index(0))
        load_tile(inputs.v, work.batch, work.head, work.start, full, rings.keys.v.index(0))
        keys_at = after(keys_at, 1)
        block = first_block(work, FEATURES)
        for _ in range(count_blocks(work, FEATURES)):
            load_queries(inputs, rings.queries, at, work.batch, block, TILE.BLOCK_M)
            at = after(at, 2)
            block = block_after(block, work, FEATURES)
        # Not sooner: others may wait for what a tile adds
        tile = draw_late(call.queue, TILE.ORDERED)
    close(call.queue, tile)
    send(rings.mail, mail, Work(END, 0, 0, 0, 0, 0, 0, 0))


@gluon.jit
def load_queries(inputs, queries, at, batch, block, BLOCK_M: gl.constexpr):
    """Q and dO of a block, with -lse and -delta of its rows."""
    BYTES: gl.constexpr = inputs.q.block_type.nbytes + inputs.do.block_type.nbytes
    STATS: gl.constexpr = inputs.stats.block_type.nbytes
    stats: gl.constexpr = inputs.stats.block_type.shape
    head, m_start = block.head, block.m_block * BLOCK_M
    wait_empty(queries, at)
    full = queries.full.index(at.slot)
    mbarrier.expect(full, BYTES + 2 * STATS)
    load_tile(inputs.q, batch, head, m_start, full, queries.q.index(at.slot))
    load_tile(inputs.do, batch, head, m_start, full, queries.do.index(at.slot))
    minus_lse = queries.minus_lse.index(at.slot).reshape(stats)
    tma_load(inputs.stats, [batch, head, 0, m_start], full, minus_lse)
    minus_delta = queries.minus_delta.index(at.slot).reshape(stats)
    tma_load(inputs.stats, [batch, head, 1, m_start], full, minus_delta)


@gluon.jit
def load_tile(desc, batch, head, row, full, slot):
    shape: gl.constexpr = desc.block_type.shape
    tma_load(desc, [batch, head, row, 0], full, slot.reshape(shape))
