"""The backward for Hopper: one warp that loads, two warpgroups that compute.

A program stays on its SM and works through tiles of keys that a counter hands out. It holds a tile
and walks the queries that see it (`bwd_load`, `bwd_mma`). dK and dV stay in registers until the
tile is done. dQ belongs to the queries, of which every tile of keys knows only its part: the parts
meet in an fp32 accumulator in memory, by atomics that nothing waits for. FlashAttention-2 (arXiv
2307.08691), algorithm 2, laid out for Hopper as in FlashAttention-3 (arXiv 2407.08608).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .bwd_load import load_partition
from .bwd_mma import grad_partition
from .layouts import shared
from .pipeline import Ring, make_barriers, make_ring
from .work import WORDS, Call


class Inputs(NamedTuple):
    """What the load warp copies from."""

    q: tma.tensor_descriptor
    do: tma.tensor_descriptor
    k: tma.tensor_descriptor
    v: tma.tensor_descriptor
    stats: tma.tensor_descriptor  # -lse and -delta


class Outputs(NamedTuple):
    """Where gradients go, and the shared memory that dK and dV pass through: (2, 64, BLOCK_D)."""

    dq: gl.tensor  # the accumulator, in the order of registers
    turns: gl.tensor  # whose turn it is to add to a half block, where that is ordered
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor
    smem: gl.shared_memory_descriptor


class Keys(NamedTuple):
    """The tile of keys that a program holds: a ring of one slot."""

    k: gl.shared_memory_descriptor  # (1, BLOCK_N, BLOCK_D)
    v: gl.shared_memory_descriptor  # (1, BLOCK_N, BLOCK_DV)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Queries(NamedTuple):
    """A ring of blocks of queries, two slots: all that comes with one."""

    q: gl.shared_memory_descriptor  # (2, BLOCK_M, BLOCK_D)
    do: gl.shared_memory_descriptor  # (2, BLOCK_M, BLOCK_DV)
    minus_lse: gl.shared_memory_descriptor  # (2, 1, BLOCK_M)
    minus_delta: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Exchange(NamedTuple):
    """dS of both warpgroups, (3, BLOCK_N, BLOCK_M): each computes half of dQ from all of it.

    There is no `empty` barrier. A warpgroup writes turn i where turn i - 3 was, and before that
    waits for `full` of turn i - 1. So the other has written turn i - 1, and it does that only when
    it has finished the dQ of turn i - 3.
    """

    ds: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


class Rings(NamedTuple):
    """All that passes through shared memory between warps."""

    keys: Keys
    queries: Queries
    exchange: Exchange
    mail: Ring


@gluon.jit
def hopper_bwd_kernel(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    stats_desc,
    dq,
    turns,
    dk_desc,
    dv_desc,
    queue,
    optionals,
    sizes,
    numbers,
    FEATURES: gl.constexpr,
    TILE: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    M: gl.constexpr = TILE.BLOCK_M
    N: gl.constexpr = TILE.BLOCK_N
    D: gl.constexpr = TILE.BLOCK_D
    DV: gl.constexpr = TILE.BLOCK_DV
    k_smem = gl.allocate_shared_memory(dtype, [1, N, D], shared(N, D, dtype))
    v_smem = gl.allocate_shared_memory(dtype, [1, N, DV], shared(N, DV, dtype))
    full, empty = make_barriers(1, 1, 2)
    keys = Keys(k_smem, v_smem, full, empty)
    q_smem = gl.allocate_shared_memory(dtype, [2, M, D], shared(M, D, dtype))
    do_smem = gl.allocate_shared_memory(dtype, [2, M, DV], shared(M, DV, dtype))
    row: gl.constexpr = shared(1, M, gl.float32)
    lse_smem = gl.allocate_shared_memory(gl.float32, [2, 1, M], row)
    delta_smem = gl.allocate_shared_memory(gl.float32, [2, 1, M], row)
    full, empty = make_barriers(2, 1, 2)
    queries = Queries(q_smem, do_smem, lse_smem, delta_smem, full, empty)
    ds_smem = gl.allocate_shared_memory(dtype, [3, N, M], shared(N, M, dtype))
    ds_full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(ds_full.index(i), count=2)
    exchange = Exchange(ds_smem, ds_full)
    mail_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    mail = make_ring(gl.int32, [WORDS], mail_layout, 2, 1, 2)
    out_smem = gl.allocate_shared_memory(dtype, [2, 64, D], shared(64, D, dtype))
    fence_async_shared()  # barriers are made before a copy arrives at one

    inputs = Inputs(q_desc, do_desc, k_desc, v_desc, stats_desc)
    outputs = Outputs(dq, turns, dk_desc, dv_desc, out_smem)
    rings = Rings(keys, queries, exchange, mail)
    call = Call(queue, optionals, sizes, numbers)
    gl.warp_specialize(
        [
            (grad_partition, (0, rings, outputs, call, FEATURES, TILE)),
            (grad_partition, (1, rings, outputs, call, FEATURES, TILE)),
            (load_partition, (inputs, rings, call, FEATURES, TILE)),
        ],
        [4, 1],
        [240, 24],
    )
