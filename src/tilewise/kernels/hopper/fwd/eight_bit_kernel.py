"""The forward for Hopper over a KV cache of 8 bits: the same load warp, matmuls and epilogue as in
16 bits, with four warps between load and matmuls that convert tiles of K and V (convert.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...common.lengths import for_all_lengths
from ..decode.scales import have_scales, room_for_scales
from ..layouts import shared
from ..pipeline import KVRing, make_kv_ring, make_ring
from ..work import KernelCall
from .convert import convert_partition
from .epilogue import Output
from .kernel import LENGTHS, Rings
from .load import Sources, load_partition
from .mma import attend_partition
from .varlen import make_tile_messages

OUT_COLUMNS = gl.constexpr(64)  # of O that pass through shared memory at a time


@for_all_lengths(LENGTHS)
@gluon.jit(do_not_specialize=["lse"])
def hopper_eight_bit_fwd_kernel(
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
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    M: gl.constexpr = 64
    N: gl.constexpr = TILE.BLOCK_N
    D: gl.constexpr = TILE.BLOCK_D
    OUT: gl.constexpr = OUT_COLUMNS
    staged = make_ring(gl.int8, [N, D], shared(N, D, dtype=gl.int8), TILE.STAGED, 1, 1)
    scales = optionals.scales
    # The convert warps' threads arrive, too, when scales that they copy have landed
    FULL: gl.constexpr = 1 + 128 * have_scales(scales.k_row, scales.v_row)
    THREADS: gl.constexpr = 2 * 128  # see `release_by_threads`
    kv_ring = make_kv_ring(dtype, [N, D], [N, D], TILE.STAGES, THREADS, 1, FULL)
    k_scales = room_for_scales(scales.k_row, TILE.STAGES, N)
    v_scales = room_for_scales(scales.v_row, TILE.STAGES, N)
    kv_ring = KVRing(
        kv_ring.k, kv_ring.v, kv_ring.full, kv_ring.empty, k_scales=k_scales, v_scales=v_scales
    )
    messages = make_tile_messages(3, FEATURES)
    q_layout: gl.constexpr = shared(M, D, dtype=dtype)
    q_0 = make_ring(dtype, [M, D], q_layout, TILE.Q_STAGES, 1, 128)
    q_1 = make_ring(dtype, [M, D], q_layout, TILE.Q_STAGES, 1, 128)
    out_smem = gl.allocate_shared_memory(dtype, [2, M, OUT], shared(M, OUT, dtype=dtype))
    fence_async_shared()  # barriers are made before a copy arrives at one

    output = Output(out_desc, out_smem, lse=lse, full=0, empty=0)
    call = KernelCall(queue, optionals, sizes=sizes, numbers=numbers)
    table = 0 if optionals.pages is None else optionals.pages
    sources = Sources(q_desc, k_desc, v_desc, None, heads_per_batch, 0, 0, table)
    rings = Rings((q_0, q_1), kv_ring, messages=messages)
    to_staged = Rings((q_0, q_1), staged, messages=messages)
    # setmaxnreg takes multiples of 8, of the registers that the program began with, 128 of each
    # thread
    gl.warp_specialize(
        [
            (attend_partition, (0, rings, output, call, FEATURES, TILE)),
            (attend_partition, (1, rings, output, call, FEATURES, TILE)),
            (convert_partition, (staged, rings, call, FEATURES, TILE)),
            (load_partition, (sources, to_staged, call, FEATURES, TILE)),
        ],
        [4, 4, 1],
        [208, 56, 40],
    )
