"""A kernel's instructions as steps: functions of a group of lanes, joined to basic blocks.

A step takes the views of a group's registers, by slot, and the group. Modules of instructions
register what makes a step of an instruction; `decode` asks them.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import networkx as nx
import numpy as np

from .errors import UnknownInstruction
from .parse import Address, Immediate, Instruction, Kernel, Name, Pair, Register, Vector
from .registers import Slots

Step = Callable[[dict, Any], None]
# What a block ends with: the next block of all active lanes, or that of each lane
End = Callable[[dict, Any], Any]
# For one warp of a group: None to go on, else a function that says when it may
Wait = Callable[[dict, Any, Any], Callable[[], bool] | None]

EXIT = 2**30  # the block of lanes that have ended

FLOATS = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64")
STEPS: dict[tuple[str, bool | None], Callable[["Program", Instruction], Step]] = {}
WAITS: dict[str, Callable[["Program", Instruction], Wait]] = {}


def instruction(*opcodes: str, of_floats: bool | None = None) -> Callable:
    """Registers what makes a step of these opcodes, of those whose type is a float or not."""

    def register(make: Callable) -> Callable:
        STEPS.update({(opcode, of_floats): make for opcode in opcodes})
        return make

    return register


def waiting(*opcodes: str) -> Callable:
    """The same for instructions at which a warp may wait: opcodes with their first modifiers."""

    def register(make: Callable) -> Callable:
        WAITS.update(dict.fromkeys(opcodes, make))
        return make

    return register


class Block:
    """Instructions that run one after the other, and what follows them."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.instructions: list[Instruction] = []
        self.end: End | None = None
        self.wait: Wait | None = None  # of a block of one instruction
        self.is_of_warpgroup = False  # four warps execute it together
        self.registers: set[str] = set()  # that it reads or writes


class Program:
    """A kernel, decoded. `addresses`: of parameters and of variables in memory."""

    def __init__(self, kernel: Kernel, addresses: dict[str, int], waits: bool = True) -> None:
        self.kernel = kernel
        self.slots = Slots(kernel.registers, addresses)
        self.slots.constant(0, "b32")
        targets = {at for name, at in kernel.labels.items() if name in _targets(kernel)}
        self.blocks: list[Block] = []
        self.starts: dict[int, int] = {}  # instruction to block
        block = self._new_block(0)
        for at, one in enumerate(kernel.instructions):
            wait = _entry_of(WAITS, one) if waits else None
            is_alone = wait is not None or one.opcode == "wgmma"
            if (at in targets or is_alone) and block.instructions:
                block = self._new_block(at)
            self.starts.setdefault(at, len(self.blocks) - 1)
            block.instructions.append(one)
            block.registers |= set(names_of(one))
            if wait is not None:
                block.wait = wait(self, one)
            elif one.opcode in ("bra", "brx", "ret", "exit"):
                block.end = self._end_of(one)
            else:
                block.steps.append(self._step(one))
            block.is_of_warpgroup = one.opcode == "wgmma"
            if is_alone or block.end is not None:
                block = self._new_block(at + 1)
        self.starts.setdefault(len(kernel.instructions), len(self.blocks) - 1)

    def _new_block(self, at: int) -> Block:
        if self.blocks and not self.blocks[-1].instructions:
            self.starts[at] = len(self.blocks) - 1
            return self.blocks[-1]
        self.blocks.append(Block())
        self.starts[at] = len(self.blocks) - 1
        return self.blocks[-1]

    def _step(self, one: Instruction) -> Step:
        is_float = one.modifiers != () and one.modifiers[-1] in FLOATS
        make = STEPS.get((one.opcode, is_float)) or STEPS.get((one.opcode, None))
        if make is None:
            raise UnknownInstruction(f"{one}: the executor has no {one.opcode}")
        step = make(self, one)
        return step if one.guard is None else self._guarded(step, one.guard)

    def _guarded(self, step: Step, guard: Register) -> Step:
        slot = self.slots.read(Register(guard.name), "pred")
        is_negated = guard.is_negated

        def guarded(r: dict, group: Any) -> None:
            kept = ~r[slot] if is_negated else r[slot]
            before = group.where
            if before is not True:
                kept = kept & before
            if kept.all():
                step(r, group)
            elif kept.any():
                group.where = kept
                step(r, group)
                group.where = before

        return guarded

    def _end_of(self, one: Instruction) -> End:
        if one.opcode == "brx":
            return self._end_by_table(one)
        name = None if one.opcode != "bra" else one.operands[0].name
        following, guard = len(self.blocks), one.guard
        if guard is None:
            return lambda r, group: EXIT if name is None else self.block_of(name)
        slot = self.slots.read(Register(guard.name), "pred")

        def end(r: dict, group: Any) -> Any:
            target = EXIT if name is None else self.block_of(name)
            taken = r[slot] != guard.is_negated
            active = taken if group.where is True else taken[group.where]
            if active.all():
                return target
            if not active.any():
                return following
            return np.where(taken, target, following)

        return end

    def _end_by_table(self, one: Instruction) -> End:
        slot = self.slots.read(one.operands[0], "u32")
        names = self.kernel.tables[one.operands[1].name]

        def end(r: dict, group: Any) -> Any:
            targets = np.array([self.block_of(x) for x in names])
            active = r[slot] if group.where is True else r[slot][group.where]
            if active.max() >= len(names):
                raise UnknownInstruction(f"{one} has {len(names)} targets, not {active.max()}")
            found = targets[np.minimum(r[slot], len(names) - 1)]
            return int(found[0]) if (found == found[0]).all() else found

        return end

    @functools.cached_property
    def order(self) -> dict[int, int]:
        """A number for each block: where branches join it is over those of their sides, and behind
        a loop over those of the loop.
        """
        graph = nx.DiGraph()
        graph.add_nodes_from(range(len(self.blocks)))
        graph.add_edges_from((a, b) for a in graph for b in self._followers(a))
        return {EXIT: EXIT} | {at: n for n, at in enumerate(_in_order(graph, 0))}

    def _followers(self, at: int) -> list[int]:
        """Blocks that may follow one."""
        instructions = self.blocks[at].instructions
        last = instructions[-1] if instructions else None
        found = []
        if last is not None and last.opcode == "brx":
            found = [self.block_of(x) for x in self.kernel.tables[last.operands[1].name]]
        elif last is not None and last.opcode == "bra":
            found = [self.block_of(last.operands[0].name)]
        ends = last is not None and last.opcode in ("bra", "brx", "ret", "exit")
        if (not ends or last.guard is not None) and at + 1 < len(self.blocks):
            found.append(at + 1)
        return found

    def block_of(self, label: str) -> int:
        """The block that a label names."""
        return self.starts[self.kernel.labels[label]]

    def sources(self, operands: Iterable[Any], type_: str) -> list[int]:
        """Slots of sources."""
        return [self.slots.read(x, type_) for x in operands]


