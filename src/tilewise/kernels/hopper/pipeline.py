"""Rings of buffers in shared memory, and the barriers by which warps hand them to each other.

A slot of a ring has two mbarriers: `full`, which the bytes of a copy complete, and `empty`, which
its readers complete. Both flip a phase bit each time. Whoever waits names the phase that must be
over: the filler waits for `empty` of the lap before, which at the first lap counts as over
(`phase ^ 1`), a reader for `full` of this lap.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .compat import tma_load


class Ring(NamedTuple):
    """Slots of shared memory, and a barrier of each kind for each of them."""

    slots: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Steps(NamedTuple):
    """A ring of what one step of the matmuls takes: K of a block, and V of the block before, whose
    probabilities are known by then. One pair of barriers serves both tiles: each is waited for
    and let go of at the same time as the other.
    """

    k: gl.shared_memory_descriptor  # (STAGES, BLOCK_N, BLOCK_D)
    v: gl.shared_memory_descriptor  # (STAGES, BLOCK_N, BLOCK_DV)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class Cursor(NamedTuple):
    """Where somebody stands in a ring: its slot, and the parity of its lap."""

    slot: gl.tensor
    phase: gl.tensor


@gluon.jit
def make_ring(
    dtype: gl.constexpr,
    shape: gl.constexpr,
    layout: gl.constexpr,
    STAGES: gl.constexpr,
    FILLERS: gl.constexpr,
    READERS: gl.constexpr,
):
    """A ring whose slots are full after FILLERS arrivals and empty after READERS."""
    slots = gl.allocate_shared_memory(dtype, [STAGES] + shape, layout)
    full, empty = make_barriers(STAGES, FILLERS, READERS)
    return Ring(slots, full, empty)


@gluon.jit
def make_barriers(STAGES: gl.constexpr, FILLERS: gl.constexpr, READERS: gl.constexpr):
    """A `full` and an `empty` barrier for each slot."""
    return make_barrier(STAGES, FILLERS), make_barrier(STAGES, READERS)


@gluon.jit
def make_barrier(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """A barrier for each slot. Only what is used may be made: the compiler would give the memory of
    an idle barrier to somebody else, and a GPU that turns to another process and back writes an
    mbarrier's first state over it.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def start():
    """The first slot of the first lap."""
    return Cursor(gl.to_tensor(0), gl.to_tensor(0))


@gluon.jit
def after(cursor, STAGES: gl.constexpr):
    """The next slot, on the next lap if this was the last one."""
    if STAGES == 1:
        return Cursor(cursor.slot, cursor.phase ^ 1)
    else:
        wraps = cursor.slot == STAGES - 1
        slot = gl.where(wraps, 0, cursor.slot + 1)
        return Cursor(slot, cursor.phase ^ wraps.to(gl.int32))


@gluon.jit
def nth(step):
    """Where the n-th step stands in a ring of two slots."""
    return Cursor(step & 1, (step >> 1) & 1)


@gluon.jit
def parity_of(cursor, STAGES: gl.constexpr):
    """Whether the step of a cursor is an odd one."""
    return cursor.slot & 1 if STAGES % 2 == 0 else (cursor.slot ^ cursor.phase) & 1


@gluon.jit
def wait_empty(ring, cursor):
    """Until the slot's readers of the lap before have let go of it."""
    mbarrier.wait(ring.empty.index(cursor.slot), cursor.phase ^ 1)


@gluon.jit
def wait_full(ring, cursor, pred=True):
    """Until the slot has been filled on this lap."""
    mbarrier.wait(ring.full.index(cursor.slot), cursor.phase, pred=pred)


@gluon.jit
def release(ring, cursor, pred=True):
    """This reader needs the slot no more."""
    mbarrier.arrive(ring.empty.index(cursor.slot), count=1, pred=pred)


@gluon.jit
def release_by_threads(ring, cursor):
    """`release` by every thread of a warpgroup, 128 arrivals.

    `mbarrier.arrive` is one thread's, and Triton puts a barrier of the warps before and after it.
    `cp.async.mbarrier.arrive` needs none: each thread arrives when its own copies have landed, of
    which there are none. It orders nothing that a thread has written, so it is for slots that were
    only read.
    """
    async_copy.mbarrier_arrive(ring.empty.index(cursor.slot), increment_count=False)


@gluon.jit
def load(ring, cursor, desc, coordinates, shape: gl.constexpr):
    """Fills the slot with a tile of `desc`, as soon as it is empty; the copy engine arrives at
    `full` when the last byte is there.
    """
    wait_empty(ring, cursor)
    full = ring.full.index(cursor.slot)
    mbarrier.expect(full, desc.block_type.nbytes)
    tma_load(desc, coordinates, full, ring.slots.index(cursor.slot).reshape(shape))
