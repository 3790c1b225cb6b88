"""The shared-memory dS buffer: each matmul warpgroup writes the dS of its keys, and reads all of dS
for its half of dQ.

Where dS is the gradient of a bias it lies as the bias does, the keys of a query as neighbours, in
halves of 64 keys, and TMA writes it to memory from there.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma

from ..compat import tma_store
from ..layouts import accumulator, shared, wider_half
from ..pipeline import make_barrier


class ScoreBuffers(NamedTuple):
    """dS of both warpgroups, of three blocks (see `make_scores`): each computes half of dQ from all
    of it.

    There is no `empty` barrier. A warpgroup writes block i where block i - 3 was, and before that
    waits for `full` of block i - 1. So the other has written block i - 1, and it does that only
    when it has finished the dQ of block i - 3.
    """

    ds: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


@gluon.jit
def make_score_buffers(dtype: gl.constexpr, TILE: gl.constexpr):
    """Allocates dS of three blocks."""
    return ScoreBuffers(make_scores(dtype, TILE), make_barrier(3, 2))


@gluon.jit
def make_scores(dtype: gl.constexpr, TILE: gl.constexpr):
    """Allocates three blocks: (3, BLOCK_N, BLOCK_M) of dS^T, or (6, BLOCK_M, 64) of dS."""
    M: gl.constexpr = TILE.BLOCK_M
    N: gl.constexpr = TILE.BLOCK_N
    if TILE.BIAS_GRAD:
        return gl.allocate_shared_memory(dtype, [6, M, 64], shared(M, 64, dtype=dtype))
    else:
        # Halves of blocks, of headdim 192, are buffers of their own
        COLUMNS: gl.constexpr = 32 if TILE.BLOCK_D == 192 else M
        return gl.allocate_shared_memory(dtype, [3, N, M], shared(N, COLUMNS, dtype=dtype))


@gluon.jit
def share_scores(buffers, stage, WG: gl.constexpr, ds, TILE: gl.constexpr):
    """Stores dS^T of the warpgroup's keys: (64, BLOCK_M)."""
    if TILE.BIAS_GRAD:
        buffers.index(2 * stage + WG).permute((1, 0)).store(ds)
    else:
        buffers.index(stage).slice(WG * 64, 64, 0).store(ds)


@gluon.jit
def write_scores(desc, buffers, stage, WG: gl.constexpr, work, block, TILE: gl.constexpr):
    """Writes what `share_scores` stored, where it is the gradient of a bias. The stage is stored to
    again three blocks later: so all copies but the last two must have read theirs.
    """
    if TILE.BIAS_GRAD:
        shape: gl.constexpr = desc.block_type.shape
        coordinates = [work.batch, block.head, block.m_block * TILE.BLOCK_M, work.start + WG * 64]
        tma_store(desc, coordinates, buffers.index(2 * stage + WG).reshape(shape))
        tma.store_wait(2)


@gluon.jit
def multiply_scores(buffers, stage, k, COLUMNS: gl.constexpr, WG: gl.constexpr, TILE: gl.constexpr):
    """Starts dQ = dS K: half of the rows of a tall block, half of the columns of a flat one, or 64
    and 32 of 96.
    """
    HALF: gl.constexpr = wider_half(COLUMNS)
    if TILE.BLOCK_M == 128:
        left = buffers.index(stage).slice(WG * 64, 64, 1).permute((1, 0))
        right = k if COLUMNS == TILE.BLOCK_D else k.slice(0, COLUMNS, 1)
        return warpgroup_mma(left, right, no_sums(COLUMNS), use_acc=False, is_async=True)
    else:
        WIDTH: gl.constexpr = COLUMNS - HALF if WG == 1 else HALF
        right = k.slice(WG * HALF, WIDTH, 1)
        nothing = no_sums(WIDTH)
        if TILE.BIAS_GRAD:
            left, keys = buffers.index(2 * stage), right.slice(0, 64, 0)
            first = warpgroup_mma(left, keys, nothing, use_acc=False, is_async=True)
            left, keys = buffers.index(2 * stage + 1), right.slice(64, 64, 0)
            return warpgroup_mma(left, keys, first, is_async=True)
        else:
            left = buffers.index(stage).permute((1, 0))
            return warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)


@gluon.jit
def no_sums(COLUMNS: gl.constexpr):
    """(64, COLUMNS) zeros."""
    return gl.zeros([64, COLUMNS], gl.float32, accumulator(COLUMNS))
