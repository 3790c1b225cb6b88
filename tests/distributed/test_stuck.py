"""Exchanges between nodes of GPUs that do not end, in a program that makes no further call: each
rank says on stderr which one it waits for, before torch's watchdog would end its process.
"""

import contextlib
import datetime
import io
import os
import re
import signal
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers.lives import Store
from helpers.processes import run
from helpers.waits import SHORT, until

import tilewise.distributed as td
from tilewise.distributed.transport import arena as arenas
from tilewise.distributed.transport import links as transport_links
from tilewise.distributed.transport.links import SAID, Links
from tilewise.distributed.transport.nodes import Message, Nodes, Traffic

CPU = torch.device("cpu")
ALLOWED = 10.0  # seconds, of a clock that does not wait


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


class Event:
    """One of a GPU that is not there, which may have other work before it."""

    is_passed = True

    def record(self, stream):
        pass

    def query(self):
        return self.is_passed


def stuck(rank, victim, kind):
    """The victim is killed or stands still between a barrier and the exchange behind it. One GPU
    does not come to that, and its rank hears of the victim from others.
    """
    torch.cuda.Event, Event.is_passed = Event, rank != 3
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


class Clock:
    """Time that passes as a program sleeps. At some time something happens."""

    def __init__(self):
        self.now, self.at, self.happens = 0.0, 50.0, lambda: None
        self.monotonic = lambda: self.now

    def sleep(self, seconds):
        assert 0 < seconds <= 1 and self.now < 100, "it waits without a pause, or an end"
        self.now += seconds
        if self.now >= self.at:
            self.happens()


@pytest.fixture
def behind(monkeypatch):
    """Links that have begun an exchange, which is behind other work of the GPU."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "is_passed", False)
    monkeypatch.setattr(transport_links, "time", Clock())
    host = SimpleNamespace(timeout=datetime.timedelta(seconds=ALLOWED), ranks=2, epoch=0, number=1)
    host.lost, host.found_lost = None, lambda: None
    host.why_unfinished = lambda peers: f"of {peers}"
    nodes, group = Nodes(((0,), (1,)), 0), SimpleNamespace(_get_backend=lambda device: None)
    links = Links(host, nodes, group=group, device=CPU)
    links.own, links.backend, links.fail = True, Backend(), lambda: None
    work = Work(links.backend)
    links.begin(Traffic([Message(1, 0, 8)], []), [lambda options: work])
    return links


def test_a_gpus_own_work_before_an_exchange_is_no_wait_for_others(behind, capsys):
    clock = transport_links.time
    clock.happens = lambda: setattr(Event, "is_passed", True)
    behind._watch(behind.backend)
    assert 50 + ALLOWED * SAID <= clock.now <= 50 + ALLOWED
    assert "RankLost: of [1]" in capsys.readouterr().err


def test_what_others_have_found_is_told_before_the_gpu_comes_to_an_exchange(behind, capsys):
    clock = transport_links.time
    clock.happens = lambda: setattr(behind.host, "found_lost", lambda: "rank 2 did not")
    behind._watch(behind.backend)
    assert 50 <= clock.now <= 51 and behind.host.lost == "rank 2 did not"
    assert "RankLost: rank 2 did not" in capsys.readouterr().err


@pytest.mark.parametrize("at, ends, until", [(5, True, 5), (5, False, 7.5), (9, False, 10)])
def test_an_error_leaves_an_exchange_its_time_once_the_gpu_comes_to_it(behind, at, ends, until):
    clock, backend = transport_links.time, behind.backend
    owner, what = (backend, "is_aborted") if ends else (Event, "is_passed")
    clock.at, clock.happens = at, lambda: setattr(owner, what, True)
    assert behind.end() == ends
    assert until <= clock.now <= until + 0.1
    behind.host.lost = "rank 1"
    assert behind.end() == ends and clock.now <= until + 0.1


def test_a_call_aborts_as_the_thread_looks_at_its_exchange(behind):
    behind.begun[0].works[-1] = SimpleNamespace(is_completed=lambda: behind.abort() or True)
    assert behind._first() is None
