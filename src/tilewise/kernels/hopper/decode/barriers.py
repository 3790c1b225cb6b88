"""The first state of the barriers of rings.

The compiler puts a barrier of a warpgroup between any two of them, 0.5 us in all. So the matmul
warpgroup makes them while the load warp waits for the lengths, a trip to memory. Two warpgroups'
are made before all else: their load warp has no register for one barrier more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..pipeline import init_barrier, init_ring


@gluon.jit
def make_ready(rings, scales, TILE: gl.constexpr):
    """Makes them and says so. The load warp waits for that, the others for its first message."""
    make_barriers(rings, scales, TILE=TILE)
    mbarrier.arrive(rings.ready.index(0), count=1)


@gluon.jit
def make_barriers(rings, scales, TILE: gl.constexpr):
    """All barriers but those of messages."""
    # The load warp's lanes arrive, too, when the scales that they copy have landed
    OF_K: gl.constexpr = arrivals_of(scales.k_row is not None, TILE.COPY_WARPS, by_tma=TILE.BY_TMA)
    OF_V: gl.constexpr = arrivals_of(scales.v_row is not None, TILE.COPY_WARPS, by_tma=TILE.BY_TMA)
    READS: gl.constexpr = 128 * TILE.WARPGROUPS  # of a stage: see `release_by_threads`
    init_ring(rings.k, OF_K, CONSUMERS=READS)
    init_ring(rings.v, OF_V, CONSUMERS=READS)
    init_barrier(rings.q.full, 1 if TILE.WARPGROUPS == 1 else 32)
    init_barrier(rings.q.empty, READS)
    fence_async_shared()  # barriers are made before a copy arrives at one


@gluon.constexpr_function
def arrivals_of(has_scales, copy_warps, by_tma):
    """Arrivals at a stage that is full."""
    return 1 + 32 * has_scales if by_tma else 32 * copy_warps
