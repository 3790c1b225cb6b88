"""bar and barrier, mbarriers, setmaxnreg: where warps wait for each other."""

import numpy as np

from .errors import BarrierFault
from .memory import active_warps, address_slot, addresses_of
from .parse import Immediate, Instruction
from .program import Program, Step, Wait, instruction, unknown, waiting, without
from .registers import LANES

SCOPES = ("shared", "shared::cta", "b64", "cta", "release", "acquire", "relaxed")


class Barrier:
    """One of the 16 of a CTA."""

    def __init__(self) -> None:
        self.expected = self.arrived = self.phase = 0
        self.warps: set[int] = set()

    def arrive(self, warp: int, threads: int, one: Instruction) -> None:
        """A warp arrives, with how many threads the barrier waits for."""
        if self.arrived and threads != self.expected:
            raise BarrierFault(f"{one}: {threads} threads, where others said {self.expected}")
        if warp in self.warps:
            raise BarrierFault(f"{one}: warp {warp} arrives twice in a phase")
        self.expected = threads
        self.arrived += LANES
        self.warps.add(warp)
        if self.arrived > threads:
            raise BarrierFault(f"{one}: {self.arrived} threads arrive, and {threads} are expected")
        if self.arrived == threads:
            self.arrived, self.phase = 0, self.phase + 1
            self.warps.clear()


@waiting("bar.sync", "bar.arrive", "barrier.sync", "barrier.arrive", "bar.cta", "barrier.cta")
def barrier(code: Program, one: Instruction) -> Wait:
    """Warps arrive as wholes."""
    (how,) = without(one, "aligned", "cta")
    slots = code.sources(one.operands, "u32")

    def wait(r, group, warp):
        group.require_whole(warp, one)
        number, *count = (int(group.part(r[x], warp)[0]) for x in slots)
        threads = count[0] if count else LANES * len(group.cta.warps)
        if number > 15 or threads % LANES or not threads:
            raise BarrierFault(f"{one}: barrier {number} of {threads} threads")
        it = group.cta.barriers.setdefault(number, Barrier())
        phase = it.phase
        it.arrive(warp.index, threads, one)
        return None if how == "arrive" else lambda: it.phase > phase

    return wait


class Mbarrier:
    """A phase is over when no arrival and no byte is pending."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def arrive(self, count: int, one: Instruction) -> None:
        """So many arrivals."""
        self.pending -= count
        if self.pending < 0:
            raise BarrierFault(
                f"{one}: more arrivals than the {self.count} of the mbarrier's phase"
            )
        self._end_phase()

    def expect(self, count: int) -> None:
        """So many bytes are to come."""
        self.bytes += count

    def complete(self, count: int) -> None:
        """So many have."""
        self.bytes -= count
        self._end_phase()

    def _end_phase(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1


def mbarrier_at(group, address: int, one: Instruction) -> Mbarrier:
    """The mbarrier of an address in shared memory."""
    found = group.cta.mbarriers.get(int(address))
    if found is None:
        raise BarrierFault(f"{one}: no mbarrier was initialised at {address:#x}")
    return found


@instruction("mbarrier")
def mbarrier(code: Program, one: Instruction) -> Step:
    """Thread by thread: init, inval, arrive with and without bytes, expect_tx."""
    how = without(one, *SCOPES, "arrive" if one.modifiers[:2] == ("arrive", "expect_tx") else "")
    operands = one.operands[1:] if one.modifiers[0] == "arrive" else one.operands
    base, offset = address_slot(code, operands[0])
    number = code.slots.read(operands[1], "u32") if len(operands) > 1 else None
    if how not in (["init"], ["inval"], ["arrive"], ["expect_tx"]):
        raise unknown(one, *how)
    arrives = one.modifiers[0] == "arrive"

    def step(r, group):
        at = addresses_of(r, base, offset, group)
        counts = 1 if number is None else r[number]
        counts = np.broadcast_to(counts, group.lanes.stop - group.lanes.start)
        counts = counts if group.where is True else counts[group.where]
        for address, count in zip(at.tolist(), counts.tolist()):
            if how == ["init"]:
                _init(group, address, count, one)
            elif how == ["inval"]:
                mbarrier_at(group, address, one)
                del group.cta.mbarriers[address]
                group.cta.shared.is_barrier[address : address + 8] = False
            elif how == ["expect_tx"]:
                found = mbarrier_at(group, address, one)
                found.expect(count)
                if arrives:
                    found.arrive(1, one)
            else:
                mbarrier_at(group, address, one).arrive(count, one)

    return step


def _init(group, address: int, count: int, one: Instruction) -> None:
    shared = group.cta.shared
    shared.places(np.array([address]), 8, one)
    if shared.is_barrier[address : address + 8].any():
        raise BarrierFault(f"{one}: there is an mbarrier that was not invalidated")
    shared.is_barrier[address : address + 8] = True
    shared.mark(np.array([[address]]), active_warps(group)[:1])
    group.cta.mbarriers[address] = Mbarrier(count)


@waiting("mbarrier.try_wait", "mbarrier.test_wait")
def try_wait(code: Program, one: Instruction) -> Wait:
    """The warp goes on when the phase of that parity is over."""
    if without(one, *SCOPES) != ["try_wait", "parity"] or one.guard is not None:
        raise unknown(one, *one.modifiers)
    p, (base, offset) = (
        code.slots.write(one.operands[0], "pred"),
        address_slot(code, one.operands[1]),
    )
    parity = code.slots.read(one.operands[2], "u32")

    def wait(r, group, warp):
        group.require_whole(warp, one)
        at = np.unique(group.part(r[base], warp)) + offset
        wanted = np.unique(group.part(r[parity], warp))
        if len(at) > 1 or len(wanted) > 1:
            raise BarrierFault(f"{one}: lanes of a warp wait for several phases")
        found = mbarrier_at(group, int(at[0]), one)
        r[p][group.span_of(warp)] = True
        phase = found.phase
        if phase % 2 != wanted[0]:
            return None
        return lambda: found.phase > phase

    return wait


@waiting("setmaxnreg")
def set_registers(code: Program, one: Instruction) -> Wait:
    """A warp waits for registers until others of its CTA have released them: those that it began
    with are all that it has, also where the SM has more.
    """
    how, count = one.modifiers[0], one.operands[0].value
    if not isinstance(one.operands[0], Immediate) or count % 8 or not 24 <= count <= 256:
        raise unknown(one)

    def wait(r, group, warp):
        group.require_whole(warp, one)
        if (how == "dec") != (count <= warp.registers) and count != warp.registers:
            raise BarrierFault(f"{one}: {warp} has {warp.registers} registers a thread")
        warps = group.cta.warps
        if how == "dec":
            warp.registers = count
            return None

        def has_room() -> bool:
            others = sum(x.registers for x in warps if x is not warp)
            if others + count > len(warps) * group.cta.machine.register_limit:
                return False
            warp.registers = count
            return True

        return has_room

    return wait
