"""The backward for Hopper: one warp that loads, two warpgroups that compute.

The kernel is persistent: a program processes tiles of keys that a counter hands out. It keeps a
tile of K and V and loops over the queries that attend to it (`load`; `mma`, or `mma_wide` where a
head dim is above 128). dK and dV stay in registers until the tile is done. Every tile of keys has
only a part of dQ: the parts are added to an fp32 accumulator in memory, by atomics without a wait.
Headdim 256 may leave dQ to another kernel (`mma_dq`).
FlashAttention-2 (arXiv 2307.08691), algorithm 2, laid out for Hopper as in FlashAttention-3 (arXiv
2407.08608).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ..dependents import start_dependents
from ..layouts import column_groups, shared
from ..pipeline import make_kv_ring
from ..work import KernelCall
from .bias import make_bias
from .load import load_partition
from .mma import grad_partition
from .mma_192 import grad_partition_192
from .mma_wide import key_partition, value_partition
from .ordered_add import make_add_barriers, order_partition
from .rings import Rings, Sources, make_queries, make_tile_messages
from .score_buffers import make_score_buffers
from .tile_counts import count_partition
from .wide_score_buffers import make_wide_score_buffers


class Outputs(NamedTuple):
    """The outputs of the matmul warpgroups."""

    dq: gl.tensor  # the accumulator, in the order of registers
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor
    dbias: tma.tensor_descriptor  # where dS is the gradient of a bias, else None
    smem: gl.shared_memory_descriptor  # staging buffer of dK and dV: (2, 64, columns)


@gluon.jit
def hopper_bwd_kernel(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    stats_desc,
    dq,
    dq_semaphore,
    dk_desc,
    dv_desc,
    bias_desc,
    dbias_desc,
    heads_per_batch,
    queue,
    optionals,
    sizes,
    numbers,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    if TILE.HAS_DQ and not TILE.ORDERED:
        start_dependents()  # dQ's conversion, on SMs that are free
    dtype: gl.constexpr = q_desc.dtype
    N: gl.constexpr = TILE.BLOCK_N
    D: gl.constexpr = TILE.BLOCK_D
    DV: gl.constexpr = TILE.BLOCK_DV
    GROUPS: gl.constexpr = column_groups(D)
    keys = make_kv_ring(dtype, [N, D // GROUPS], [N, DV], STAGES=1, CONSUMERS=2, GROUPS=GROUPS)
    queries = make_queries(dtype, TILE)
    if TILE.BLOCK_N == 128:
        score_buffers = make_score_buffers(dtype, TILE)
    else:
        score_buffers = make_wide_score_buffers(dtype, TILE)
    messages = make_tile_messages(TILE)
    add_barriers = make_add_barriers(TILE)
    bias = make_bias(dtype, TILE)
    out_smem = make_out(dk_desc.dtype, TILE)
    fence_async_shared()  # barriers are made before a copy arrives at one

    inputs = Sources(q_desc, do_desc, k_desc, v_desc, stats_desc, bias_desc, heads_per_batch)
    outputs = Outputs(dq, dk_desc, dv=dv_desc, dbias=dbias_desc, smem=out_smem)
    rings = Rings(keys, queries, score_buffers, messages, add_barriers, bias)
    call = KernelCall(queue, optionals, sizes=sizes, numbers=numbers)
    if not TILE.HAS_DQ:
        gl.warp_specialize(
            [
                (matmul_partition, (0, rings, outputs, call, FEATURES, TILE)),
                (matmul_partition, (1, rings, outputs, call, FEATURES, TILE)),
                (load_partition, (inputs, rings, call, FEATURES, TILE)),
            ],
            [4, 1],
            [240, 24],
        )
    elif TILE.ORDERED:
        gl.warp_specialize(
            [
                (matmul_partition, (0, rings, outputs, call, FEATURES, TILE)),
                (matmul_partition, (1, rings, outputs, call, FEATURES, TILE)),
                (load_partition, (inputs, rings, call, FEATURES, TILE)),
                (order_partition, (rings, dq_semaphore, call, False, FEATURES, TILE)),
                (order_partition, (rings, dq_semaphore, call, True, FEATURES, TILE)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (matmul_partition, (0, rings, outputs, call, FEATURES, TILE)),
                (matmul_partition, (1, rings, outputs, call, FEATURES, TILE)),
                (load_partition, (inputs, rings, call, FEATURES, TILE)),
                (count_partition, (rings, dq_semaphore, call, FEATURES, TILE)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )


@gluon.jit
def matmul_partition(
    WG: gl.constexpr, rings, outputs, call, FEATURES: gl.constexpr, TILE: gl.constexpr
):
    """A warpgroup: one with half of the keys, or with half of the work on all of them."""
    if TILE.BLOCK_D == 192:
        grad_partition_192(WG, rings, outputs=outputs, call=call, FEATURES=FEATURES, TILE=TILE)
    elif TILE.BLOCK_N == 128:
        grad_partition(WG, rings, outputs=outputs, call=call, FEATURES=FEATURES, TILE=TILE)
    elif WG == 0:
        value_partition(rings, outputs, call=call, FEATURES=FEATURES, TILE=TILE)
    else:
        key_partition(rings, outputs, call=call, FEATURES=FEATURES, TILE=TILE)


@gluon.jit
def make_out(dtype: gl.constexpr, TILE: gl.constexpr):
    """Allocates the staging buffer of dK and dV, in fp32 of half of their columns. Wide heads use
    the shared memory of K and V.
    """
    if TILE.BLOCK_N == 128:
        WIDTH: gl.constexpr = TILE.BLOCK_D // column_groups(TILE.BLOCK_D)
        D: gl.constexpr = WIDTH // 2 if dtype == gl.float32 else WIDTH
        return gl.allocate_shared_memory(dtype, [2, 64, D], shared(64, D, dtype=dtype))
    else:
        return 0
