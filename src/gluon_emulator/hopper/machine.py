"""CTAs and their partitions, one of which runs at a time, and operations in flight.

Every partition is a thread, and one thread runs at a time. A partition may be switched out wherever
another could observe its effects: at a barrier, a copy, a matmul, an access to memory. Which
partition runs next, and whether a copy progresses in between, is drawn from a seeded generator. The
seed also sets the mode of the whole run: copies that land at once or only when all partitions wait,
partitions that pause at any point. Any nine consecutive seeds cover all modes.

When every partition waits and nothing is in flight, the kernel hangs: that is `Deadlock`.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .places import kernel_frames, line_of

SHARED_MEMORY = 232448  # bytes one CTA may have on Hopper: 227 KiB

# How often a partition is switched out where it could run, and how often all pauses end.
_SWITCHING, _RESUMING = 0.5, 0.02
_SPINNING = 50  # switches in which nothing changes but a loop that polls memory: copies land then
# Switches that may pass without a phase ending, a copy landing or a partition leaving.
_PATIENCE = 1_000_000

_here = threading.local()


class HopperError(RuntimeError):
    """A kernel did what the hardware forbids or leaves undefined."""


class Deadlock(HopperError):
    """Every partition waits and nothing is in flight. The message names what each waits for."""


class _Stopped(BaseException):
    """Unwinds the other threads after an error."""


def running() -> "Partition":
    """The running partition."""
    return _here.partition


class Cta:
    """One program of the grid, with what its partitions share."""

    def __init__(self, machine: "Machine", program: tuple[int, int, int]) -> None:
        self.machine, self.program = machine, program
        self.allocations: list[Any] = []  # shared memory and barriers, in order
        self.loads = 0  # copies in flight into shared memory
        self.copied: list[Any] = []  # what threads have copied, until a fence of any partition
        self.smem_bytes = 0

    def __str__(self) -> str:
        return f"CTA {self.program}"

    def claim(self, nbytes: int) -> None:
        """Count shared memory against what a CTA may have."""
        self.smem_bytes += nbytes
        if self.smem_bytes > SHARED_MEMORY:
            raise HopperError(
                f"{self} allocates {self.smem_bytes} bytes of shared memory of {SHARED_MEMORY}"
            )


class Partition:
    """A group of warps with a program of its own: a thread, and what only it can wait for."""

    def __init__(self, cta: Cta, name: str, num_warps: int, program: Callable[[], Any]) -> None:
        self.cta, self.name, self.num_warps, self.program = cta, name, num_warps, program
        self.machine = cta.machine
        self.condition: Callable[[], bool] | None = None  # what it waits for; None: it could run
        self.reason: Callable[[], str] = str  # what that is, in words
        self.is_done = self.is_paused = False
        self.matmuls: list[Any] = []  # asynchronous matmuls, oldest first
        self.stores: list[Any] = []  # TMA stores, oldest first
        self.copies: list[Any] = []  # asynchronous copies since its last arrival for them
        self.arrived = 0  # pieces of memory that it has waited for
        # Shared memory it wrote that the asynchronous proxy cannot see yet: an ordered set.
        self.unfenced: dict[Any, None] = {}
        self.token = threading.Lock()
        self.token.acquire()
        self.thread = threading.Thread(target=self._run, name=f"{cta} {name}", daemon=True)

    def __str__(self) -> str:
        return f"{self.cta} {self.name}"

    def pause(self) -> None:
        """A point where other partitions may run first."""
        machine = self.machine
        machine.check_stopped()
        chance = machine.random.random()
        if chance < _SWITCHING:
            self.is_paused = chance < _SWITCHING * machine.pausing
            machine.switch(self)

    def wait(self, condition: Callable[[], bool], reason: Callable[[], str]) -> None:
        """Switches to other partitions until the condition holds."""
        self.condition, self.reason = condition, reason
        self.machine.switch(self)

    def log(self, event: str, detail: Callable[[], str]) -> None:
        """Tell the trace, if there is one; `detail` is called only then."""
        if self.machine.trace:
            self.machine.trace(self.cta.program, self.name, event, detail())

    def frames(self) -> list[Any]:
        """The kernel's own frames on this partition's stack, innermost first."""
        return kernel_frames(sys._current_frames().get(self.thread.ident or 0))

    def _run(self) -> None:
        _here.partition = self
        self.token.acquire()
        with torch.inference_mode(self.machine.inference), torch.no_grad():
            try:
                self.machine.check_stopped()
                self.program()
                self._check_end()
            except _Stopped:
                pass
            except BaseException as error:
                self.machine.fail(error)
            self.machine.leave(self)

    def _check_end(self) -> None:
        if self.matmuls:
            raise HopperError(
                f"{self} ends with {len(self.matmuls)} matmul(s) that were not waited for:"
                " call warpgroup_mma_wait(0, ...)"
            )
        if any(not store.was_awaited for store in self.stores):
            raise HopperError(
                f"{self} ends while a TMA store may still read its shared memory:"
                " call store_wait(0)"
            )


class Machine:
    """The resident CTAs of one launch, the operations in flight, and which partition runs."""

    def __init__(self, seed: int, resident: int, trace: Any = None) -> None:
        self.random = random.Random(seed)
        self.resident, self.trace = resident, trace
        self.grid: tuple[int, int, int] = (1, 1, 1)
        self.asm: Mapping[str, Callable[..., Any]] = {}
        self.switches = 0  # since a phase ended, a copy landed or a partition left
        self.inference = torch.is_inference_mode_enabled()
        # How often an operation progresses by itself, and how often a partition pauses.
        self.progress = (0.02, 0.0, 0.3)[seed % 3]
        self.pausing = (0.1, 0.5, 0.0)[seed // 3 % 3]
        self.in_flight: list[Callable[[], bool]] = []
        self.arrivals: Any = None  # memory that is filled beside the kernel
        self.partitions: list[Partition] = []
        self.threads: list[threading.Thread] = []
        self.error: BaseException | None = None
        self._over = threading.Event()

    def run(self, programs: Iterable[tuple[int, int, int]], start: Callable[[Cta], Any]) -> None:
        """Run `start` as the first partition of a CTA for every program of the grid."""
        self._programs = iter(programs)
        self._start = start
        try:
            for _ in range(self.resident):
                self._next_cta()
            chosen = self._choose()
            if chosen:
                chosen.token.release()
                self._over.wait()
        except BaseException as error:
            self.fail(error)
        finally:
            for thread in self.threads:
                thread.join()
        if self.error:
            raise self.error
        while self.in_flight:
            self._advance()

    def start(self, partition: Partition) -> None:
        """Starts a new partition."""
        self.partitions.append(partition)
        self.threads.append(partition.thread)
        partition.thread.start()

    def launch(self, operation: Callable[[], bool]) -> None:
        """Puts an operation in flight: it is called until it returns True."""
        self.in_flight.append(operation)

    def switch(self, me: Partition) -> None:
        """Runs another partition, and returns when this one is chosen again."""
        chosen = self._choose()
        if chosen is not None and chosen is not me:
            chosen.token.release()
            me.token.acquire()
        self.check_stopped()
        me.condition = None

    def leave(self, me: Partition) -> None:
        """Ends the partition and runs another."""
        self.switches = 0
        me.is_done = True
        self.partitions.remove(me)
        try:
            if not self.error:
                chosen = self._choose()
                if chosen:
                    chosen.token.release()
        except BaseException as error:
            self.fail(error)
        if not self.partitions:
            self._over.set()

    def end_cta(self) -> None:
        """Ends a CTA and starts the next one of the grid."""
        self._next_cta()

    def fail(self, error: BaseException) -> None:
        """Keeps the first error and stops all partitions."""
        if self.error is None:
            self.error = error
            # A copy, as each partition removes itself from the list once it is released
            for partition in list(self.partitions):
                if partition.token.locked():
                    partition.token.release()
        self._over.set()

    def check_stopped(self) -> None:
        if self.error:
            raise _Stopped

    def _next_cta(self) -> None:
        program = next(self._programs, None)
        if program is not None:
            self._start(Cta(self, program))

    def _choose(self) -> Partition | None:
        """The partition that runs next; None when all have ended. Operations may progress first."""
        self.switches += 1
        if self.switches > _PATIENCE:
            raise self._deadlock(f"nothing changed in {_PATIENCE} switches: a loop may never end")
        while True:
            is_due = self.random.random() < self.progress or self.switches > _SPINNING
            if self.in_flight and is_due:
                self._advance()
            ready = [p for p in self.partitions if p.condition is None or p.condition()]
            if ready:
                running = [p for p in ready if not p.is_paused]
                if running and self.random.random() > _RESUMING:
                    return self.random.choice(running)
                for partition in ready:
                    partition.is_paused = False
                return self.random.choice(ready)
            if not self.partitions:
                return None
            if not self.in_flight:
                raise self._deadlock("nothing is in flight and every partition waits")
            self._advance()

    def _advance(self) -> None:
        self.switches = 0
        index = self.random.randrange(len(self.in_flight))
        if self.in_flight[index]():
            self.in_flight.pop(index)

    def _deadlock(self, what: str) -> Deadlock:
        lines = [f"{what}:"]
        for partition in self.partitions:
            frames = partition.frames()
            place = f" at {line_of(frames[0])}" if frames else ""
            reason = partition.reason() if partition.condition else "could run"
            lines.append(f"  {partition} {reason}{place}")
        return Deadlock("\n".join(lines))