def _in_order(graph: nx.DiGraph, first: int) -> Iterator[int]:
    """Blocks in topological order, but for the edges back to the first block of each loop."""
    parts = nx.condensation(graph)  # loops, and blocks that are in none
    for part in nx.lexicographical_topological_sort(
        parts, lambda x: min(parts.nodes[x]["members"])
    ):
        members = parts.nodes[part]["members"]
        if len(members) == 1:
            yield from members
            continue
        entries = [b for a, b in graph.edges if b in members and a not in members]
        head = first if first in members else min(entries, default=min(members))
        loop = graph.subgraph(members).copy()
        loop.remove_edges_from([*loop.in_edges(head)])
        yield from _in_order(loop, head)


def unknown(one: Instruction, *modifiers: str) -> UnknownInstruction:
    """The error of an instruction with modifiers that the executor does not know."""
    named = " ".join(f".{x}" for x in modifiers) or "these operands"
    return UnknownInstruction(f"{one}: the executor does not know {named} here")


def without(one: Instruction, *ignored: str) -> list[str]:
    """The modifiers that are left: those given change nothing that is computed here."""
    return [x for x in one.modifiers if x not in ignored]


def names_of(one: Instruction) -> Iterable[str]:
    """The registers that an instruction names."""
    pending = [*one.operands, one.guard]
    while pending:
        x = pending.pop()
        if isinstance(x, Register):
            yield x.name
        elif isinstance(x, Vector):
            pending += x.items
        elif isinstance(x, Pair):
            pending += [x.first, x.second]
        elif isinstance(x, Address):
            pending += [x.base, x.coordinates]
        elif not isinstance(x, Immediate | Name | type(None)):
            raise UnknownInstruction(f"{one}: the operand {x}")


def _targets(kernel: Kernel) -> set[str]:
    """Labels that branches name."""
    found = {x for names in kernel.tables.values() for x in names}
    for one in kernel.instructions:
        if one.opcode == "bra":
            found.add(one.operands[0].name)
    return found


def _entry_of(table: dict, one: Instruction) -> Any:
    """By the longest of its opcode and first modifiers."""
    words = [one.opcode, *one.modifiers]
    for n in range(len(words), 0, -1):
        if (key := ".".join(words[:n])) in table:
            return table[key]
    return None
