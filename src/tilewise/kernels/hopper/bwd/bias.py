"""The bias of a block in the backward, by TMA.

In memory the keys of a query are neighbours; in S^T a thread has neighbouring queries of a key. So
the load warp copies the tile into shared memory, and matmul warpgroups read it transposed, by
`ldmatrix`: four instructions, where a load of each element took 300 with its addresses.

There is one tile, of the keys of both warpgroups, and no `empty` barrier: a warpgroup that arrives
at `full` of the score buffers with the dS of a block has read its bias.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ....tile.score import Score, score, score_without_bias
from ..bias import widened
from ..compat import tma_load
from ..layouts import accumulator, shared
from ..pipeline import make_barrier


class BiasTile(NamedTuple):
    """Shared memory for the bias of a block of queries: (2, BLOCK_M, 64), by warpgroup."""

    halves: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor


@gluon.jit
def make_bias(dtype: gl.constexpr, TILE: gl.constexpr):
    """Allocates the bias of a block, where TMA loads it."""
    if TILE.BIAS_COPIED:
        M: gl.constexpr = TILE.BLOCK_M
        halves = gl.allocate_shared_memory(dtype, [2, M, 64], shared(M, 64, dtype=dtype))
        return BiasTile(halves, make_barrier(1, 1))
    else:
        return 0


@gluon.jit
def copy_bias(desc, rings, step, work, block, modifiers, TILE: gl.constexpr):
    """Loads the bias of a step's block, once both warpgroups have read the previous one."""
    if TILE.BIAS_COPIED:
        previous = step + 2  # the step before is in stage (step - 1) % 3
        last = gl.maximum(step - 1, 0)
        tile = rings.bias
        mbarrier.wait(rings.score_buffers.full.index(previous % 3), (last // 3) & 1, pred=step > 0)
        full = tile.full.index(0)
        mbarrier.expect(full, 2 * desc.block_type.nbytes)
        # A dimension that the bias does not have is one element long
        batch = gl.where(modifiers.bias.batch == 0, 0, work.batch)
        head = gl.where(modifiers.bias.head == 0, 0, block.head)
        shape: gl.constexpr = desc.block_type.shape
        for i in gl.static_range(2):
            coordinates = [batch, head, block.m_block * TILE.BLOCK_M, work.start + 64 * i]
            tma_load(desc, coordinates, full, tile.halves.index(i).reshape(shape))


@gluon.jit
def read_bias(tile, WG: gl.constexpr, step, TILE: gl.constexpr):
    """The bias of the warpgroup's keys in a step, where it was copied: (64, BLOCK_M)."""
    if TILE.BIAS_COPIED:
        mbarrier.wait(tile.full.index(0), step & 1)
        return tile.halves.index(WG).permute((1, 0)).load(accumulator(TILE.BLOCK_M))
    else:
        return 0


@gluon.jit
def score_with(qk, bias, q_idx, k_idx, seq, FEATURES: gl.constexpr, TILE: gl.constexpr):
    """Scores of a tile; its bias is given where it was copied."""
    if TILE.BIAS_COPIED:
        scored = score_without_bias(qk, q_idx, k_idx=k_idx, seq=seq, FEATURES=FEATURES)
        return Score(scored.s + widened(bias), scored.derivative)
    else:
        return score(qk, q_idx, k_idx=k_idx, seq=seq, FEATURES=FEATURES)
