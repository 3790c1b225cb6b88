"""Programs of calls with a KV cache, and a decode step that was launched before, for other tensors
of the same signature: no checks, and addresses as the only arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .alignment import ALIGNMENT
from .cached import READ_NAMES, Cached
from .operand import names_of, operands_of
from .program import Launch, Program
from .relaunch import may_relaunch
from .shared_memory import span_of
from .workspace import Workspace, allocator_of

Tensor = torch.Tensor
# What a program reads and writes
NAMES = (*READ_NAMES, "out", "lse", "captured")


def program_of(
    cached: Cached, out: Tensor, lse: Tensor, launches_of: Callable[..., Sequence[Launch]]
) -> Program:
    """The program of a call, whose names are those of the tensors that are there. `launches_of`
    plans it of operands: the call's, its problem, those of `out` and `lse`, and a workspace.
    """
    tensors = *cached.tensors, out, lse, *cached.extras.captured
    operands = operands_of(NAMES, tensors)
    named = zip(names_of(NAMES, len(tensors)), tensors)
    *inputs, of_out, of_lse, captured = operands.values()
    planned = cached.of_tensors(inputs)
    planned = planned._replace(extras=planned.extras._replace(captured=captured))
    work = Workspace(cached.q.device)
    launches = launches_of(planned, cached.problem, of_out, of_lse, work)
    return Program([name for name, x in named if x is not None], launches, work)


def run(program: Program, cached: Cached, out: Tensor, lse: Tensor) -> DecodeStep | None:
    """Writes `out` and `lse`. Returns how it is done again, where the call has an entry."""
    tensors = [*cached.tensors, out, lse, *cached.extras.captured]
    program([x for x in tensors if x is not None])
    is_again = program.again is not None and program.takes_addresses
    if cached.entry is None or not is_again or cached.extras.captured:
        return None
    return DecodeStep(program, [x for x in cached.tensors if x is not None], out, lse)


class Room(NamedTuple):
    """New memory on the current device, as `torch.empty_strided` takes it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def room_for(x: Tensor) -> Room:
    """Room for another x."""
    return Room(tuple(x.shape), x.stride(), x.dtype)


def floats(count: int) -> Room:
    """Room for so many."""
    return Room((count,), (1,), torch.float32)


class DecodeStep:
    """The memory that a program makes, and the addresses that it takes. Holds no tensor."""

    def __init__(self, program: Program, read: Sequence[Tensor], out: Tensor, lse: Tensor) -> None:
        """`read` are the tensors that are not None, and so are those of calls."""
        self.append: Any = None  # the `AppendStep` that is launched first
        self.bytes = [stop - first for first, stop in map(span_of, (*read, out))]
        self.index, self.empty = program.device.index, allocator_of(program.device)
        self.of_out, self.of_lse = room_for(out), room_for(lse)
        self.launch, self.starts = program.launch, program.starts
        self.of_states = floats(program.size // 4)
        # Of a caller that takes no lse it lies behind the states
        self.lse_start = -(-program.size // ALIGNMENT) * ALIGNMENT
        self.of_both = floats(self.lse_start // 4 + math.prod(self.of_lse.shape))

    def __call__(
        self,
        tensors: Sequence[Tensor | None],
        addresses: list[int] | None,
        out: Tensor | None = None,
        has_lse: bool = True,
    ) -> tuple[Tensor, Tensor | None] | None:
        """`out` and `lse` of `Cached.tensors`, or None for an lse that is not asked; None where the
        step may not be launched past Triton. `addresses` are those of the tensors that are not
        None, and of `out` where it is given, in a list that may grow; or None.
        """
        index, empty = self.index, self.empty
        if not may_relaunch(index):
            return None
        row = addresses
        if row is None:
            row = [x.data_ptr() for x in (*tensors, out) if x is not None]
        memory = append = self.append  # memory is held until both are launched
        if append is not None:
            memory = append.empty(*append.room)
            first = memory.data_ptr()
            for start in append.starts:  # a comprehension is a call
                row += (first + start,)
            if not append.repeats(row):
                return None
            row = list(append.reads(row))
        if out is None:
            out = empty(*self.of_out)
            row.append(out.data_ptr())
        elif self.may_overlap(row):
            return None
        lse = states = None  # held until the launch: what is given back may at once be another's
        if has_lse:
            lse = empty(*self.of_lse)
            row.append(lse.data_ptr())
            if self.starts:
                states = empty(*self.of_states)
                base = states.data_ptr()
        else:
            states = empty(*self.of_both)
            base = states.data_ptr()
            row.append(base + self.lse_start)
        for start in self.starts:
            row.append(base + start)
        self.launch(torch._C._cuda_getCurrentRawStream(index), row)
        return out, lse

    def may_overlap(self, row: Sequence[int]) -> bool:
        """Whether `out`, whose address comes last, lies where a tensor that is read may: such a
        call is checked again.
        """
        first = row[-1]
        stop = first + self.bytes[-1]
        for address, size in zip(row[:-1], self.bytes):
            if address < stop and first < address + size:
                return True
        return False
