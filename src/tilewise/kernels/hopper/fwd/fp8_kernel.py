"""The forward for Hopper in FP8: the same load warp, tiles and epilogue as in 16 bits.

K and V^T of a block are half as large, so that the ring holds twice as many of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..layouts import shared
from ..pipeline import make_kv_ring, make_ring
from ..work import KernelCall
from .epilogue import OUT_COLUMNS, Output
from .fp8_halves import attend_in_halves
from .fp8_mma import MOST_DRIFT, attend_partition, has_two_levels, make_pingpong, takes_turns
from .kernel import Rings
from .load import Sources, load_partition
from .transpose import make_values, transpose_partition
from .varlen import make_tile_messages


@gluon.jit(do_not_specialize=["lse"])
def hopper_fp8_fwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    values_desc,
    lse,
    scales,
    queue,
    optionals,
    sizes,
    numbers,
    transposing,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    out_dtype: gl.constexpr = out_desc.dtype
    M: gl.constexpr = 64
    N: gl.constexpr = TILE.BLOCK_N
    D: gl.constexpr = TILE.BLOCK_D
    DV: gl.constexpr = TILE.BLOCK_DV
    THREADS: gl.constexpr = 2 * 128  # see `release_by_threads`
    kv_ring = make_kv_ring(dtype, [N, D], [DV, N], TILE.STAGES, THREADS)
    messages = make_tile_messages(2, FEATURES)
    pingpong = make_pingpong() if takes_turns(DV) else 0
    q_layout: gl.constexpr = shared(M, D, dtype=dtype)
    q_0 = make_ring(dtype, [M, D], q_layout, TILE.Q_STAGES, 1, 128)
    q_1 = make_ring(dtype, [M, D], q_layout, TILE.Q_STAGES, 1, 128)
    OUT: gl.constexpr = min(DV, OUT_COLUMNS)
    out_smem = gl.allocate_shared_memory(out_dtype, [2, M, OUT], shared(M, OUT, dtype=out_dtype))
    if TILE.TRANSPOSES:
        values = make_values(DV)
    fence_async_shared()  # barriers are made before a copy arrives at one

    output = Output(out_desc, out_smem, lse=lse, full=0, empty=0)
    call = KernelCall(queue, optionals, sizes=sizes, numbers=numbers)
    sources = Sources(q_desc, k_desc, v_desc, None, (0, 0), 0, transposing)
    rings = Rings((q_0, q_1), kv_ring, messages=messages)
    # setmaxnreg takes multiples of 8, of the registers that the program began with, 168 of each
    # thread: a load warp needs few
    if TILE.TRANSPOSES:
        gl.warp_specialize(
            [
                (attend_partition, (0, rings, pingpong, output, scales, call, FEATURES, TILE)),
                (attend_partition, (1, rings, pingpong, output, scales, call, FEATURES, TILE)),
                (load_partition, (sources, rings, call, FEATURES, TILE)),
                (transpose_partition, (values_desc, values, transposing, call, FEATURES)),
            ],
            [4, 1, 2],
            [232, 40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (attend, (0, rings, pingpong, output, scales, call, FEATURES, TILE)),
                (attend, (1, rings, pingpong, output, scales, call, FEATURES, TILE)),
                (load_partition, (sources, rings, call, FEATURES, TILE)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def attend(
    WG: gl.constexpr,
    rings,
    pingpong,
    output,
    scales,
    call,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    """Attends in one level where O is wide and stays small, or in two: see `fp8_mma`."""
    if has_two_levels(TILE.BLOCK_DV):
        attend_partition(WG, rings, pingpong, output, scales, call, FEATURES, TILE)
    elif scales.v_mean is None or scales.v_drift is None:
        attend_in_halves(WG, rings, output, scales, call, FEATURES, TILE)
    elif gl.load(scales.v_drift) <= MOST_DRIFT:  # not of NaN
        attend_partition(WG, rings, pingpong, output, scales, call, FEATURES, TILE)
    else:
        attend_in_halves(WG, rings, output, scales, call, FEATURES, TILE)
