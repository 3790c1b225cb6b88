"""The load warp of the forward: it keeps the rings full and computes nothing.

One thread of it starts the copies; Hopper's copy engine (TMA) does the rest. It runs ahead of the
matmuls, into the next tile, until the rings are full.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .pipeline import after, load, start
from .work import END, Work, draw, key_block, key_head, open_tile, send


@gluon.jit
def load_partition(q_desc, k_desc, v_desc, rings, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    q_shape: gl.constexpr = q_desc.block_type.shape
    k_shape: gl.constexpr = k_desc.block_type.shape
    v_shape: gl.constexpr = v_desc.block_type.shape
    WARPGROUPS: gl.constexpr = TILE.WARPGROUPS
    mail = start()
    q_at = start()
    kv_at = start()
    tile = gl.program_id(0)
    while tile != END:
        # Drawn a tile ahead: the counter's answer takes a microsecond
        next_tile = draw(call.queue)
        work = open_tile(tile, call, FEATURES, TILE)
        send(rings.mail, mail, work)
        mail = after(mail, 2)
        head_k, member = key_head(work.head, FEATURES, TILE)
        for i in gl.static_range(WARPGROUPS):
            m_start = work.m_start + i * (64 // TILE.PACK)
            load(rings.q[i], q_at, q_desc, [work.batch, head_k, m_start, member, 0], q_shape)
        q_at = after(q_at, TILE.Q_STAGES)
        for i in range(work.last + 1 - work.first):
            n_start = key_block(work, i, FEATURES) * TILE.BLOCK_N
            load(rings.k, kv_at, k_desc, [work.batch, head_k, n_start, 0], k_shape)
            load(rings.v, kv_at, v_desc, [work.batch, head_k, n_start, 0], v_shape)
            kv_at = after(kv_at, TILE.STAGES)
        tile = next_tile
    send(rings.mail, mail, Work(tile, 0, 0, 0, 0, 0, 0))
