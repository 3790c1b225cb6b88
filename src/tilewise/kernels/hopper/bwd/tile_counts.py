"""Counts of the tiles that have added to dQ, for the kernel that converts it.

That kernel begins while the main kernel runs, on SMs without a program of it, and converts the dQ
of a head as soon as the head's tiles are counted. A warp of the main kernel counts a tile once both
warpgroups have added: a release takes a round trip to the L2 cache, which they do not wait for.

Packed sequences are not counted, as wrong `cu_seqlens` could leave a head fewer tiles than it waits
for; nor are tiles whose additions are ordered, as semaphores count those.

There is no deadlock: the main kernel waits for nothing of the other one, which begins when all
programs of the main kernel run.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..work import END
from .work_tile import receive_tile


@gluon.jit
def count_partition(rings, counts, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The warp that counts tiles. The counts are the first of the semaphores, one for each head of
    queries, of which heads that share keys use the first.
    """
    tiles = gl.to_tensor(0)
    work = receive_tile(rings.messages, tiles, TILE=TILE, WARPS=1)
    while work.start != END:
        mbarrier.wait(rings.add_barriers.added.index(tiles & 3), (tiles >> 2) & 1)
        head = work.batch * call.sizes.nheads + work.head * FEATURES.GROUP
        gl.atomic_add(counts + head, 1, sem="release")
        tiles += 1
        work = receive_tile(rings.messages, tiles, TILE=TILE, WARPS=1)


@triton.jit
def await_tiles(counts, batch, head, sizes, GROUP: tl.constexpr, BLOCK_N: tl.constexpr):
    """Waits until all tiles of the keys of a head have added to dQ."""
    tiles = tl.cdiv(sizes.seqlen_k, BLOCK_N)
    count = counts + batch * sizes.nheads + head // GROUP * GROUP
    counted = tl.atomic_add(count, 0, sem="acquire")
    while counted < tiles:
        counted = tl.atomic_add(count, 0, sem="acquire")
