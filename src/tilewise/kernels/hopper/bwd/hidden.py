"""Blocks that a tile visits for one of its warpgroups alone: at the end of a band.

A warpgroup has half of the tile's keys. Under a causal mask the second one's are seen one block
later than the first one's, and in a window the first one's one block less far. For such a block the
warpgroup shares a dS of zeros, and computes its part of dQ and nothing else.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..layouts import accumulator
from ..pipeline import advance, release, state_of, wait_full
from .score_buffers import share_scores
from .work_tile import tile_lengths


@gluon.jit
def count_hidden(work, call, WG: gl.constexpr, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """How many of a tile's blocks do not see the warpgroup's keys: one or none, at the beginning
    for the second warpgroup and at the end for the first one. Of a tile one block stays.
    """
    diagonal = tile_lengths(work, call, FEATURES=FEATURES, TILE=TILE).diagonal
    if WG == 1:
        first = gl.maximum(work.start + 64 - diagonal - call.numbers.right, 0)
        hidden = gl.minimum(first // 64, work.last) - work.begin
    else:
        last = gl.maximum(work.start + 63 - diagonal + call.numbers.left, 0)
        hidden = work.last - gl.maximum(last // 64, work.first)
    return gl.maximum(hidden, 0)


@gluon.jit
def pass_block(rings, ds_state, step, WG: gl.constexpr, TILE: gl.constexpr):
    """Shares the zeros of a block that does not see the warpgroup's keys, and releases it. Returns
    the next state and step.
    """
    M: gl.constexpr = TILE.BLOCK_M
    buffers = rings.score_buffers
    dtype: gl.constexpr = buffers.ds.dtype
    ds = gl.zeros([64, M], dtype, accumulator(M))
    share_scores(buffers.ds, ds_state.stage, WG=WG, ds=ds, TILE=TILE)
    fence_async_shared()
    mbarrier.arrive(buffers.full.index(ds_state.stage), count=1)
    wait_full(rings.queries, state_of(step))
    release(rings.queries, state_of(step))
    return advance(ds_state, 3), step + 1
