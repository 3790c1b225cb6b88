"""Pipelines: rings of buffers in shared memory with full and empty mbarriers.

A stage of a ring has two mbarriers: `full`, which the bytes of a copy complete, and `empty`, which
its consumers complete. Both flip a phase bit each time, and a wait names the phase that must be
over: the producer waits for the previous phase of `empty`, and `phase ^ 1` passes at once on a
fresh barrier; a consumer waits for this phase of `full`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .compat import tma_load
from .layouts import shared


class Ring(NamedTuple):
    """Buffers in shared memory, one a stage, and a barrier of each kind for each of them."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class KVRing(NamedTuple):
    """The pipeline of K and V. One pair of barriers serves both tiles, which are waited for and
    released at the same time: in the forward K of a block, and V of the previous block, whose
    probabilities are computed by then.
    """

    k: gl.shared_memory_descriptor  # (STAGES, BLOCK_N, BLOCK_D), or groups of its columns
    v: gl.shared_memory_descriptor  # (STAGES, BLOCK_N, BLOCK_DV)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    k_scales: tuple = 0  # (STAGES, BLOCK_N) of a block, where each row of 8 bits has its own
    v_scales: tuple = 0  # of the same block, whose V has the next stage


class PipelineState(NamedTuple):
    """A stage of a ring, and the phase of its barriers."""

    stage: gl.tensor
    phase: gl.tensor


@gluon.jit
def make_ring(
    dtype: gl.constexpr,
    shape: gl.constexpr,
    layout: gl.constexpr,
    STAGES: gl.constexpr,
    PRODUCERS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    MORE: gl.constexpr = 0,
    GROUPS: gl.constexpr = 1,
):
    """A ring whose stages are full after PRODUCERS arrivals and empty after CONSUMERS; behind their
    `full` barriers are MORE for other uses. A stage has GROUPS buffers (`layouts.column_groups`).
    """
    buffers = gl.allocate_shared_memory(dtype, [STAGES * GROUPS] + shape, layout)
    full = make_barrier(STAGES + MORE, PRODUCERS)
    return Ring(buffers, full, empty=make_barrier(STAGES, CONSUMERS))


@gluon.jit
def make_kv_ring(
    dtype: gl.constexpr,
    K_SHAPE: gl.constexpr,
    V_SHAPE: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    GROUPS: gl.constexpr = 1,
    PRODUCERS: gl.constexpr = 1,
):
    """A ring of tiles of K and V, that of K in GROUPS buffers a stage."""
    k_layout: gl.constexpr = shared(K_SHAPE[0], K_SHAPE[1], dtype=dtype)
    v_layout: gl.constexpr = shared(V_SHAPE[0], V_SHAPE[1], dtype=dtype)
    k = gl.allocate_shared_memory(dtype, [STAGES * GROUPS] + K_SHAPE, k_layout)
    v = gl.allocate_shared_memory(dtype, [STAGES] + V_SHAPE, v_layout)
    full = make_barrier(STAGES, PRODUCERS)
    return KVRing(k, v, full=full, empty=make_barrier(STAGES, CONSUMERS))


@gluon.jit
def allocate_ring(
    dtype: gl.constexpr,
    shape: gl.constexpr,
    layout: gl.constexpr,
    STAGES: gl.constexpr,
    MORE: gl.constexpr = 0,
):
    """`make_ring` without its barriers' first state, which `init_ring` gives them."""
    buffers = gl.allocate_shared_memory(dtype, [STAGES] + shape, layout)
    return Ring(buffers, allocate_barrier(STAGES + MORE), allocate_barrier(STAGES))


@gluon.jit
def init_ring(ring, PRODUCERS: gl.constexpr, CONSUMERS: gl.constexpr):
    """The first state of a ring's barriers; a barrier of all warps stands between any two."""
    init_barrier(ring.full, PRODUCERS)
    init_barrier(ring.empty, CONSUMERS)


@gluon.jit
def make_barrier(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """A barrier for each stage. Only what is used may be made: the compiler would give the memory
    of an idle barrier to other data, and a GPU that turns to another process and back writes an
    mbarrier's first state over it.
    """
    barriers = allocate_barrier(STAGES)
    init_barrier(barriers, ARRIVALS)
    return barriers


@gluon.jit
def allocate_barrier(STAGES: gl.constexpr):
    """Memory of a barrier for each stage."""
    return gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())


@gluon.jit
def init_barrier(barriers, ARRIVALS: gl.constexpr):
    """Their first state."""
    STAGES: gl.constexpr = barriers.shape[0]
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=ARRIVALS)


@gluon.jit
def start():
    """The first stage, phase 0."""
    return PipelineState(gl.to_tensor(0), gl.to_tensor(0))


@gluon.jit
def advance(state, STAGES: gl.constexpr):
    """The next stage; the phase flips behind the last one."""
    if STAGES == 1:
        return PipelineState(state.stage, state.phase ^ 1)
    else:
        wraps = state.stage == STAGES - 1
        stage = gl.where(wraps, 0, state.stage + 1)
        return PipelineState(stage, state.phase ^ wraps.to(gl.int32))


@gluon.jit
def state_of(step):
    """The state of the n-th step in a ring of two stages."""
    return PipelineState(step & 1, (step >> 1) & 1)


@gluon.jit
def parity_of(state, STAGES: gl.constexpr):
    """Whether a state is that of an odd step."""
    return state.stage & 1 if STAGES % 2 == 0 else (state.stage ^ state.phase) & 1


@gluon.jit
def wait_empty(ring, state):
    """Waits until the consumers of the previous phase have released the stage."""
    mbarrier.wait(ring.empty.index(state.stage), state.phase ^ 1)


@gluon.jit
def wait_full(ring, state, pred=True):
    """Waits until the stage is full."""
    mbarrier.wait(ring.full.index(state.stage), state.phase, pred=pred)


@gluon.jit
def release(ring, state, pred=True):
    """Releases the stage for one consumer."""
    mbarrier.arrive(ring.empty.index(state.stage), count=1, pred=pred)


@gluon.jit
def release_by_threads(ring, state):
    """`release` by every thread of a warpgroup, 128 arrivals.

    `mbarrier.arrive` is one thread's, and Triton puts a barrier of the warps before and after it.
    `cp.async.mbarrier.arrive` needs none: each thread arrives when its own copies have landed, of
    which there are none. It orders nothing that a thread has written, so it is for stages that were
    only read.
    """
    async_copy.mbarrier_arrive(ring.empty.index(state.stage), increment_count=False)


@gluon.jit
def load(ring, state, desc, coordinates, shape: gl.constexpr):
    """Fills the stage with a tile of `desc`, as soon as it is empty; TMA arrives at `full` when the
    last byte is there.
    """
    wait_empty(ring, state)
    full = ring.full.index(state.stage)
    mbarrier.expect(full, desc.block_type.nbytes)
    tma_load(desc, coordinates, full, ring.buffers.index(state.stage).reshape(shape))
