"""mbarriers: they count arrivals and expected bytes, phase by phase.

A phase of a barrier ends when its `count` arrivals have come and every expected byte has landed;
the next begins at once. `wait(barrier, phase)` passes when the phase of that parity has ended. A
fresh barrier is in phase 0, so waiting for phase 1 passes: that is how an empty slot starts free.

`init` is seen by TMA and by other partitions after `fence_async_shared`; use before that raises.
"""

import math
from typing import Any

from .machine import HopperError, running
from .memory import Allocation
from .values import as_tensor


class Barrier:
    """One 64-bit word of shared memory."""

    def __init__(self, home: "BarrierAllocation", index: int) -> None:
        self.home, self.index = home, index
        self.count = 0  # 0: not initialised
        self.unfenced_by: Any = None  # the partition that must still fence it

    def name(self) -> str:
        return f"{self.home.name()}[{self.index}]"

    def init(self, count: int) -> None:
        if count < 1:
            raise HopperError(f"barrier {self.name()} is initialised for {count} arrivals")
        self.count = self.pending = count
        self.bytes = 0
        self.phase = 0
        self.unfenced_by = running()
        running().unfenced[self] = None

    def publish(self) -> None:
        self.unfenced_by = None

    def usable(self, by_tma: bool = False) -> "Barrier":
        """Returns the barrier; raises if the running partition may not use it yet."""
        if not self.count:
            raise HopperError(f"{running()} uses barrier {self.name()}, which is not initialised")
        if self.unfenced_by not in (None, running()) or (by_tma and self.unfenced_by):
            raise HopperError(
                f"{'TMA' if by_tma else running()} uses barrier {self.name()}, whose init may not"
                " be visible: call fence_async_shared() after mbarrier.init"
            )
        return self

    def arrive(self, count: int) -> None:
        self.pending -= count
        if self.pending < 0:
            raise HopperError(
                f"{running()} makes {_arrivals(self.count - self.pending)} in phase {self.phase} of"
                f" barrier {self.name()}, which takes {self.count}"
            )
        self._check_phase()

    def land(self, nbytes: int) -> None:
        self.bytes -= nbytes
        self._check_phase()

    def check_end(self) -> None:
        """What must hold when the CTA has ended."""
        if self.count and self.bytes:
            verb = "still expects" if self.bytes > 0 else "received unexpected"
            raise HopperError(
                f"{self.home.cta} ends and barrier {self.name()} {verb} {abs(self.bytes)} bytes"
            )
        if self.count and self.pending != self.count:
            raise HopperError(
                f"{self.home.cta} ends and barrier {self.name()} has got"
                f" {self.count - self.pending} of {_arrivals(self.count)} of a phase"
            )

    def _check_phase(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.home.cta.machine.switches = 0
            self.phase ^= 1
            self.pending = self.count


class BarrierAllocation(Allocation):
    """One allocation with the layout of barriers."""

    def __init__(self, cta: Any, count: int) -> None:
        super().__init__(cta, 8 * count)
        self.barriers = [Barrier(self, i) for i in range(count)]


class Barriers:
    """A view of an allocation of barriers."""

    __slots__ = ("_indexed", "allocation", "dtype", "first", "layout", "shape")

    def __init__(self, allocation: Any, shape: list[int], first: int, like: Any) -> None:
        self.allocation, self.shape, self.first = allocation, shape, first
        self.dtype, self.layout = like
        self._indexed: dict[int, Barriers] = {}

    def index(self, index: Any) -> "Barriers":
        i = int(index)
        if i not in self._indexed:
            if not 0 <= i < self.shape[0]:
                raise IndexError(f"{self.allocation.name()} has {self.shape[0]} barriers, no {i}")
            inner = self.shape[1:]
            first = self.first + i * math.prod(inner)
            like = self.dtype, self.layout
            self._indexed[i] = Barriers(self.allocation, inner, first, like)
        return self._indexed[i]

    def slice(self, start: Any, length: Any, dim: Any = 0) -> "Barriers":
        shape, first = [int(length), *self.shape[1:]], int(start) * math.prod(self.shape[1:])
        if int(dim) or not 0 <= int(start) <= int(start) + int(length) <= self.shape[0]:
            raise IndexError(f"{self.allocation.name()} of {self.shape} has no such slice")
        return Barriers(self.allocation, shape, self.first + first, (self.dtype, self.layout))

    @property
    def one(self) -> Barrier:
        if math.prod(self.shape) != 1:
            raise HopperError(f"{self.allocation.name()} is {self.shape} barriers: index one")
        return self.allocation.barriers[self.first]

    def _keep_alive(self) -> None:
        pass


def _arrivals(count: int) -> str:
    return "1 arrival" if count == 1 else f"{count} arrivals"


def allocate_barriers(dtype: Any, shape: Any, layout: Any) -> Barriers:
    shape = [int(n) for n in shape]
    allocation = BarrierAllocation(running().cta, math.prod(shape))
    return Barriers(allocation, shape, 0, (dtype, layout))


def init(mbarrier: Any, count: Any = 1, **_: Any) -> None:
    barrier = mbarrier.one
    running().log("init", lambda: f"{barrier.name()} for {_arrivals(int(count))}")
    barrier.init(int(count))


def invalidate(mbarrier: Any) -> None:
    mbarrier.one.usable().count = 0


def expect(mbarrier: Any, bytes: Any, pred: Any = True, **_: Any) -> None:
    """One arrival, which also announces bytes."""
    if not pred:
        return
    barrier = mbarrier.one.usable()
    running().log("expect", lambda: f"{barrier.name()} {int(bytes)} bytes")
    barrier.bytes += int(bytes)
    barrier.arrive(1)
    running().pause()


def arrive(mbarrier: Any, *, count: Any = 1, pred: Any = True, **_: Any) -> None:
    if not pred:
        return
    barrier = mbarrier.one.usable()
    running().pause()
    running().log("arrive", lambda: f"{barrier.name()} phase {barrier.phase}")
    barrier.arrive(int(count))
    running().pause()


def wait(mbarrier: Any, phase: Any, pred: Any = True, deps: Any = (), **_: Any) -> None:
    if not pred:
        return
    barrier, parity = mbarrier.one.usable(), int(as_tensor(phase)) & 1

    def describe() -> str:
        return (
            f"waits for phase {parity} of barrier {barrier.name()}, which is in phase"
            f" {barrier.phase} with {barrier.count - barrier.pending} of {_arrivals(barrier.count)}"
            + (f" and {barrier.bytes} bytes to come" if barrier.bytes else "")
        )

    partition = running()
    partition.log("wait", lambda: f"{barrier.name()} phase {parity}")
    partition.wait(lambda: barrier.phase != parity, describe)
    partition.log("passed", lambda: f"{barrier.name()} phase {parity}")
