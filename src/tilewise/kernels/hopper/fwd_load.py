"""The load warp of the forward: it keeps the rings full and computes nothing.

One thread of it starts the copies; Hopper's copy engine (TMA) does the rest. It runs ahead of the
matmuls, into the next tile, until the rings are full.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .compat import tma_load
from .pipeline import after, load, start, wait_empty
from .work import END, Work, draw, key_block, key_head, open_tile, send


class Block(NamedTuple):
    """Where a block of keys lies."""

    batch: gl.tensor
    head: gl.tensor
    n_start: gl.tensor


@gluon.jit
def load_partition(q_desc, k_desc, v_desc, rings, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    q_shape: gl.constexpr = q_desc.block_type.shape
    WARPGROUPS: gl.constexpr = TILE.WARPGROUPS
    mail = start()
    q_at = start()
    at = start()
    before = Block(0, 0, 0)
    has_before = False  # the first step of all has no V, the last one no K
    tile = gl.program_id(0)
    while tile != END:
        # Drawn a tile ahead: the counter's answer takes a microsecond
        next_tile = draw(call.queue)
        work = open_tile(tile, call, FEATURES, TILE)
        send(rings.mail, mail, work)
        mail = after(mail, 2)
        head_k, member = key_head(work.head, FEATURES, TILE)
        for i in gl.static_range(WARPGROUPS):
            m_start = work.start + i * (64 // TILE.PACK)
            load(rings.q[i], q_at, q_desc, [work.batch, head_k, m_start, member, 0], q_shape)
        q_at = after(q_at, TILE.Q_STAGES)
        for i in range(work.last + 1 - work.first):
            block = Block(work.batch, head_k, key_block(work, i, FEATURES) * TILE.BLOCK_N)
            load_step(rings.steps, at, k_desc, block, True, v_desc, before, has_before)
            at = after(at, TILE.STAGES)
            before = block
            has_before = True
        tile = next_tile
    load_step(rings.steps, at, k_desc, before, False, v_desc, before, True)
    send(rings.mail, mail, Work(tile, 0, 0, 0, 0, 0, 0, 0))


@gluon.jit
def load_step(steps, at, k_desc, keys, has_keys, v_desc, values, has_values):
    """Fills a slot with K of one block and V of another, as soon as it is empty; the copy engine
    arrives at `full` when the last byte of both is there.
    """
    K_BYTES: gl.constexpr = k_desc.block_type.nbytes
    V_BYTES: gl.constexpr = v_desc.block_type.nbytes
    wait_empty(steps, at)
    full = steps.full.index(at.slot)
    mbarrier.expect(full, K_BYTES + V_BYTES, pred=has_keys & has_values)
    mbarrier.expect(full, K_BYTES, pred=has_keys & (not has_values))
    mbarrier.expect(full, V_BYTES, pred=not has_keys)
    load_rows(k_desc, keys, full, steps.k.index(at.slot), has_keys)
    load_rows(v_desc, values, full, steps.v.index(at.slot), has_values)


@gluon.jit
def load_rows(desc, block, full, slot, pred):
    shape: gl.constexpr = desc.block_type.shape
    at = [block.batch, block.head, block.n_start, 0]
    tma_load(desc, at, full, slot.reshape(shape), pred=pred)
