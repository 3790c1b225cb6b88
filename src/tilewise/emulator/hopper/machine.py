"""CTAs and their partitions, one of which runs at a time, and whatever is on its way in memory.

Every partition is a thread, and the threads pass one turn around. A partition may lose its turn
wherever another could see what it did: at a barrier, a copy, a matmul, an access to memory. Who
runs next, and whether a copy gets on in between, is drawn from a seeded generator. The seed also
sets the temper of the whole run: copies that land at once or only when all else waits, partitions
that fall asleep in the middle of something. Any nine seeds in a row cover all of these.

When every partition waits and nothing is on its way, the kernel hangs: that is `Deadlock`.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from .places import kernel_frames, line_of

SHARED_MEMORY = 232448  # bytes one CTA may have on Hopper: 227 KiB

# How often a partition gives its turn away unforced, and how often all sleepers wake up.
_RESTLESSNESS, _WAKING = 0.5, 0.02
_SPINNING = 50  # turns in which nothing changes but a loop that polls memory: copies land then
# Turns that may pass without a phase ending, a copy landing or a partition leaving.
_PATIENCE = 1_000_000

_here = threading.local()


class HopperError(RuntimeError):
    """A kernel did what the hardware forbids or leaves undefined."""


class Deadlock(HopperError):
    """Every partition waits and nothing is on its way. The message says who waits for what."""


class _Stopped(BaseException):
    """Unwinds the other threads after an error."""


def running() -> "Partition":
    """The partition that has the turn, which is the one that asks."""
    return _here.partition


class Cta:
    """One program of the grid: its partitions share what hangs here."""

    def __init__(self, machine: "Machine", program: tuple[int, int, int]) -> None:
        self.machine, self.program = machine, program
        self.allocations: list[Any] = []  # shared memory and barriers, in order
        self.loads = 0  # copies on their way into shared memory
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
        self.is_done = self.is_asleep = False
        self.matmuls: list[Any] = []  # asynchronous matmuls, oldest first
        self.stores: list[Any] = []  # TMA stores, oldest first
        # Shared memory it wrote that the asynchronous proxy cannot see yet: an ordered set.
        self.unfenced: dict[Any, None] = {}
        self.turn = threading.Lock()
        self.turn.acquire()
        self.thread = threading.Thread(target=self._run, name=f"{cta} {name}", daemon=True)

    def __str__(self) -> str:
        return f"{self.cta} {self.name}"

    def pause(self) -> None:
        """A point where others may go first."""
        machine = self.machine
        machine.check_stopped()
        chance = machine.random.random()
        if chance < _RESTLESSNESS:
            self.is_asleep = chance < _RESTLESSNESS * machine.drowsiness
            machine.switch(self)

    def wait(self, condition: Callable[[], bool], reason: Callable[[], str]) -> None:
        """Give the turn away until the condition holds."""
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
        self.turn.acquire()
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
                f"{self} ends with {len(self.matmuls)} matmul(s) nobody waited for:"
                " call warpgroup_mma_wait(0, ...)"
            )
        if any(not store.was_awaited for store in self.stores):
            raise HopperError(
                f"{self} ends while a TMA store may still read its shared memory:"
                " call store_wait(0)"
            )


class Machine:
    """The resident CTAs of one launch, the operations on their way, and the turn."""

    def __init__(self, seed: int, resident: int, trace: Any = None) -> None:
        self.random = random.Random(seed)
        self.resident, self.trace = resident, trace
        self.grid: tuple[int, int, int] = (1, 1, 1)
        self.asm: Mapping[str, Callable[..., Any]] = {}
        self.turns = 0  # since something last changed for good
        self.inference = torch.is_inference_mode_enabled()
        # How often an operation gets on by itself, and how often a partition falls asleep.
        self.haste = (0.02, 0.0, 0.3)[seed % 3]
        self.drowsiness = (0.1, 0.5, 0.0)[seed // 3 % 3]
        self.in_flight: list[Callable[[], bool]] = []
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
                chosen.turn.release()
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
        """Let a new partition take part."""
        self.partitions.append(partition)
        self.threads.append(partition.thread)
        partition.thread.start()

    def launch(self, operation: Callable[[], bool]) -> None:
        """Put an operation on its way: called now and then, until it says that it is done."""
        self.in_flight.append(operation)

    def switch(self, me: Partition) -> None:
        """Pass the turn on and wait to get it back."""
        chosen = self._choose()
        if chosen is not None and chosen is not me:
            chosen.turn.release()
            me.turn.acquire()
        self.check_stopped()
        me.condition = None

    def leave(self, me: Partition) -> None:
        """The partition has ended; the turn goes on without it."""
        self.turns = 0
        me.is_done = True
        self.partitions.remove(me)
        try:
            if not self.error:
                chosen = self._choose()
                if chosen:
                    chosen.turn.release()
        except BaseException as error:
            self.fail(error)
        if not self.partitions:
            self._over.set()

    def end_cta(self) -> None:
        """One CTA has ended: another of the grid moves in."""
        self._next_cta()

    def fail(self, error: BaseException) -> None:
        """Keep the first error and wake everybody to stop."""
        if self.error is None:
            self.error = error
            # A copy, as each takes itself off the list once it is woken
            for partition in list(self.partitions):
                if partition.turn.locked():
                    partition.turn.release()
        self._over.set()

    def check_stopped(self) -> None:
        if self.error:
            raise _Stopped

    def _next_cta(self) -> None:
        program = next(self._programs, None)
        if program is not None:
            self._start(Cta(self, program))

    def _choose(self) -> Partition | None:
        """Who runs next; what is on its way may get on first. None when all have ended."""
        self.turns += 1
        if self.turns > _PATIENCE:
            raise self._deadlock(f"nothing changed in {_PATIENCE} turns, a loop may spin for ever")
        while True:
            is_due = self.random.random() < self.haste or self.turns > _SPINNING
            if self.in_flight and is_due:
                self._advance()
            ready = [p for p in self.partitions if p.condition is None or p.condition()]
            if ready:
                awake = [p for p in ready if not p.is_asleep]
                if awake and self.random.random() > _WAKING:
                    return self.random.choice(awake)
                for partition in ready:
                    partition.is_asleep = False
                return self.random.choice(ready)
            if not self.partitions:
                return None
            if not self.in_flight:
                raise self._deadlock("nothing is on its way and every partition waits")
            self._advance()

    def _advance(self) -> None:
        self.turns = 0
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
