"""Exchanges between nodes of GPUs that do not end, in a program that makes no further call: each
rank says on stderr which one it waits for, before torch's watchdog would end its process.
"""

import contextlib
import io
import os
import re
import signal
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers.lives import Store
from helpers.processes import run
from helpers.waits import SHORT, until

import tilewise.distributed as td
from tilewise.distributed.transport import arena as arenas
from tilewise.distributed.transport.links import Links
from tilewise.distributed.transport.nodes import Message, Nodes, Traffic

CPU = torch.device("cpu")


class Backend:
    """A communicator of GPUs that are not there."""

    is_aborted = False

    def abort(self):
        self.is_aborted = True


class Work(NamedTuple):
    """A call of NCCL's that ends as its communicator is aborted."""

    backend: Backend

    def is_completed(self):
        return self.backend.is_aborted


def stuck(rank, victim, kind):
    """The victim is killed or stands still between a barrier and the exchange behind it."""
    host = arenas.host_of(dist.group.WORLD)
    host.nodes = (0, 1), (2, 3)
    links = Links(host, Nodes(host.nodes, rank), group=dist.group.WORLD, device=CPU)
    links.own, links.backend, failed = True, Backend(), []
    links.fail = lambda: failed.append(rank)
    links.watch()
    store = Store(rank, 4).store
    host.meet("a call")
    if rank != victim:
        say(links, victim, failed=failed)
    elif kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    store.add("ended", 1)  # rank 0 has the store
    assert rank or until(lambda: store.add("ended", 0) >= 3, "all have ended")


def say(links, victim, *, failed):
    """The victim is named on stderr and in the next call, by each rank that waits for it."""
    peers = victim, (links.nodes.rank + 2) % 4
    messages = [Message(x, 0, 8) for x in peers]
    work, name = Work(links.backend), rf"rank {victim} (node {victim // 2}) did not exchange"
    with contextlib.redirect_stderr(io.StringIO()) as output:
        links.begin(Traffic(messages, messages), [lambda tag: work])
        until(work.is_completed, "the exchange is aborted")
    assert f"RankLost: call 2, a call: {name}" in output.getvalue(), output.getvalue()
    assert failed and links.backend is None
    with pytest.raises(td.RankLost, match=re.escape(name)):
        links.host.meet("the next call")


@pytest.mark.parametrize("kind", ["killed", "still"])
def test_the_rank_is_named_without_a_further_call(kind):
    run(stuck, 4, 1, kind, timeout=SHORT, killed=(1,) if kind == "killed" else ())
