"""What ranks of different nodes exchange: batched sends and receives of torch.distributed, by NCCL
between GPUs and by gloo between CPUs.

Barriers of all ranks come first, so that both ends have made the same call; then only an end that
dies or stands still can keep the other waiting, and that one is named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .failure import Barrier, check_group
from .nodes import Nodes, Traffic

Tensor = torch.Tensor
View = Callable[[int, int, int], Tensor]  # of a rank's half, bytes [start, stop)
EPOCH = 1 << 20  # barriers: tags of an epoch
TAGS = 1 << 31


class Links:
    """The sends and receives of a rank whose group has several nodes."""

    def __init__(self, host: Barrier, nodes: Nodes, *, group: Any, device: torch.device) -> None:
        self.host, self.nodes, self.group = host, nodes, group
        self.pending: list[Any] = []  # exchanges that were begun and not finished
        check_group(group, device)
        if device.type == "cuda":  # NCCL wants all ranks at the first of its calls, not a few
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def begin(self, traffic: Traffic, view: View) -> list[tuple[int, Any]]:
        """Begins to exchange bytes of this rank's half, and of its mirrors of others'."""
        # What an error has left of an earlier call is never taken for this one's
        tag = (self.host.epoch * EPOCH + self.host.number) % TAGS
        options: dict[str, Any] = dict(group=self.group, tag=tag)
        ops = []
        for peer, start, stop in traffic.sends:
            sent = view(self.nodes.rank, start, stop)
            ops.append(dist.P2POp(dist.isend, sent, group_peer=peer, **options))
        for peer, start, stop in traffic.receives:
            received = view(peer, start, stop)
            ops.append(dist.P2POp(dist.irecv, received, group_peer=peer, **options))
        peers = [x.peer for x in traffic.sends + traffic.receives]
        works: list[Any] = []
        try:
            works = dist.batch_isend_irecv(ops) if ops else works
        except RuntimeError as error:
            self._lose(peers, error)
        exchange = list(zip(peers, works))
        self.pending.append(exchange)
        return exchange

    def finish(self, works: Sequence[tuple[int, Any]]) -> None:
        """Waits for an exchange: on a CPU the process, else the current stream."""
        for peer, work in works:
            try:
                work.wait()
            except RuntimeError as error:
                self._lose([peer], error)
        self.pending = [x for x in self.pending if x is not works]

    def settle(self) -> None:
        """Ends what an error has left: the other ends have begun it, too, and it still writes."""
        while self.pending:
            for _, work in self.pending.pop():
                with contextlib.suppress(RuntimeError):
                    work.wait()

    def _lose(self, peers: list[int], error: Exception) -> NoReturn:
        host = self.host
        host.lose(
            f"{host.signature}: {host.named(sorted(set(peers)))} did not exchange what it needs "
            f"with {host.named([self.nodes.rank])} within {host.timeout.total_seconds():g} s, the "
            f"time-out of the group ({str(error).splitlines()[0]})"
        )
