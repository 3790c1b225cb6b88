"""Decoding for Hopper in one launch: warps that only load, a warpgroup that only computes.

Programs stay on their SMs. A counter hands out parts of tiles, then slices of folds; which sequence
a number lies in, each load warp finds from the lengths on the device (`tile.split_schedule`). So
the host plans nothing, and one captured graph serves any lengths.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ....tile.split_schedule import SplitCall
from ..layouts import shared
from ..pipeline import Ring, make_ring
from .attend import attend_partition
from .copy import THREADS, copy_partition
from .load import Sources, load_partition
from .queries import query_partition
from .work import make_work_messages


class Rings(NamedTuple):
    """What passes through shared memory from the load warp to the warpgroup."""

    q: Ring  # (64, BLOCK_D)
    k: Ring  # (1, 1, BLOCK_N, BLOCK_D)
    v: Ring  # (1, 1, BLOCK_N, BLOCK_DV)
    messages: Ring  # what to work on


@gluon.jit
def hopper_decode_kernel(
    q,
    k,
    v,
    table,
    output,
    counters,
    optionals,
    sizes,
    numbers,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    dtype: gl.constexpr = q.ptr.dtype.element_ty
    N: gl.constexpr = TILE.BLOCK_N
    D: gl.constexpr = TILE.BLOCK_D
    DV: gl.constexpr = TILE.BLOCK_DV
    # (1, 1, keys, columns), as TMA has it: parts of a slot are copied, and cannot be reshaped
    k_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, N, D], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, N, DV], dtype)
    COPIES: gl.constexpr = 1 if TILE.BY_TMA else THREADS
    k_ring = make_ring(dtype, [1, 1, N, D], k_layout, TILE.STAGES, COPIES, 128)
    v_ring = make_ring(dtype, [1, 1, N, DV], v_layout, TILE.STAGES, COPIES, 128)
    queries = make_ring(dtype, [64, D], shared(64, D, dtype), TILE.Q_STAGES, 1, 128)
    rings = Rings(queries, k_ring, v_ring, make_work_messages(2 if TILE.BY_TMA else 3))
    state_smem = 0
    if TILE.STATE_IN_SHARED:
        layout: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
        state_smem = gl.allocate_shared_memory(gl.float32, [64, DV], layout)
    fence_async_shared()  # barriers are made before a copy arrives at one
    # Made here: of numbers that are 1, Triton (3.6) forgets the values in tuples of tuples
    call = SplitCall(optionals, sizes, numbers)
    sources = Sources(k, v, table)
    if TILE.BY_TMA:
        gl.warp_specialize(
            [
                (attend_partition, (rings, state_smem, output, counters, call, FEATURES, TILE)),
                (load_partition, (sources, rings, counters, call, FEATURES, TILE)),
                (query_partition, (rings, q, FEATURES, TILE)),
            ],
            [1, 1],
            [56, 56],
        )
    else:
        gl.warp_specialize(
            [
                (attend_partition, (rings, state_smem, output, counters, call, FEATURES, TILE)),
                (load_partition, (sources, rings, counters, call, FEATURES, TILE)),
                (query_partition, (rings, q, FEATURES, TILE)),
                (copy_partition, (sources, rings, call, FEATURES, TILE)),
            ],
            [1, 1, 4],
            [56, 56, 96],
        )
