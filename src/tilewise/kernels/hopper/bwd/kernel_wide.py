"""The backward for Hopper where head dims are wider than 128: 64 keys a program.

The parts are those of kernel.py; what the two warpgroups share out between them is in mma_wide.py.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..layouts import shared
from ..pipeline import make_barrier
from ..work import Call
from .load import load_partition
from .mma_wide import key_partition, value_partition
from .ordered_add import ask_partition, make_turns, pass_partition
from .rings import Inputs, Rings, make_keys, make_mail, make_queries


class Outputs(NamedTuple):
    """What the matmul warpgroups write to. dK and dV pass through the shared memory of K and V."""

    dq: gl.tensor  # the accumulator, in the order of registers
    dk: tma.tensor_descriptor
    dv: tma.tensor_descriptor


class Gradients(NamedTuple):
    """dS^T of two blocks, (2, BLOCK_N, BLOCK_M)."""

    slots: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


class Exchange(NamedTuple):
    """What one warpgroup makes and the other needs. There is no `empty` barrier:

    P of a block is written after `full` of dS of the block before, which was made from the P there.
    dS of a block is made after its P is there, and that is written by who has finished dQ of the
    block two before, the last reader of this slot.
    """

    p: gl.shared_memory_descriptor  # (BLOCK_N * BLOCK_M,), fp32, in the order of registers
    p_full: gl.shared_memory_descriptor
    ds: Gradients
    done: gl.shared_memory_descriptor  # both have read K and V of a tile for the last time


@gluon.jit
def hopper_bwd_wide_kernel(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    stats_desc,
    dq,
    counters,
    dk_desc,
    dv_desc,
    bias_desc,
    dbias_desc,
    further,
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
    keys = make_keys(dtype, TILE)
    queries = make_queries(dtype, TILE)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    p_smem = gl.allocate_shared_memory(gl.float32, [N * M], flat)
    p_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(p_full, count=1)
    ds_smem = gl.allocate_shared_memory(dtype, [2, N, M], shared(N, M, dtype))
    ds_full = make_barrier(2, 1)
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(done, count=2)
    exchange = Exchange(p_smem, p_full, Gradients(ds_smem, ds_full), done)
    mail = make_mail(TILE)
    turns = make_turns(TILE)
    fence_async_shared()  # barriers are made before a copy arrives at one

    inputs = Inputs(q_desc, do_desc, k_desc, v_desc, stats_desc, bias_desc, further)
    outputs = Outputs(dq, dk_desc, dv_desc)
    rings = Rings(keys, queries, exchange, mail, turns)
    call = Call(queue, optionals, sizes, numbers)
    if TILE.ORDERED:
        gl.warp_specialize(
            [
                (value_partition, (rings, outputs, call, FEATURES, TILE)),
                (key_partition, (rings, outputs, call, FEATURES, TILE)),
                (load_partition, (inputs, rings, call, FEATURES, TILE)),
                (ask_partition, (rings, counters, call, FEATURES, TILE)),
                (pass_partition, (rings, counters, call, FEATURES, TILE)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (value_partition, (rings, outputs, call, FEATURES, TILE)),
                (key_partition, (rings, outputs, call, FEATURES, TILE)),
                (load_partition, (inputs, rings, call, FEATURES, TILE)),
            ],
            [4, 1],
            [240, 24],
        )
