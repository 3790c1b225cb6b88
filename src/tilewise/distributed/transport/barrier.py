"""A barrier for ranks that read each other's memory. It carries what each of them calls, so that
a rank that calls something else, or nothing at all, is a named error on the others and no wait
without an end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import zlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..layouts.group import store_of, timeout_of
from .failure import RankLost, RankMismatch, listed

NOTE = "\0"  # begins what a rank adds to its text, which is not compared
SUM, TURNS = 44, 7  # bits of the sum of fingerprints, of up to 4,096 ranks, below that of turns
OVER = 1 << 62  # in the place of an epoch's sums, once an error has ended it
LATE = 0.05  # seconds of waiting, after which a rank says that it is here
# Keys of an epoch. Of three sums an error ends the next two, while ranks still look at the first
ERROR, SUMS = "error", ("sum 0", "sum 1", "sum 2")
ENDED = "tilewise_ended"  # of an error, the epoch that it began
FIRST = "the first call of the process group"
POLL = 0.001  # seconds between looks at the store, while ranks agree
SOON, LONGEST = 0.005, 0.01  # seconds before a host pauses (with 0.0002 it is late), and of pauses


class Barrier:
    """Barriers of a group, one after another, over its store.

    Each rank adds a turn and the fingerprint of its call to a sum in the store, in the place of
    what it had there three barriers ago, and looks until the sum has the turns of all: two round
    trips, and one for the last rank. Where the sum of fingerprints is not that of one call, ranks
    leave texts, and compare these.

    The n-th barrier proves that all ranks have passed the one before it. An error ends an epoch, on
    the rank that raises it and on those that learn of it, wherever they are: in the next one all
    count from 0.
    """

    def __init__(self, group: Any) -> None:
        store = store_of(group)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = timeout_of(group)
        self.epoch = self.number = self.passed = 0  # `passed`: the last one that all came to
        self.signature = ""  # of the last barrier
        self.added = [0] * len(SUMS)  # this rank's part of each
        self.total = 0  # of all ranks, as this one has come
        self.left: list[str] = []  # keys that all have read at the next barrier
        self.ended: list[str] = []  # keys of the last epoch that has ended
        self.lost: str | None = None  # why no further call can be made
        # Ranks that share memory
        self.nodes: tuple[tuple[int, ...], ...] = (tuple(range(self.ranks)),)
        # Of groups that torch splits from one, several have one name, and so one store
        first = min(dist.get_process_group_ranks(group))
        keys = [f"tilewise/{first}/{rank}" for rank in range(self.ranks)]
        self.store = store
        self.store = distributed_c10d.PrefixStore(f"tilewise/{self._agree(keys)}", store)
        self.meet("tilewise.distributed")  # so all have agreed
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
            raise RankLost(self._why(FIRST, keys, error)) from error

    def wait(self, signature: str, note: str = "") -> list[str]:
        """Waits until every rank has come with the same call; returns each rank's note."""
        self._arrive(signature)
        return self._compare(f"{signature}{NOTE}{note}")

    def meet(self, signature: str) -> None:
        """Waits until every rank has come with the same call."""
        if not self._arrive(signature):
            self._compare(signature)

    def announce(self, signature: str) -> None:
        """Says that this rank comes to the next barrier, which waits for the others later."""
        if self.lost is not None:
            raise RankLost(f"{self.lost}; make a new process group")
        self.signature, self.number = signature, self.number + 1
        place, turn = self.number % len(SUMS), 1 + self.number // len(SUMS) % TURNS
        added = (turn << SUM) + zlib.crc32(signature.encode())
        step, self.added[place] = added - self.added[place], added
        try:
            self.total = self.store.add(self._key(SUMS[place]), step)
        except dist.DistError as error:
            self._miss("here", error)

    def _arrive(self, signature: str) -> bool:
        """Waits until every rank has come; whether their calls are the same."""
        if self.number == self.passed or self.lost is not None:
            self.announce(signature)
        place, begun, is_late = self.number % len(SUMS), time.monotonic(), False
        key, total, expected = self._key(SUMS[place]), self.total, self.added[place] * self.ranks
        try:
            while total >> SUM != expected >> SUM:
                waited = time.monotonic() - begun
                if total >= OVER // 2:
                    self._tell()
                if waited > LATE and not is_late:
                    is_late = True
                    self.store.set(self._keys("here")[self.rank], "")
                self._pause(waited, "here")
                total = self.store.add(key, 0)
            self.passed = self.number
            if is_late:
                self.store.delete_key(self._keys("here")[self.rank])
            self._delete(self.left)
        except dist.DistError as error:
            self._miss("here", error)
        self.left = []
        return total == expected

    def _compare(self, text: str) -> list[str]:
        """Waits for the texts of all; returns their notes, or raises where calls differ."""
        keys, begun = self._keys("text"), time.monotonic()
        try:
            self.store.set(keys[self.rank], text)
            while not self.store.check(keys):
                # Another rank may raise over all texts before this one has looked again
                if self.store.check([self._key(ERROR)]) and not self.store.check(keys):
                    self._tell()
                self._pause(time.monotonic() - begun, "text")
            store: Any = self.store
            if store.has_extended_api():  # one round trip
                texts = [x.decode().split(NOTE) for x in store.multi_get(keys)]
            else:
                texts = [store.get(key).decode().split(NOTE) for key in keys]
        except dist.DistError as error:
            self._miss("text", error)
        self.left.append(keys[self.rank])
        for rank, (other, *_) in enumerate(texts):
            if other != self.signature:
                pairs = sorted([(self.rank, self.signature), (rank, other)], reverse=True)
                self.end("; ".join(f"{self.named([rank])} called {text}" for rank, text in pairs))
        return [x[-1] for x in texts]

    def _pause(self, waited: float, kind: str) -> None:
        """Sleeps for a part of the time that was waited; RankLost after the time-out."""
        if waited > self.timeout.total_seconds():
            self._miss(kind)
        if waited > SOON:
            time.sleep(min(waited / 4, LONGEST))

    def _miss(self, kind: str, error: Exception | None = None) -> NoReturn:
        """Raises that ranks did not come, or that the store does not answer."""
        self.lost = self._why(self.signature, self._keys(kind), error)
        raise RankLost(self.lost) from error

    def _tell(self) -> NoReturn:
        """Raises the error of another rank, which has ended the epoch."""
        rank, text = self._error()
        if text.startswith(RankLost.__name__):
            self.lost = text.partition(": ")[2]
            raise RankLost(self.lost)
        self.end(f"{self.named([rank])} raised {text}")

    def _error(self) -> tuple[int, str]:
        """Returns which rank has ended the epoch, and its error."""
        rank, _, text = self.store.get(self._key(ERROR)).decode().partition(NOTE)
        return int(rank), text

    def end(self, why: str) -> NoReturn:
        """Raises what all ranks find, each for itself."""
        error = RankMismatch(why)
        self.abandon(error)
        raise error

    def abandon(self, error: BaseException) -> bool:
        """Leaves an error for ranks that wait, and ends the epoch; False if none waits."""
        if self.lost is not None or vars(error).get(ENDED) == (id(self), self.epoch):
            return False
        reason, *sums = shared = [self._key(x) for x in (ERROR, *SUMS)]
        self.ended = [*shared, *self._keys("text")]
        self.left += shared if self.rank == 0 else []
        # One that all came to ends for all
        over = [sums[x % len(SUMS)] for x in range(self.passed + 1, self.number + 2)]
        self.epoch, self.added = self.epoch + 1, [0] * len(SUMS)  # no later call meets there
        self.number = self.passed = 0
        vars(error)[ENDED] = id(self), self.epoch
        if not isinstance(error, RankMismatch):
            with contextlib.suppress(dist.DistError):
                text = f"{self.rank}{NOTE}{type(error).__name__}: {error}"
                self.store.compare_set(reason, "", text)  # the first one stays
                for key in over:
                    self.store.set(key, str(OVER))
        return True

    def close(self) -> None:
        """Deletes what is left in the store, as the last rank that ends the group."""
        if self.lost is None:
            with contextlib.suppress(dist.DistError):
                if self.store.add("closed", 1) == self.ranks:
                    shared = [self._key(x) for x in (ERROR, *SUMS)]
                    self._delete([*self.ended, *shared, *self._keys("text"), "closed"])

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

    def _key(self, *parts: Any) -> str:
        return "/".join(map(str, (self.epoch, *parts)))

    def _keys(self, kind: str) -> list[str]:
        """Returns the keys of all ranks at a barrier."""
        return [self._key(self.number, kind, rank) for rank in range(self.ranks)]

    def _why(self, signature: str, keys: list[str], error: Exception | None = None) -> str:
        call = f"call {self.number}, {signature}"
        try:
            if error is None:
                time.sleep(self._soon)  # others that wait say so
            if (reason := self.reported(signature)) is not None:
                return reason
            absent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            return self.absence(absent, call)
        except dist.DistError as other:
            return (
                f"{call}: the store of the process group, which rank 0 or torchrun holds, does not "
                f"answer ({error or other})"
            )

    @property
    def _soon(self) -> float:
        """Seconds in which another rank says what it has found."""
        return min(1.0, self.timeout.total_seconds() / 4)

    def reported(self, signature: str) -> str | None:
        """Returns why a call did not end, if another rank has left it: of several nodes, one that
        waits for a rank of another.
        """
        if len(self.nodes) == 1:
            return None
        time.sleep(self._soon)
        if not self.store.check([self._key(ERROR)]):
            return None
        rank, text = self._error()
        if text.startswith(RankLost.__name__):
            return text.partition(": ")[2]
        text = f"{self.named([rank])} raised {text}"
        return f"call {self.number}, {signature}, did not end: {text}"

    def absence(self, absent: list[int], call: str) -> str:
        """Writes the message that these ranks did not come to a call."""
        return (
            f"{self.named(absent)} of {self.ranks} did not come to {call}, within "
            f"{self.timeout.total_seconds():g} s, the time-out of the group: dead, slower than "
            "that, or not making the same calls"
        )
