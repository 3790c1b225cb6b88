"""The arena of GPUs: copies by DMA on a stream of their own, and a barrier that waits on
the device, so that a call costs the host launches and no round trip.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ...kernels.common.building import on_device
from ...kernels.common.device_words import ARRIVED
from ...kernels.common.row_table import Table
from ...kernels.portable.copy_table import copy_table
from ...kernels.portable.sum_parts import PartSums
from ...kernels.portable.sum_runs import add_runs
from .copies import Piece
from .device_barrier import DeviceBarrier
from .halves import Arena, Tensors
from .links import Links
from .memory import Memory, synchronize
from .stream_memory import Beside, driver_of

Tensor = torch.Tensor
SLICE_BYTES = 1 << 27  # with less memory, short calls take more slices, each with launches
EVENTS = 16  # of marks that are waited for later than the next one is made


class DeviceArena(Arena):
    """All ranks of one machine, a device each. In the interpreter, on CPUs, the same without
    streams.

    Marks are counted. Copies are made in order, so that a stream that has waited for a mark has
    waited for all before it; where a later mark has taken its event, it waits a little longer.
    """

    slice_bytes = SLICE_BYTES

    def __init__(
        self,
        barrier: DeviceBarrier,
        memory: Memory,
        device: torch.device,
        *,
        links: Links | None = None,
    ) -> None:
        super().__init__(barrier, memory, links=links)
        self.device = device
        self.has_mates = len(barrier.members) > 1  # on this rank's node
        self.has_streams = device.type == "cuda"
        self.side: Any = None  # high priority: copies are few and short beside a kernel's programs
        self.last: Any = None  # the stream of the call, and before it that of the one before
        self.raw = -1  # its address
        self.ready: Any = None  # recorded on it before copies begin
        self.events: list[Any] = []  # on the side stream, in turn
        self.marks = self.waited = 0  # those that were made, and that `last` has waited for
        self.words, self.limit = barrier.signals.words, barrier.nanoseconds
        if links is not None:
            links.words = self.words
        self.arrived = self.words.data_ptr() + self.words.itemsize * ARRIVED
        self.part_sums = PartSums()
        self.driver: Any = None  # its copies cost the host less than torch's
        self.starts: list[int] = []  # addresses of the ranks' blocks
        if self.has_streams:
            self.side = torch.cuda.Stream(device, priority=-1)
            self.ready = torch.cuda.Event()
            self.events = [torch.cuda.Event() for _ in range(EVENTS)]
            self.driver = driver_of(self.words)
        # All ranks or none: those that count pieces publish keys in another order
        answers = self.host.wait("whether pieces are counted", self._gpu_that_counts())
        self.counts_pieces = all(answers) and len({*answers}) == len(answers)

    def _gpu_that_counts(self) -> str:
        """Names this rank's GPU if a kernel on it can wait for pieces. Such a kernel has all SMs,
        and copies need one that are made by torch, within a GPU or from other nodes.
        """
        if not self.has_streams:
            return "" if self.links else str(self.rank)
        if self.links or self.driver is None:
            return ""
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def publish(self, nbytes: int, signature: str) -> Tensor:
        self.barrier.check()
        self._follow()
        half = super().publish(nbytes, signature)
        if self.links is not None and not self.has_mates:  # early: others wait less for it
            self.host.announce(signature)
        return half

    def grow(self, room: int, signature: str) -> None:
        # All ranks have come here, or none: else some would wait for others to grow
        self.barrier.meet(signature, is_new=True)
        synchronize(self.device)
        self.host.meet(signature)  # no rank reads the blocks that go
        self.blocks = []
        self.views.clear()
        self.blocks = self.allocate(room, signature)
        self.starts = [x.data_ptr() for x in self.blocks]
        if self.links is not None:
            self.links.open()

    def meet(self, signature: str) -> None:
        if self.links is not None:  # the device's barrier is of the node
            self.host.meet(signature)
            if not self.has_mates:
                return
            if self.has_streams:
                self.last.wait_stream(self.side)  # which has met the node, too
        super().meet(signature)

    def meet_node(self) -> None:
        if self.has_mates:
            self.barrier.again()

    def copy(self, table: Table, sources: Tensors, targets: Tensors, *, meets: str = "") -> None:
        source_addresses = [x.data_ptr() for x in sources]
        target_addresses = [x.data_ptr() for x in targets]
        if not table.serves(source_addresses + target_addresses):
            super().copy(table, sources, targets=targets, meets=meets)
            return
        addresses: Any = dict(sources=source_addresses, targets=target_addresses)
        launch = functools.partial(copy_table, table, device=self.device, **addresses)
        if meets and self.links is None:
            self.barrier.meet(meets, behind=launch)
            return
        launch()
        if meets:
            self.meet(meets)

    def add_runs(
        self, parts: Tensors, places: Tensor, targets: Tensor | None, totals: Tensors
    ) -> None:
        add_runs(parts, places=places, targets=targets, totals=totals)

    def _copy_piece(self, piece: Piece, target: Tensor) -> None:
        if self.driver is None:
            super()._copy_piece(piece, target)
            return
        source = self.starts[piece.rank] + self.begin_of_half() + piece.start
        to, rows, stream = target.data_ptr() + piece.offset, piece.rows, self.side.cuda_stream
        apart: Any = dict(pitch=piece.pitch, step=piece.step)
        self.driver.copy(stream, to, source, piece.nbytes, rows=rows, **apart)
        self.pulled += rows * piece.nbytes

    def copying(self) -> contextlib.AbstractContextManager[None]:
        if not self.has_streams:
            return contextlib.nullcontext()
        self._follow_caller()
        return Beside(on_device(self.device), self.side, before=self.last)

    def abandon(self, error: BaseException | None) -> None:
        if self.links is not None and not self.links.end():
            self.links.fail()
        super().abandon(error)
        if self.has_streams:  # what an error frees may still be pulled into
            torch.cuda.current_stream(self.device).wait_stream(self.side)
        if error is not None:
            self.barrier.abandon(error)

    def mark(self) -> int:
        """Marks the copies so far, for `arrive`."""
        if self.has_streams:
            self.events[self.marks % EVENTS].record(self.side)
        self.marks += 1
        return self.marks

    def arrive(self, mark: int) -> None:
        if self.has_streams and mark > self.waited:
            self.events[(mark - 1) % EVENTS].wait(self.last)
            self.waited = mark

    def count(self, arrived: int) -> None:
        """Says how many pieces have arrived with the copies so far; barriers set that to 0."""
        if self.has_streams:
            self.driver.write(self.side.cuda_stream, self.arrived, arrived)
        else:
            self.words[ARRIVED] = arrived

    def settle(self, pulled: Sequence[Tensor]) -> None:
        self.barrier.poison(pulled)

    def _follow_caller(self) -> None:
        """Lets the side stream wait for what the call's stream was given so far."""
        self.ready.record(self.last)
        self.ready.wait(self.side)

    def _follow(self) -> None:
        """Orders the current stream after that of the call before, which may read a half."""
        if not self.has_streams:
            return
        refuse_capture()
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        if self.last is not None and raw == self.raw:
            return
        stream = torch.cuda.current_stream(self.device)
        if self.last is not None:
            stream.wait_stream(self.last)
        self.last, self.raw = stream, raw
        if self.links is not None:
            self.links.stream = stream


def refuse_capture() -> None:
    """Raises where a CUDA graph is captured on the current stream. Its barriers would have the
    numbers of the capture, its copies that half of the arena, and no host would look at what they
    found.
    """
    if torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "a captured CUDA graph: barriers are numbered, so a replay would pass or wait for "
            "others at random. Leave tilewise.distributed out of the capture: capture what lies "
            "between its calls, each part as a graph of its own (torch.cuda.make_graphed_callables)"
            '; torch.compile(mode="reduce-overhead") leaves it out by itself'
        )
