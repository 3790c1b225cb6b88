"""A barrier for ranks that read each other's memory. It carries what each of them calls, so that
a rank that calls something else, or nothing at all, is a named error on the others and no wait
without an end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...errors import ArgumentError
from ..layouts.group import store_of, timeout_of

RAISED = "!"  # begins what a rank leaves that raised an error and does not come
NOTE = "\0"  # begins what a rank adds, which is not compared
ENDED = "tilewise_ended"  # of an error, the epoch that it began
FIRST = "the first call of the process group"
POLL = 0.001  # seconds between looks at the store, while ranks agree


class RankMismatch(RuntimeError):
    """The ranks did not make the same call; the message says what each one called."""


class RankLost(RuntimeError):
    """Ranks did not make a call within the group's timeout; the message names them."""


class PullTimeout(RuntimeError):
    """Keys that a kernel waited for did not arrive within the timeout; the message names them."""


class Barrier:
    """Barriers of a group, one after another, over its store.

    Each rank leaves what it calls, waits for what the others leave, and compares. The n-th barrier
    proves that all ranks have passed the one before it. An error ends an epoch, on the rank that
    raises it and on those that learn of it, wherever they are: in the next one all count from 0.
    """

    def __init__(self, group: Any) -> None:
        store = store_of(group)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout_of(group)
        self.epoch = self.number = 0
        self.signature = ""  # of the last barrier
        self.left: list[str] = []  # keys of epochs that have ended
        self.lost: str | None = None  # why no further call can be made
        # Ranks that share memory
        self.nodes: tuple[tuple[int, ...], ...] = (tuple(range(self.ranks)),)
        # Of groups that torch splits from one, several have one name, and so one store
        first = min(dist.get_process_group_ranks(group))
        keys = [f"tilewise/{first}/{rank}" for rank in range(self.ranks)]
        self.store = store
        self.store = distributed_c10d.PrefixStore(f"tilewise/{self._agree(keys)}", store)
        self.wait("tilewise.distributed")  # so all have agreed
        store.delete_key(keys[self.rank])

    def _agree(self, keys: list[str]) -> str:
        """Agrees on a name for this life of the group, of which an earlier one may have left keys:
        each rank draws a nonce, and repeats what the others say, until all repeat its
        own.
        """
        mine, repeated, pause = os.urandom(8).hex(), "", POLL
        deadline = time.monotonic() + self.timeout.total_seconds()
        try:
            self.store.set(keys[self.rank], mine)
            self.store.wait(keys, self.timeout)
            while True:
                texts = [self.store.get(key).decode().split() for key in keys]
                drawn = " ".join(x[0] for x in texts)
                absent = [rank for rank, x in enumerate(texts) if mine not in x[1:]]
                if drawn == repeated and not absent:
                    return hashlib.sha256(drawn.encode()).hexdigest()[:16]
                if time.monotonic() > deadline:
                    raise RankLost(self.absence(absent, FIRST))
                if drawn != repeated:
                    self.store.set(keys[self.rank], f"{mine} {drawn}")
                    repeated = drawn
                else:
                    time.sleep(pause)
                    pause = min(2 * pause, 0.05)
        except dist.DistError as error:
            raise RankLost(self._why(FIRST, keys, error=error)) from error

    def wait(self, signature: str, note: str = "") -> list[str]:
        """Waits until every rank has come with the same call; returns each rank's note."""
        self.signature = signature
        texts = [x.split(NOTE) for x in self._gather(signature, note)]
        for rank, (other, *_) in enumerate(texts):
            if other.startswith(RAISED + RankLost.__name__):
                self.lost = other.partition(": ")[2]
                raise RankLost(self.lost)
            if other.startswith(RAISED):
                self.end(f"{self.named([rank])} raised {other.removeprefix(RAISED)}")
        for rank, (other, *_) in enumerate(texts):
            if other != signature:
                pairs = sorted([(self.rank, signature), (rank, other)], reverse=True)
                self.end("; ".join(f"{self.named([rank])} called {text}" for rank, text in pairs))
        return [x[-1] for x in texts]

    def _gather(self, signature: str, note: str) -> list[str]:
        """Returns what each rank left at this barrier. The last one that reads it deletes it."""
        if self.lost is not None:
            raise RankLost(f"{self.lost}; make a new process group")
        number = self.number + 1
        keys = [self._key(number, rank) for rank in range(self.ranks)]
        try:
            self.store.set(keys[self.rank], f"{signature}{NOTE}{note}")
            self.number = number
            self.store.wait(keys, self.timeout)
            store: Any = self.store
            if store.has_extended_api():  # one round trip
                texts = [x.decode() for x in store.multi_get(keys)]
            else:
                texts = [store.get(key).decode() for key in keys]
            if self.store.add(self._key(number), 1) == self.ranks:
                self._delete([*keys, self._key(number)])
            self._delete(self.left)  # all have come to this epoch, and so read those
        except dist.DistError as error:
            self.lost = self._why(signature, keys, error=error)
            raise RankLost(self.lost) from error
        self.left = []
        return texts

    def end(self, why: str) -> NoReturn:
        """Raises what all ranks find, each for itself."""
        error = RankMismatch(why)
        self.abandon(error)
        raise error

    def abandon(self, error: BaseException) -> bool:
        """Leaves an error for ranks that wait, and ends the epoch; False if none waits."""
        if self.lost is not None or vars(error).get(ENDED) == (id(self), self.epoch):
            return False
        keys = [self._key(self.number + step, self.rank) for step in range(3)]
        self.left += keys + [self._key(self.number + step) for step in range(3)]
        self.epoch, self.number = self.epoch + 1, 0  # first: no later call may meet at these
        vars(error)[ENDED] = id(self), self.epoch
        if not isinstance(error, RankMismatch):
            with contextlib.suppress(dist.DistError):
                is_there = self.store.check(keys[1:2])  # where it was interrupted as it came
                self.store.set(keys[1 + is_there], f"{RAISED}{type(error).__name__}: {error}")
        return True

    def lose(self, why: str) -> NoReturn:
        """Raises what this rank alone has found, of ranks that are lost, and leaves it for all."""
        error = RankLost(f"call {self.number}, {why}")
        self.abandon(error)
        self.lost = str(error)
        raise error

    def named(self, ranks: Sequence[int]) -> str:
        """Returns ranks in words, with their nodes where there are several."""
        return listed(ranks, self.nodes if len(self.nodes) > 1 else ())

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            self.store.delete_key(key)

    def _key(self, number: int, *rank: int) -> str:
        """Returns the key of a rank's text at a barrier; without a rank, of a count of readers."""
        return "/".join(map(str, (self.epoch, number, *rank)))

    def _why(self, signature: str, keys: list[str], *, error: Exception) -> str:
        try:
            if (reason := self.reported(signature, keys)) is not None:
                return reason
            absent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        except dist.DistError:
            return (
                f"call {self.number}, {signature}: the store of the process group, which rank 0 or "
                f"torchrun holds, does not answer ({error})"
            )
        return self.absence(absent, f"call {self.number}, {signature}")

    def reported(self, signature: str, keys: list[str] | None = None) -> str | None:
        """Returns why a call did not end, if another rank has left it at a barrier, by default the
        next one: of several nodes, one that waits for a rank of another.
        """
        if len(self.nodes) == 1:
            return None
        time.sleep(min(1.0, self.timeout.total_seconds() / 4))  # it may be about to
        if keys is None:
            keys = [self._key(self.number + 1, rank) for rank in range(self.ranks)]
        for rank, key in enumerate(keys):
            text = self.store.get(key).decode() if self.store.check([key]) else ""
            if text.startswith(RAISED + RankLost.__name__):
                return text.partition(": ")[2]
            if text.startswith(RAISED):
                text = f"{self.named([rank])} raised {text.removeprefix(RAISED)}"
                return f"call {self.number}, {signature}, did not end: {text}"
        return None

    def absence(self, absent: list[int], call: str) -> str:
        """Writes the message that these ranks did not come to a call."""
        return (
            f"{self.named(absent)} of {self.ranks} did not come to {call}, within "
            f"{self.timeout.total_seconds():g} s, the time-out of the group: dead, slower than "
            "that, or not making the same calls"
        )


def listed(ranks: Sequence[int], nodes: Sequence[Sequence[int]] = ()) -> str:
    """Ranks in words, with the nodes that they are of.

    >>> listed([1]), listed([1, 3]), listed([3], [(0, 1), (2, 3)])
    ('rank 1', 'ranks 1, 3', 'rank 3 (node 1)')
    """
    homes = {x: f" (node {number})" for number, members in enumerate(nodes) for x in members}
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(x) + homes.get(x, '') for x in ranks)}"


def check_group(group: Any, device: torch.device) -> None:
    """Checks that a group's ranks can meet on a device."""
    kind, name = ("CPU", "gloo") if device.type == "cpu" else ("GPU", "nccl")
    try:
        group._get_backend(device)
    except RuntimeError as error:
        raise ArgumentError(
            f"the process group has no backend for the {kind}: make it with "
            f'init_process_group("{name}"), or "cpu:gloo,cuda:nccl"'
        ) from error
