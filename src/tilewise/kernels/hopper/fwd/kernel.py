"""The forward for Hopper, warp-specialized: a producer warp loads, consumer warpgroups compute.

The kernel is persistent: a program processes tiles that a counter hands out. One warp issues TMA
loads (`load`), and WARPGROUPS warpgroups each compute 64 queries (`mma`): they share the tiles of K
and V in the pipeline. FlashAttention-3 (arXiv 2407.08608), algorithm 1.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...common.lengths import for_all_lengths
from ..bias import make_biases
from ..layouts import column_groups, shared
from ..pieces import TMA_UNIT
from ..pipeline import KVRing, Ring, make_kv_ring, make_ring
from ..work import KernelCall
from .epilogue import Output, make_handovers, out_columns
from .load import Sources, load_partition
from .mma import attend_partition
from .store import store_partition
from .varlen import make_tile_messages

# Integers that say nothing of how addresses are aligned
LENGTHS = "queue.tiles", "queue.heads", "sizes", "numbers", "heads_per_batch", "optionals.parts"
LENGTHS += "optionals.pages.stride", "optionals.pages.num_pages"


class Rings(NamedTuple):
    """All pipelines from the load warp to the matmul warpgroups."""

    q: tuple  # a ring for each warpgroup: (64, BLOCK_D)
    kv_ring: KVRing  # tiles of K and V
    messages: Ring  # work-tile messages
    bias: tuple = 0  # a ring for each warpgroup, where it is copied: (64, BLOCK_N)


@for_all_lengths(LENGTHS)
@gluon.jit(do_not_specialize=["lse"])
def hopper_fwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    lse,
    queue,
    optionals,
    sizes,
    numbers,
    heads_per_batch,
    v_step,
    bias_desc,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    M: gl.constexpr = 64
    N: gl.constexpr = TILE.BLOCK_N
    D: gl.constexpr = TILE.BLOCK_D // column_groups(TILE.BLOCK_D)
    DV: gl.constexpr = TILE.BLOCK_DV
    WARPGROUPS: gl.constexpr = TILE.WARPGROUPS
    GROUPS: gl.constexpr = column_groups(TILE.BLOCK_D)
    THREADS: gl.constexpr = WARPGROUPS * 128  # see `release_by_threads`
    kv_ring = make_kv_ring(dtype, [N, D], [N, DV], TILE.STAGES, THREADS, GROUPS)
    BY_TMA: gl.constexpr = FEATURES.HEADDIM_V % TMA_UNIT == 0  # O goes out
    messages = make_tile_messages(WARPGROUPS if BY_TMA else WARPGROUPS + 1, FEATURES)
    q_layout: gl.constexpr = shared(M, D, dtype=dtype)
    q_0 = make_ring(dtype, [M, D], q_layout, TILE.Q_STAGES, 1, 128, 0, GROUPS)
    q_1 = make_ring(dtype, [M, D], q_layout, TILE.Q_STAGES, 1, 128, 0, GROUPS)
    OUT: gl.constexpr = out_columns(TILE.BLOCK_D, DV)
    out_smem = gl.allocate_shared_memory(dtype, [WARPGROUPS, M, OUT], shared(M, OUT, dtype=dtype))
    q_2 = make_ring(dtype, [M, D], q_layout, TILE.Q_STAGES, 1, 128) if WARPGROUPS == 3 else q_1
    bias = make_biases(dtype, TILE)
    out_full, out_empty = make_handovers(WARPGROUPS, FEATURES)
    fence_async_shared()  # barriers are made before a copy arrives at one

    # setmaxnreg takes multiples of 8, of the registers that the program began with, 168 of each
    # thread or, of four warpgroups, 128: a load warp needs few
    output = Output(out_desc, out_smem, lse=lse, full=out_full, empty=out_empty)
    call = KernelCall(queue, optionals, sizes=sizes, numbers=numbers)
    table = 0 if optionals.pages is None else optionals.pages
    sources = Sources(q_desc, k_desc, v_desc, bias_desc, heads_per_batch, v_step, 0, table)
    if WARPGROUPS == 2:
        rings = Rings((q_0, q_1), kv_ring, messages=messages, bias=bias)
    else:
        rings = Rings((q_0, q_1, q_2), kv_ring, messages=messages)
    # Of packed chunks, and of parts, the load warp finds tiles and pages: with 40, 46 spills in its
    # loop
    FINDS: gl.constexpr = 72 if FEATURES.CHUNK > 0 else 56 if optionals.parts is not None else 40
    LOAD: gl.constexpr = FINDS if TILE.PAGE > 0 else 40
    ATTEND: gl.constexpr = 252 - LOAD // 2
    if WARPGROUPS == 2 and BY_TMA:
        gl.warp_specialize(
            [
                (attend_partition, (0, rings, output, call, FEATURES, TILE)),
                (attend_partition, (1, rings, output, call, FEATURES, TILE)),
                (load_partition, (sources, rings, call, FEATURES, TILE)),
            ],
            [4, 1],
            [ATTEND, LOAD],
        )
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (attend_partition, (0, rings, output, call, FEATURES, TILE)),
                (attend_partition, (1, rings, output, call, FEATURES, TILE)),
                (load_partition, (sources, rings, call, FEATURES, TILE)),
                (store_partition, (rings, output, call, v_step, FEATURES, TILE)),
            ],
            [4, 1, 2],
            [232, 40, 40],
        )
    elif BY_TMA:
        gl.warp_specialize(
            [
                (attend_partition, (0, rings, output, call, FEATURES, TILE)),
                (attend_partition, (1, rings, output, call, FEATURES, TILE)),
                (attend_partition, (2, rings, output, call, FEATURES, TILE)),
                (load_partition, (sources, rings, call, FEATURES, TILE)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
    else:
        gl.warp_specialize(
            [
                (attend_partition, (0, rings, output, call, FEATURES, TILE)),
                (attend_partition, (1, rings, output, call, FEATURES, TILE)),
                (attend_partition, (2, rings, output, call, FEATURES, TILE)),
                (load_partition, (sources, rings, call, FEATURES, TILE)),
                (store_partition, (rings, output, call, v_step, FEATURES, TILE)),
            ],
            [4, 4, 1, 2],
            [160, 160, 32, 32],
        )
