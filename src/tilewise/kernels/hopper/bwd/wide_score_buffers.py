"""Shared memory between the two matmul warpgroups of wide heads (mma_wide.py): P and dS."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..layouts import shared
from ..pipeline import make_barrier


class WideScoreBuffers(NamedTuple):
    """Buffers that one warpgroup writes and the other reads.

    There is no `empty` barrier. P of a block is written after `full` of dS of the block before,
    which was made from the P there. dS of a block is made after its P is there, which is written by
    the warpgroup that has finished dQ of the block two before, the last read of this stage.
    """

    p: gl.shared_memory_descriptor  # (BLOCK_N * BLOCK_M,), fp32, in the order of registers
    p_full: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor  # dS^T of two blocks, (2, BLOCK_N, BLOCK_M)
    full: gl.shared_memory_descriptor  # of dS
    done: gl.shared_memory_descriptor  # both have read K and V of a tile for the last time


@gluon.jit
def make_wide_score_buffers(dtype: gl.constexpr, TILE: gl.constexpr):
    """Allocates P of one block and dS of two."""
    M: gl.constexpr = TILE.BLOCK_M
    N: gl.constexpr = TILE.BLOCK_N
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    p_smem = gl.allocate_shared_memory(gl.float32, [N * M], flat)
    p_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(p_full, count=1)
    ds_smem = gl.allocate_shared_memory(dtype, [2, N, M], shared(N, M, dtype=dtype))
    full = make_barrier(2, 1)
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(done, count=2)
    return WideScoreBuffers(p_smem, p_full, ds=ds_smem, full=full, done=done)
