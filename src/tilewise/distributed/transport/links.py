"""What ranks of different nodes exchange: sends and receives, by NCCL between GPUs, those of all
ranks together, and by gloo between CPUs.

Barriers of all ranks come first, so that both ends have made the same call; then only an end that
dies or stands still can keep the other waiting, and that one is named.

On GPUs the host does not wait for an exchange. One that an error has left unfinished stays on the
stream until it is aborted, so NCCL has a communicator of its own here, made again after an error.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...kernels.common.device_words import FAILED
from .barrier import Barrier
from .failure import check_group
from .nodes import Nodes, Traffic

Tensor = torch.Tensor
View = Callable[[int, int, int], Tensor]  # of a rank's half, bytes [start, stop)
Call = Callable[[Any], Any]  # of a tag, or of NCCL's options
ALL_TO_ALL = dist.AllToAllOptions()
EPOCH = 1 << 20  # barriers: tags of an epoch
TAGS = 1 << 31
POLL = 0.001  # seconds between looks at what has not ended
LATER = 2  # times our time-out, after which torch's watchdog ends the process
# Of our time-out, after which a rank says which ranks an exchange waits for: before the watchdog
# ends the process for a collective of the program's behind it
SAID = 0.75


class Exchange:
    """Torch's work of sends and receives, the ranks of each, and a GPU event before them."""

    def __init__(self, peers: list[list[int]], works: list[Any], before: Any) -> None:
        self.peers, self.works, self.before = peers, works, before
        self.begun, self.reached = time.monotonic(), math.inf  # by the host, by the GPU


