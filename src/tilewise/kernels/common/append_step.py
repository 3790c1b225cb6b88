"""An append that was launched before, for other tensors of the same signature: no checks but that
of memory, as only it depends on addresses.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .shared_memory import span_of
from .workspace import allocator_of

Tensor = torch.Tensor


class AppendStep:
    """The launch of an append, and what it makes for a decode step. Holds no tensor."""

    reads: Callable[..., tuple]  # of all addresses those that the decode step takes

    def __init__(
        self,
        program: Any,
        tensors: Sequence[Tensor],
        written: Sequence[int],
        parts: Sequence[Tensor],
    ) -> None:
        """`tensors` are those of a call that are not None, as the `Program` has them, of which some
        are `written`; `parts` are of one memory.
        """
        self.program, self.written = program, written
        spans = [span_of(x) if x.numel() else (0, 0) for x in tensors]
        self.sizes = [stop - first for first, stop in spans]
        self.overlaps = self.overlaps_of([x.data_ptr() for x in tensors])
        self.starts = [x.storage_offset() * x.itemsize for x in parts]
        if parts:
            size, empty = parts[0].untyped_storage().nbytes(), allocator_of(parts[0].device)
            self.new_parts = functools.partial(empty, (size,), (1,), torch.uint8)

    def overlaps_of(self, row: Sequence[int]) -> list[tuple[int, int]]:
        """Tensors whose memory may be that of one that is written, and how far they are from it."""
        overlaps = []
        for n in self.written:
            first = row[n]
            stop = first + self.sizes[n]
            for place, size in enumerate(self.sizes):
                address = row[place]
                if address < stop and first < address + size:
                    overlaps.append((place, address - first))
        return overlaps

    def repeats(self, row: Sequence[int]) -> bool:
        """Whether it could be launched by the addresses of tensors and parts."""
        return self.overlaps_of(row) == self.overlaps and self.program.again_at(row)

    def before(self, decode: Any, reads: Sequence[str]) -> Any:
        """A decode step that launches this first. `reads` are the names of what the decode step
        takes, in its order, as far as it is there.
        """
        places = {name: place for place, name in enumerate(self.program.names)}
        self.reads = operator.itemgetter(*[places[name] for name in reads if name in places])
        decode.append = self
        return decode
