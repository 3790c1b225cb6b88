"""What the ranks of a group say to each other before they read each other's memory: a barrier that
carries what each of them calls, so that a rank that calls something else, or nothing at all, is a
named error on the others and no wait without an end.
"""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..errors import ArgumentError

RAISED = "!"  # begins what a rank leaves that raised an error and does not come
NOTE = "\0"  # begins what a rank adds, which is not compared


class RankMismatch(RuntimeError):
    """The ranks of a group did not make the same call; the message says what each one called."""


class RankLost(RuntimeError):
    """Ranks of a group did not come to a call within the group's time-out; the message names
    them.
    """


class PullTimeout(RuntimeError):
    """Keys that a running kernel waits for did not arrive within the group's time-out; the message
    says which.
    """


class Barrier:
    """Barriers of a group, one after another, over its store.

    Each rank leaves what it calls, waits for what the others leave, and compares. The n-th barrier
    proves that all ranks have passed the one before it.
    """

    def __init__(self, group: Any) -> None:
        self.store = distributed_c10d._get_process_group_store(group)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout_of(group)
        self.number = self.passed = 0
        self.oldest = 1  # of those that this rank has left, the first that is still there
        self.abandoned = 0  # the last barrier that this rank has left without a wait
        self.lost: str | None = None  # why no further call can be made

    def wait(self, signature: str, note: str = "") -> list[str]:
        """Returns once every rank has come with the same call; each rank's note."""
        found = [x.split(NOTE) for x in self._gather(signature, note)]
        for rank, (other, *_) in enumerate(found):
            if other.startswith(RAISED):
                raise RankMismatch(f"rank {rank} raised {other.removeprefix(RAISED)}")
        for rank, (other, *_) in enumerate(found):
            if other != signature:
                first, second = sorted([(self.rank, signature), (rank, other)])
                raise RankMismatch(
                    f"rank {second[0]} called {second[1]}; rank {first[0]} called {first[1]}"
                )
        return [x[-1] for x in found]

    def _gather(self, signature: str, note: str) -> list[str]:
        """What each rank has left at this barrier."""
        if self.lost is not None:
            raise RankLost(f"{self.lost}; make a new process group")
        keys = [self._key(self.number + 1, rank) for rank in range(self.ranks)]
        try:
            self._leave(f"{signature}{NOTE}{note}")
            self.store.wait(keys, self.timeout)
            found = [self.store.get(key).decode() for key in keys]
        except dist.DistError as error:
            self.lost = self._why(signature, keys, error)
            raise RankLost(self.lost) from error
        self.passed = self.number
        return found

    def abandon(self, error: BaseException) -> None:
        """Leaves an error for the ranks that wait, and waits for none of them."""
        if self.lost is None and not isinstance(error, RankMismatch):
            self._leave(f"{RAISED}{type(error).__name__}: {error}")
            self.abandoned = self.number

    def catch_up(self, signature: str) -> None:
        """After `abandon`, before this rank's memory is written to again: waits until all have
        come to that barrier, and so have read what the call before it published.
        """
        if not self.abandoned or self.lost is not None:
            return
        keys = [self._key(self.abandoned, rank) for rank in range(self.ranks)]
        try:
            self.store.wait(keys, self.timeout)
        except dist.DistError as error:
            self.lost = self._why(signature, keys, error)
            raise RankLost(self.lost) from error
        self.abandoned = 0

    def _leave(self, what: str) -> None:
        self.number += 1
        self.store.set(self._key(self.number, self.rank), what)
        while self.oldest < self.passed:  # all have come to the barrier after it, and so read it
            self.store.delete_key(self._key(self.oldest, self.rank))
            self.oldest += 1

    def _key(self, number: int, rank: int) -> str:
        return f"tilewise/{number}/{rank}"

    def _why(self, signature: str, keys: list[str], error: Exception) -> str:
        seconds = self.timeout.total_seconds()
        try:
            absent = [str(rank) for rank, key in enumerate(keys) if not self.store.check([key])]
        except dist.DistError:
            return (
                f"call {self.number}, {signature}: the store of the process group, which rank 0 or "
                f"torchrun holds, does not answer ({error})"
            )
        ranks = "rank" if len(absent) == 1 else "ranks"
        return (
            f"{ranks} {', '.join(absent)} of {self.ranks} did not come to call {self.number}, "
            f"{signature}, within {seconds:g} s, the time-out of the group: dead, slower than "
            "that, or not making the same calls"
        )


def timeout_of(group: Any) -> datetime.timedelta:
    """How long the group's own collectives wait; of a backend that does not say, its store."""
    store: Any = distributed_c10d._get_process_group_store(group)
    for kind in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # it has no backend for these
            options = getattr(group._get_backend(torch.device(kind)), "options", None)
            return getattr(options, "_timeout", store.timeout)
    return store.timeout


def check_cpu_group(group: Any) -> None:
    """A group whose ranks meet on the CPU."""
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError as error:
        raise ArgumentError(
            "the process group has no backend for the CPU: make it with "
            'init_process_group("gloo"), or "cpu:gloo,cuda:nccl"'
        ) from error