class Links:
    """The sends and receives of a rank whose group has several nodes."""

    def __init__(self, host: Barrier, nodes: Nodes, *, group: Any, device: torch.device) -> None:
        self.host, self.nodes, self.device = host, nodes, device
        self.begun: deque[Exchange] = deque()  # and not ended
        self.lock = threading.Lock()  # for what finds that one has ended
        self.stream: Any = None  # of the call, on GPUs
        self.tag, self.before = -1, None  # of the last exchange
        self.words: Any = None  # on the device, of which one says that what it has is no result
        check_group(group, device)
        self.own = device.type == "cuda"  # whether the communicator is
        self.backend: Any = None if self.own else group._get_backend(device)
        self.epoch = -1  # in which it was made

    def open(self) -> None:
        """Makes a communicator, on all ranks or none: at first, and after an error."""
        if not self.own or self.epoch == self.host.epoch:
            return
        self.abort()  # an error may have ended the epoch without this rank's
        host = self.host
        store = distributed_c10d.PrefixStore(f"nodes/{host.epoch}", host.store)
        new_options: Any = dist.ProcessGroupNCCL.Options
        options = new_options(is_high_priority_stream=True)
        options._timeout = LATER * host.timeout
        self.backend = dist.ProcessGroupNCCL(store, host.rank, host.ranks, options)
        # NCCL wants all ranks at the first of its calls, not a few
        self.backend.allreduce([torch.zeros(1, device=self.device)]).wait()
        self.epoch = host.epoch
        self.watch()

    def calls_of(self, traffic: Traffic, view: View) -> list[Call]:
        """Returns the sends and receives of bytes of this rank's half, and of its mirrors. A call
        of NCCL has one of each rank: the first of all, then the second.
        """
        rank, backend = self.nodes.rank, self.backend
        sends = [(peer, view(rank, start, stop)) for peer, start, stop in traffic.sends]
        receives = [
            (peer, view(rank if traffic.is_in_place else peer, start, stop))
            for peer, start, stop in traffic.receives
        ]
        if not self.own:
            calls = [functools.partial(backend.send, [x], peer) for peer, x in sends]
            return calls + [functools.partial(backend.recv, [x], peer) for peer, x in receives]
        calls = []
        while sends or receives:
            outputs, receives = self._first_of_each(receives)
            inputs, sends = self._first_of_each(sends)
            calls.append(functools.partial(backend.alltoall, outputs, inputs))
        return calls

    def _first_of_each(self, messages: list[tuple[int, Tensor]]) -> tuple[list[Tensor], list[Any]]:
        """Returns the first message of each rank, or an empty tensor, and those that are left."""
        nothing, left = torch.empty(0, dtype=torch.uint8, device=self.device), []
        first = [nothing] * self.host.ranks
        for peer, x in messages:
            if first[peer] is nothing:
                first[peer] = x
            else:
                left.append((peer, x))
        return first, left

    def begin(self, traffic: Traffic, calls: Sequence[Call]) -> Exchange:
        """Begins to exchange, on GPUs behind what the current stream was given."""
        if not calls:
            return Exchange([], [], before=None)
        # What an error has left of an earlier call is never taken for this one's
        tag = (self.host.epoch * EPOCH + self.host.number) % TAGS
        if self.own and tag != self.tag:  # exchanges of one barrier are behind the same work
            self.tag, self.before = tag, torch.cuda.Event()
            self.before.record(self.stream)
        try:
            works = [call(ALL_TO_ALL if self.own else tag) for call in calls]
        except RuntimeError as error:
            self._lose(traffic.peers, error)
        peers = [traffic.peers] * len(works) if self.own else [[x] for x in traffic.peers]
        exchange = Exchange(peers, works, before=self.before)
        self.begun.append(exchange)
        return exchange

    def finish(self, exchange: Exchange) -> None:
        """Waits for an exchange: on a CPU the process, else the current stream."""
        for peers, work in zip(exchange.peers, exchange.works):
            try:
                work.wait()
            except RuntimeError as error:
                self._lose(peers, error)
        if exchange.works and not self.own:
            self.begun.remove(exchange)

    def end(self) -> bool:
        """Waits on the host for exchanges, which others may have left; whether they ended."""
        wait = self.host.timeout.total_seconds() / 4  # meanwhile others wait for this rank
        now = time.monotonic()
        while self.own and (first := self._first()) is not None:
            until = now + min(max(first.reached - now, 0.0), 3 * wait) + wait
            if self.host.lost is not None or time.monotonic() > until:
                return False
            time.sleep(POLL)
        return True

    def _first(self) -> Exchange | None:
        """Returns the first exchange that has not ended, and notes whether the GPU is there."""
        with self.lock:
            begun = self.begun  # which another thread may abort
            while begun and begun[0].works[-1].is_completed():
                begun.popleft()
            first = begun[0] if begun else None
        if first is not None and first.reached == math.inf and first.before.query():
            first.reached = time.monotonic()
        return first

    def fail(self) -> None:
        """Tells the device that keys will not come, so what kernels make without them is NaN."""
        with torch.cuda.stream(stream := torch.cuda.Stream(self.device)):
            self.words[FAILED] = 1
        stream.synchronize()

    def watch(self) -> None:
        """Watches exchanges on this communicator, beside the program."""
        threading.Thread(target=self._watch, args=(self.backend,), daemon=True).start()

    def _watch(self, backend: Any) -> None:
        """Says on stderr which ranks an exchange waits for, and ends it: a program that makes no
        further call would hear of it by torch's watchdog alone, which knows no ranks. What the GPU
        does before it comes to an exchange takes its time, unless another rank finds one lost.
        """
        host = self.host
        seconds = SAID * host.timeout.total_seconds()
        while self.backend is backend and host.lost is None:
            time.sleep(min(seconds / 16, 1.0))
            first = self._first()
            if first is None or time.monotonic() < first.begun + seconds:
                continue
            is_late = time.monotonic() > first.reached + seconds
            why = host.why_unfinished(peers=first.peers[0]) if is_late else host.found_lost()
            if why is not None and self.backend is backend and host.lost is None:
                host.lost = why
                sys.stderr.write(f"tilewise.distributed.RankLost: {why}\n")
                self.fail()
                self.abort()

    def settle(self) -> None:
        """Ends what an error has left: the other ends have begun it, too, and it still writes."""
        if self.own:
            self.abort()
        while self.begun:
            for work in self.begun.pop().works:
                with contextlib.suppress(RuntimeError):
                    work.wait()

    def abort(self) -> None:
        """Ends NCCL's kernels, which may wait for a rank that does not come, and its memory."""
        backend, self.backend, self.begun = self.backend, None, deque()
        if backend is not None:
            with contextlib.suppress(RuntimeError):
                backend.abort()

    def _lose(self, peers: list[int], error: Exception) -> NoReturn:
        host = self.host
        host.lose(f"{host.unfinished(peers=peers)} ({str(error).splitlines()[0]})")
