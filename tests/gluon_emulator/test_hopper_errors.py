"""Errors of a kernel name the partition, the line, the barrier and the address."""

import threading
import traceback

import pytest
import torch
from helpers import hopper_kernels, hopper_launches
from helpers.jitted import Strided
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gluon_emulator.hopper import Deadlock, HopperError, emulate, machine

pytestmark = pytest.mark.emulator


@gluon.jit
def wait_for(barriers, i, phase):
    mbarrier.wait(barriers.index(i), phase)


@gluon.jit
def arrive_at(barriers, i, count: gl.constexpr):
    mbarrier.arrive(barriers.index(i), count=count)


@gluon.jit
def meeting_kernel(phase, COUNT: gl.constexpr, ARRIVALS: gl.constexpr, FENCE: gl.constexpr):
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    mbarrier.init(ready.index(1), count=COUNT)
    if FENCE:
        fence_async_shared()
    gl.warp_specialize(
        [
            (wait_for, (ready, 1, phase)),
            (wait_for, (ready, 1, phase)),
            (arrive_at, (ready, 1, ARRIVALS)),
        ],
        [4, 1],
        [24, 24],
    )


def meet(phase=0, count=1, arrivals=1, fence=True, seed=0, grid=(2,)):
    emulate(meeting_kernel, seed)[grid](phase, COUNT=count, ARRIVALS=arrivals, FENCE=fence)


def test_a_deadlock_names_each_partition_and_its_wait():
    meet()
    with pytest.raises(Deadlock) as caught:
        meet(count=2)
    message = str(caught.value)
    assert message.startswith("nothing is in flight and every partition waits:\n")
    assert message.count("waits for phase 0 of barrier ready[1]") == 4
    assert caught.value.__notes__ == ["in the emulation of meeting_kernel with seed 0"]
    for name in ("CTA (0, 0, 0) wait_for[0] ", "CTA (1, 0, 0) wait_for[1] "):
        assert name in message
    assert "in phase 0 with 1 of 2 arrivals" in message
    number = wait_for.fn.__code__.co_firstlineno + 2
    assert f"test_hopper_errors.py:{number}: mbarrier.wait(barriers.index(i), phase)" in message


def test_errors_of_barriers():
    with pytest.raises(HopperError, match=r"2 arrivals in phase 0 of barrier .*\[1\], which takes"):
        meet(arrivals=2)
    with pytest.raises(HopperError, match="call fence_async_shared"):
        meet(fence=False)
    with pytest.raises(HopperError, match=r"has got 1 of 2 arrivals"):
        meet(phase=1, count=2)


def test_threads_end_with_their_error_and_its_traceback():
    before = threading.active_count()
    for seed in range(5):
        with pytest.raises(HopperError) as caught:
            meet(arrivals=2, seed=seed, grid=(3,))
        assert threading.active_count() == before
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "arrive_at" in names


@gluon.jit
def touching_kernel(x, n, at, KIND: gl.constexpr):
    offs = at + gl.arange(0, 8, gl.BlockedLayout([1], [32], [1], [0]))
    if KIND == "load":
        gl.load(x.ptr + offs, mask=offs < n)
    elif KIND == "store":
        gl.store(x.ptr + offs, 1.0, mask=offs < n)
    elif KIND == "atomic":
        gl.atomic_add(x.ptr + offs, 1.0, mask=offs < n)
    elif KIND == "scalar":
        gl.store(x.ptr + at, 1.0)


@pytest.mark.parametrize("kind", ["load", "store", "atomic", "scalar"])
def test_addresses_outside_the_arguments(kind):
    x = Strided(torch.zeros(12), 1)
    emulate(touching_kernel)[(1,)](x, 12, 8, KIND=kind)
    at, n = (12, 12) if kind == "scalar" else (8, 13)
    word = {"scalar": "store", "atomic": "atomic add"}.get(kind, kind)
    words = rf"{word} by CTA \(0, 0, 0\) touching_kernel: 1 of . addresses .* x.ptr, .* element 12"
    with pytest.raises(IndexError, match=words):
        emulate(touching_kernel)[(1,)](x, n, at, KIND=kind)
    with pytest.raises(IndexError, match="element -1"):
        emulate(touching_kernel)[(1,)](x, 0 if kind == "scalar" else 4, -1, KIND=kind)


@gluon.jit
def memory_kernel(out, BYTES: gl.constexpr, KIND: gl.constexpr):
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SPREAD: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    memory = gl.allocate_shared_memory(gl.uint8, [BYTES], FLAT)
    if KIND == "barrier":
        mbarrier.arrive(gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()))
    elif KIND == "slice":
        memory.slice(BYTES - 4, 8)
    elif KIND == "unwritten":
        floats = gl.allocate_shared_memory(gl.float32, [128], FLAT)
        gl.store(out + gl.arange(0, 128, SPREAD), floats.load(SPREAD))


def test_shared_memory_is_counted_bounded_and_poisoned():
    out = torch.zeros(128)
    launch = emulate(memory_kernel)[(1,)]
    launch(out, BYTES=232448 - 512, KIND="unwritten")
    assert out.isnan().all()
    with pytest.raises(HopperError, match="232449 bytes of shared memory of 232448"):
        launch(out, BYTES=232449, KIND="none")
    with pytest.raises(IndexError, match=r"shared memory memory .* no \[60:68\]"):
        launch(out, BYTES=64, KIND="slice")
    with pytest.raises(HopperError, match="not initialised"):
        launch(out, BYTES=64, KIND="barrier")


@gluon.jit
def spinning_kernel(flag):
    while gl.atomic_add(flag, 0) == 0:
        pass


def test_a_loop_that_spins_for_ever(monkeypatch):
    monkeypatch.setattr(machine, "_PATIENCE", 1000)
    with pytest.raises(Deadlock, match="a loop may never end"):
        emulate(spinning_kernel)[(2,)](torch.zeros(1, dtype=torch.int32))


def test_a_copy_outside_the_memory_says_where():
    """As of a descriptor that promises more rows than there are."""
    launch = hopper_launches.copy(rows=512)
    x = launch.args[0]
    x.base = x.base[:448].clone()
    with pytest.raises(IndexError, match=r"at \[448, 0\]: elements 28672 to 32767 .* has 28672"):
        emulate(hopper_kernels.copy_kernel)[launch.grid](*launch.args, **launch.constants)


class Waiting:
    """A partition that leaves as soon as its token is released, and is its own token."""

    def __init__(self, over):
        self.over, self.token = over, self

    def locked(self):
        return True

    def release(self):
        self.over.partitions.remove(self)


def test_an_error_wakes_every_partition():
    """Also those after one that has left before the next is woken."""
    over = machine.Machine(seed=0, resident=1)
    over.partitions = [Waiting(over) for _ in range(4)]
    over.fail(HopperError("planted"))
    assert not over.partitions
