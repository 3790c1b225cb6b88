"""Programs of calls with a KV cache, and a decode step that was launched before, for other tensors
of the same signature: no checks, and addresses as the only arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .alignment import ALIGNMENT
from .cached import READ_NAMES, Cached
from .direct import may_relaunch
from .operand import names_of, operands_of
from .program import Launch, Program
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


def run(
    cached: Cached, out: Tensor, lse: Tensor, launches_of: Callable[..., Sequence[Launch]]
) -> DecodeStep | None:
    """Writes `out` and `lse` of all queries that belong to a sequence. Returns how it is done
    again, where the call has an entry.
    """
    if not out.numel():
        return None
    program = program_of(cached, out, lse, launches_of)
    tensors = [*cached.tensors, out, lse, *cached.extras.captured]
    program([x for x in tensors if x is not None])
    is_again = program.again is not None and program.takes_addresses
    if cached.entry is None or not is_again or cached.extras.captured:
        return None
    return DecodeStep(program, [x for x in cached.tensors if x is not None], out, lse)


class DecodeStep:
    """The memory that a program makes, and the addresses that it takes. Holds no tensor."""

    def __init__(self, program: Program, read: Sequence[Tensor], out: Tensor, lse: Tensor) -> None:
        """`read` are the tensors that are not None, and so are those of calls."""
        self.append: Any = None  # the `AppendStep` that is launched first
        self.bytes = [stop - first for first, stop in map(span_of, (*read, out))]
        self.index, empty = program.device.index, allocator_of(program.device)
        self.new_out, self.new_lse = (
            functools.partial(empty, tuple(x.shape), x.stride(), x.dtype) for x in (out, lse)
        )
        self.launch, self.starts = program.launch, program.starts
        self.new_states = functools.partial(empty, (program.size,), (1,), torch.uint8)
        # Of a caller that takes no lse it lies behind the states
        self.lse_start = -(-program.size // ALIGNMENT) * ALIGNMENT
        size = self.lse_start + lse.numel() * lse.itemsize
        self.new_both = functools.partial(empty, (size,), (1,), torch.uint8)

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
        index = self.index
        if not may_relaunch(index):
            return None
        row = addresses
        if row is None:
            row = [x.data_ptr() for x in (*tensors, out) if x is not None]
        memory = append = self.append  # memory is held until both are launched
        if append is not None:
            memory = append.new_parts()
            first = memory.data_ptr()
            for start in append.starts:  # a comprehension is a call
                row += (first + start,)
            if not append.repeats(row):
                return None
            row = list(append.reads(row))
        if out is None:
            out = self.new_out()
            row.append(out.data_ptr())
        elif self.may_overlap(row):
            return None
        lse = states = None  # held until the launch: what is given back may at once be another's
        if has_lse:
            lse = self.new_lse()
            row.append(lse.data_ptr())
            if self.starts:
                states = self.new_states()
                base = states.data_ptr()
        else:
            states = self.new_both()
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
