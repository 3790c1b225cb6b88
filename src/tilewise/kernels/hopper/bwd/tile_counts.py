"""Counts of the tiles that have added to dQ, for the kernel that converts it.

That kernel begins while the main kernel runs, on SMs without a program of it, and converts the dQ
of a head as soon as the head's tiles are counted. A warp of the main kernel counts a tile once both
warpgroups have added: a release takes a round trip to the L2 cache, which they do not wait for.

Tiles whose additions are ordered are not counted, as semaphores count those.

There is no deadlock: the main kernel waits for nothing of the other one, which begins when all
programs of the main kernel run. Wrong `cu_seqlens` may leave a packed sequence fewer tiles than it
waits for: it looks so many times, and then waits for the end of the main kernel.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra import cuda

from ....tile.seqlen import padded_row
from ..work import END
from .work_tile import ROWS, receive_tile

LOOKS = tl.constexpr(1 << 15)  # a fiftieth of a second


@gluon.jit
def count_partition(rings, counts, call, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """The warp that counts tiles."""
    tiles = gl.to_tensor(0)
    work = receive_tile(rings.messages, tiles, TILE=TILE, WARPS=1)
    while work.start != END:
        mbarrier.wait(rings.add_barriers.added.index(tiles & 3), (tiles >> 2) & 1)
        head, first = work.head * FEATURES.GROUP, work.padded_q if FEATURES.PACKED else 0
        place = count_place(work.batch, head, first, sizes=call.sizes, FEATURES=FEATURES)
        gl.atomic_add(counts + place, 1, sem="release")
        tiles += 1
        work = receive_tile(rings.messages, tiles, TILE=TILE, WARPS=1)


@triton.jit
def first_block_of(batch, head, padded_first, sizes, FEATURES: tl.constexpr):
    """Among the blocks of ROWS queries of all heads and sequences, the first one of a head of a
    sequence, which begins at that row where sequences are packed.
    """
    if FEATURES.PACKED:
        blocks = padded_row(sizes.seqlen_q, sizes.packed, ROWS) // ROWS
        return head * blocks + padded_first // ROWS
    else:
        return (batch * sizes.nheads + head) * tl.cdiv(sizes.seqlen_q, ROWS)


@triton.jit
def count_place(batch, head, padded_first, sizes, FEATURES: tl.constexpr):
    """The place of a head's count among the semaphores, two a block: one of the first, or that of
    a packed sequence's first block. Heads that share keys use that of the first of them.
    """
    if FEATURES.PACKED:
        return 2 * first_block_of(batch, head, padded_first, sizes=sizes, FEATURES=FEATURES)
    else:
        return batch * sizes.nheads + head


@triton.jit
def await_tiles(count, rows_k, BLOCK_N: tl.constexpr):
    """Waits until all tiles of so many keys have added to dQ."""
    tiles = tl.cdiv(rows_k, BLOCK_N)
    counted, looks = tl.atomic_add(count, 0, sem="acquire"), 0
    while (counted < tiles) & (looks < LOOKS):
        counted = tl.atomic_add(count, 0, sem="acquire")
        looks += 1
    if counted < tiles:
        cuda.gdc_wait()
