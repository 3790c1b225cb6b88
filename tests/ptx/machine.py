"""Warps, CTAs, and what runs when.

Each warp has its own block of the program to run next, and after a divergent branch each of its
lanes has: the lanes at the first block in `Program.order` run, so that they meet the others where
branches join.
Warps of a warpgroup that are at the same block run as one group, with one numpy operation an
instruction.

An asynchronous operation in flight completes as late as it can: when no warp can run. With a seed
it completes, and warps are scheduled, at random.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .errors import AsyncFault, Deadlock, Divergence, PtxError
from .memory import GlobalMemory, SharedMemory
from .program import EXIT, Block, Program
from .registers import LANES, RegisterFile

QUANTUM = 64  # blocks that a warpgroup runs before others do
APART = 0.2  # how often, with a seed, a warp runs a block without the others of its warpgroup
PATIENCE = 256  # rounds after which something in flight completes though warps run
REGISTERS = 65536  # of an SM


class Warp:
    """Where a warp is."""

    def __init__(self, cta: "Cta", index: int, registers: int) -> None:
        self.cta, self.index = cta, index
        self.at = 0  # its block, or the first of its lanes'
        self.lanes: np.ndarray | None = None  # each lane's block where they differ
        self.over: Callable[[], bool] | None = None  # says when its wait is over
        self.reason = ""
        self.registers = registers  # a thread's, by setmaxnreg
        self.copies: list[Any] = []  # its cp.async in flight, in order
        self.groups: list[list[Any]] = []  # committed ones
        self.bulk: list[Any] = []  # the same of bulk copies from shared memory
        self.bulk_groups: list[list[Any]] = []

    def __str__(self) -> str:
        return f"warp {self.index} of CTA {self.cta.index}"

    def is_ready(self) -> bool:
        """Whether it may run."""
        if self.at == EXIT:
            return False
        if self.over is not None and self.over():
            self.over = None
        return self.over is None

    def go(self, following: Any, active: Any) -> None:
        """On to a block, or to one for each lane; `active` lanes, True for all."""
        if active is True and not isinstance(following, np.ndarray):
            self.at, self.lanes = following, None
            return
        lanes = np.full(LANES, self.at) if self.lanes is None else self.lanes
        lanes = np.where(active, following, lanes)
        if (lanes == lanes[0]).all():
            self.at, self.lanes = int(lanes[0]), None
            return
        order = self.cta.machine.program.order
        self.at, self.lanes = min(lanes.tolist(), key=lambda at: order.get(at, at)), lanes


class Group:
    """Lanes that run together: those of some warps of one warpgroup that are at the same block."""

    def __init__(self, cta: "Cta", warps: list[Warp]) -> None:
        self.cta, self.warps = cta, warps
        first, last = warps[0].index, warps[-1].index
        self.lanes = slice(first * LANES, (last + 1) * LANES)
        self.r = cta.registers.views(self.lanes.start, self.lanes.stop)
        self.is_whole = all(x.lanes is None for x in warps)
        self.where: Any = True  # of its lanes those that are active
        if not self.is_whole or last - first >= len(warps):
            self.where = np.zeros((last + 1 - first, LANES), np.bool_)
            for warp in warps:
                at = warp.at
                self.where[warp.index - first] = True if warp.lanes is None else warp.lanes == at
            self.where = self.where.ravel()

    def span_of(self, warp: Warp) -> slice:
        """Its lanes among those of the group."""
        first = warp.index * LANES - self.lanes.start
        return slice(first, first + LANES)

    def active_of(self, warp: Warp) -> Any:
        """Its active lanes, True for all."""
        return True if warp.lanes is None else self.where[self.span_of(warp)]

    def part(self, values: np.ndarray, warp: Warp) -> np.ndarray:
        """What one of its warps has of a register or a constant."""
        whole = np.broadcast_to(values, self.lanes.stop - self.lanes.start)
        return whole[self.span_of(warp)]

    def require_whole(self, warp: Warp, one: Any) -> None:
        """All of the warp's lanes that have not ended execute it."""
        if warp.lanes is not None and (warp.lanes[warp.lanes != EXIT] != warp.at).any():
            raise Divergence(f"{one}: lanes of {warp} are elsewhere")


