"""A decode step that was launched before, for other tensors of the same signature: no checks, and
addresses as the only arguments.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .alignment import ALIGNMENT
from .relaunch import may_relaunch
from .shared_memory import span_of
from .workspace import allocator_of

Tensor = torch.Tensor


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
    """The memory that a step makes, and the addresses that its launches take. Holds no tensor."""

    # On a stream of the current device, of the addresses of the tensors that are not None, of out,
    # lse and the states
    launch: Callable[[int, list[Any]], None]

    def __init__(
        self,
        device: torch.device,
        read: Sequence[Tensor],
        out: Tensor,
        lse: Tensor,
        states: Sequence[Tensor] = (),
        program: Any = None,
    ) -> None:
        """`read` are the tensors that are not None, and so are those of calls. States lie behind
        each other, or as the slices of a `Program`.
        """
        self.append: Any = None  # the `AppendStep` that is launched first
        self.bytes = [stop - first for first, stop in map(span_of, (*read, out))]
        self.device, self.index = device, device.index
        self.empty = allocator_of(device)
        self.of_out, self.of_lse = room_for(out), room_for(lse)
        *self.starts, size = itertools.accumulate((4 * x.numel() for x in states), initial=0)
        if program is not None:
            self.launch, self.starts, size = program.launch, program.starts, program.size
        self.of_states = floats(size // 4)
        # Of a caller that takes no lse it lies behind the states
        self.lse_start = -(-size // ALIGNMENT) * ALIGNMENT
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