class Cta:
    """A program of the grid."""

    def __init__(self, machine: "Machine", index: tuple[int, int, int]) -> None:
        self.machine, self.index = machine, index
        count = machine.warps * LANES
        self.shared = SharedMemory(machine.shared)
        self.registers = RegisterFile(machine.program.slots, count, self._special(count))
        self.warps = [Warp(self, n, machine.register_limit) for n in range(machine.warps)]
        self.warpgroups = [self.warps[n : n + 4] for n in range(0, len(self.warps), 4)]
        self.barriers: dict[int, Any] = {}  # by number
        self.mbarriers: dict[int, Any] = {}  # by address
        self.in_flight: list[Any] = []
        self.matmuls: dict[int, Any] = {}  # of warpgroups

    def _special(self, count: int) -> dict[str, np.ndarray]:
        thread = np.arange(count)
        values = dict(laneid=thread % LANES, warpid=thread // LANES)
        sizes = (count, 1, 1)
        grid = self.machine.grid
        for axis, at, program, programs, size in zip(
            "xyz", (thread, 0, 0), self.index, grid, sizes
        ):
            values |= {f"tid.{axis}": at, f"ntid.{axis}": size}
            values |= {f"ctaid.{axis}": program, f"nctaid.{axis}": programs}
            values |= {f"clusterid.{axis}": program, f"cluster_ctaid.{axis}": 0}
        values |= {"cluster_ctarank": 0, "globaltimer": 0, "clock": 0, "clock64": 0}
        return {f"%{k}": np.broadcast_to(v, count) for k, v in values.items()}

    @property
    def is_done(self) -> bool:
        """Whether all warps have ended."""
        return all(x.at == EXIT for x in self.warps)

    def check_end(self) -> None:
        """Nothing may be in flight that reads or writes its shared memory."""
        for warp in self.warps:
            if warp.bulk or warp.bulk_groups:
                raise AsyncFault(f"{warp} ended before its bulk copies have read shared memory")
        if self.matmuls:
            raise AsyncFault(f"CTA {self.index} ended before its wgmma were waited for")
        while self.in_flight:
            self.in_flight[0].complete()


class Machine:
    """Runs the CTAs of a grid."""

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        memory: GlobalMemory,
        parameters: dict[str, bytes],
        *,
        warps: int,
        shared: int = 0,
        seed: int | None = None,
        resident: int = 8,
        strict: bool = False,
        most_rounds: int = 1_000_000,
    ) -> None:
        self.program, self.grid, self.memory, self.parameters = program, grid, memory, parameters
        self.warps, self.shared = warps, shared
        self.random = None if seed is None else random.Random(seed)
        self.resident, self.strict, self.most_rounds = resident, strict, most_rounds
        self.rounds_run = 0
        self.tensor_maps: dict[int, Any] = {}
        self.register_limit = program.kernel.max_registers or 255
        if self.register_limit * warps * LANES > REGISTERS:
            self.register_limit = REGISTERS // (warps * LANES) // 8 * 8

    def clock(self) -> int:
        """Nanoseconds, as %globaltimer says: 100 a round."""
        return self.rounds_run * 100

    def run(self) -> None:
        """All CTAs."""
        for _ in self.rounds():
            pass

    def rounds(self) -> Iterator[None]:
        """All CTAs, some at a time: a place that one leaves is taken by the next. Stops after each
        round, so that several machines can be interleaved.
        """
        nx, ny, nz = self.grid
        pending = [(x, y, z) for z in range(nz) for y in range(ny) for x in range(nx)]
        pending.reverse()
        running: list[Cta] = []
        while pending or running:
            while pending and len(running) < self.resident:
                running.append(Cta(self, pending.pop()))
            with np.errstate(all="ignore"):
                self._round(running)
                for cta in [x for x in running if x.is_done]:
                    cta.check_end()
                    running.remove(cta)
            yield

    def run_cta(self, cta: Cta) -> None:
        """One that was made by the caller."""
        with np.errstate(all="ignore"):
            while not cta.is_done:
                self._round([cta])

    def _round(self, running: list[Cta]) -> None:
        """Each warpgroup that can run does."""
        warpgroups = [(cta, warpgroup) for cta in running for warpgroup in cta.warpgroups]
        if self.random is not None:
            self.random.shuffle(warpgroups)
        has_run = False
        for cta, warpgroup in warpgroups:
            has_run |= self._schedule(cta, warpgroup)
        in_flight = [x for cta in running for x in cta.in_flight]
        if in_flight and self.random is not None and self.random.random() < 0.3:
            self.random.choice(in_flight).complete()
        elif in_flight and (not has_run or self.rounds_run % PATIENCE == 0):
            in_flight[0].complete()
        elif not has_run and not all(x.is_done for x in running):
            raise Deadlock("no warp can run, and nothing is in flight:\n" + _waits(running))
        self.rounds_run += 1
        if self.rounds_run > self.most_rounds:
            raise Deadlock(f"{self.rounds_run} rounds and no end:\n" + _waits(running))

    def _schedule(self, cta: Cta, warpgroup: list[Warp]) -> bool:
        """Up to QUANTUM blocks of a warpgroup. Whether any of its warps could run."""
        for n in range(QUANTUM):
            ready = [x for x in warpgroup if x.is_ready()]
            ready = [x for x in ready if self._is_met(x, warpgroup)]
            if not ready:
                return n > 0
            ready = self._next(ready, n)
            at = ready[0].at
            self._run(Group(cta, ready), self.program.blocks[at], at)
        return True

    def _next(self, ready: list[Warp], n: int) -> list[Warp]:
        """Those of the lowest block, so that warps that parted meet; but now and then of another,
        as the lowest may be polling.
        """
        at = min(x.at for x in ready)
        if len(ready) > 1 and (self.rounds_run + n) % 16 == 15:
            at = ready[(self.rounds_run + n) // 16 % len(ready)].at
        found = [x for x in ready if x.at == at]
        if self.random is not None and self.random.random() < APART:
            alone = self.random.choice(ready)
            return found if self.program.blocks[alone.at].is_of_warpgroup else [alone]
        return found

    def _is_met(self, warp: Warp, warpgroup: list[Warp]) -> bool:
        """What a warpgroup executes together waits for all of its warps."""
        if not self.program.blocks[warp.at].is_of_warpgroup:
            return True
        return all(x.at == warp.at and x.over is None for x in warpgroup)

    def _run(self, group: Group, block: Block, at: int) -> None:
        """A block, and what it ends with."""
        r = group.r
        try:
            if block.wait is not None:
                for warp in group.warps:
                    over = block.wait(r, group, warp)
                    warp.go(at + 1, group.active_of(warp))
                    if over is not None and not over():
                        warp.over, warp.reason = over, str(block.instructions[0])
                return
            if group.cta.matmuls:
                self._check_in_flight(group, block)
            for step in block.steps:
                step(r, group)
            following = at + 1 if block.end is None else block.end(r, group)
        except PtxError as error:
            error.add_note(f"in {', '.join(map(str, group.warps))}")
            raise
        except Exception as error:
            error.add_note(f"in {', '.join(map(str, group.warps))}, in one of:")
            error.add_note("\n".join(map(str, block.instructions)))
            raise
        for warp in group.warps:
            next_ = following
            if isinstance(following, np.ndarray):
                next_ = group.part(following, warp)
                if (next_ == next_[0]).all():
                    next_ = int(next_[0])
            warp.go(next_, group.active_of(warp))

    def _check_in_flight(self, group: Group, block: Block) -> None:
        matmuls = group.cta.matmuls.get(group.warps[0].index // 4)
        if matmuls is not None and not block.is_of_warpgroup:
            matmuls.check_registers(block)


def _waits(running: list[Cta]) -> str:
    lines = []
    for cta in running:
        for warp in cta.warps:
            if warp.at != EXIT:
                block = cta.machine.program.blocks[warp.at]
                first = block.instructions[0] if block.instructions else "the end"
                reason = f"waits at {warp.reason}" if warp.over else f"is at {first}"
                lines.append(f"  {warp} {reason}")
    return "\n".join(lines)
