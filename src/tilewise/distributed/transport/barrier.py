"""A barrier for ranks that read each other's memory. It carries what each of them calls, so that
a rank that calls something else, or nothing at all, is a named error on the others and no wait
without an end.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Sequence
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..layouts.group import store_of, timeout_of
from .failure import RankLost, RankMismatch, listed
from .wire import PLACE, WORD, Wire

NOTE = "\0"  # begins what a rank adds to its text, which is not compared
LATE = 0.05  # seconds of waiting, after which a rank says that it is here
ERROR = "error"  # of an epoch, its key
ENDED = "tilewise_ended"  # of an error, the epoch that it began
FIRST = "the first call of the process group"
SOON, LONGEST = 0.005, 0.01  # seconds before a host pauses (with 0.0002 it is late), and of pauses


class Barrier:
    """Barriers of a group, one after another.

    Ranks tell each other the fingerprints of their calls by sockets. Where these differ, they leave
    texts in the group's store, and compare these.

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
        self.word = b""  # of this rank, on the last barrier
        self.texts: list[str] = []  # keys of the last texts, which all have read by the next ones
        self.lost: str | None = None  # why no further call can be made
        # Ranks that share memory
        self.nodes: tuple[tuple[int, ...], ...] = (tuple(range(self.ranks)),)
        # Of groups that torch splits from one, several have one name, and so one store
        first = min(dist.get_process_group_ranks(group))
        key, self.wire = f"tilewise/{first}", Wire(self.rank, self.ranks)
        try:
            if self.rank == 0:
                self.wire.listen(store, key=key)
            else:
                self.wire.connect(store, key=key, timeout=self.timeout)
        except (OSError, dist.DistError) as error:
            raise RankLost(f"{self.absence([0], FIRST)} ({error})") from error
        self.store = distributed_c10d.PrefixStore(f"tilewise/{self.wire.name.hex()}", store)
        self.meet(FIRST)
        self.wire.open()
        if self.rank == 0:
            store.delete_key(key)

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
        self.word = WORD.pack(self.epoch, self.number, zlib.crc32(signature.encode()))
        if not self.wire.tells_last:
            self.wire.tell(self.word)

    def _arrive(self, signature: str) -> bool:
        """Waits until every rank has come; whether their calls are the same."""
        if self.number == self.passed or self.lost is not None:
            self.announce(signature)
        wire, answer, is_late, begun = self.wire, self.word, False, time.monotonic()
        try:
            for rank in wire.others:
                while (other := wire.hear(rank, self.word)) is None:
                    waited = time.monotonic() - begun
                    if waited > SOON and self.store.check([self._key(ERROR)]):
                        self._tell()
                    if waited > LATE and not is_late:
                        is_late = True
                        self.store.set(self._keys("here")[self.rank], "")
                    self._pause(waited, "here")
                if other != self.word:
                    answer = self.word[PLACE] + bytes(4)
            if wire.tells_last:
                wire.tell(answer)
            self.passed = self.number
            if is_late:
                self.store.delete_key(self._keys("here")[self.rank])
        except dist.DistError as error:
            self._miss("here", error)
        return answer == self.word

    def _compare(self, text: str) -> list[str]:
        """Waits for the texts of all; returns their notes, or raises where calls differ."""
        keys, begun = self._keys("text"), time.monotonic()
        old, self.texts = self.texts, keys
        try:
            if old:
                self.store.delete_key(old[self.rank])
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
        else:
            os.sched_yield()

    def _miss(self, kind: str, error: Exception | None = None) -> NoReturn:
        """Raises that ranks did not come, or that the store does not answer."""
        self.lost = self._why(self.signature, self._keys(kind), error)
        raise RankLost(self.lost) from error

    def _tell(self) -> NoReturn:
        """Raises the error of another rank, which has ended the epoch."""
        if (lost := self.found_lost()) is not None:
            self.lost = lost
            raise RankLost(lost)
        rank, text = self._error()
        self.end(f"{self.named([rank])} raised {text}")

    def found_lost(self) -> str | None:
        """Returns why no further call can be made, if another rank has found that."""
        with contextlib.suppress(dist.DistError):
            if self.store.check([self._key(ERROR)]):
                name, _, why = self._error()[1].partition(": ")
                return why if name == RankLost.__name__ else None
        return None

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
        reason, self.epoch = self._key(ERROR), self.epoch + 1  # no later call meets there
        self.number = self.passed = 0
        vars(error)[ENDED] = id(self), self.epoch
        if not isinstance(error, RankMismatch):
            with contextlib.suppress(dist.DistError):
                text = f"{self.rank}{NOTE}{type(error).__name__}: {error}"
                self.store.compare_set(reason, "", text)  # the first one stays
        return True

    def close(self) -> None:
        """Closes sockets, and deletes what is left in the store, as the last rank."""
        self.wire.close()
        if self.lost is None:
            with contextlib.suppress(dist.DistError):
                if self.store.add("closed", 1) == self.ranks:
                    errors = [f"{epoch}/{ERROR}" for epoch in range(self.epoch + 1)]
                    for key in (*errors, *self.texts, "closed"):
                        self.store.delete_key(key)

    def lose(self, why: str) -> NoReturn:
        """Raises what this rank alone has found, of ranks that are lost, and leaves it for all."""
        error = RankLost(why)
        self.abandon(error)
        self.lost = str(error)
        raise error

    def why_unfinished(self, peers: Sequence[int]) -> str:
        """Returns, and leaves for all, why an exchange does not end that was begun with these
        ranks: those that wait, too, say so.
        """
        keys, why = self._keys("exchange"), self.unfinished(peers=peers)
        with contextlib.suppress(dist.DistError):
            self.store.set(keys[self.rank], "")
            time.sleep(self._soon)
            absent = [rank for rank in peers if not self.store.check([keys[rank]])]
            why = self.unfinished(peers=absent) if absent else self.reported(self.signature) or why
            self.store.compare_set(self._key(ERROR), "", f"{self.rank}{NOTE}RankLost: {why}")
        return why

    def unfinished(self, peers: Sequence[int]) -> str:
        """Writes the message that these ranks did not end an exchange."""
        return (
            f"call {self.number}, {self.signature}: {self.named(sorted(set(peers)))} did not "
            f"exchange what it needs with {self.named([self.rank])} within "
            f"{self.timeout.total_seconds():g} s, the time-out of the group"
        )

    def named(self, ranks: Sequence[int]) -> str:
        """Returns ranks in words, with their nodes where there are several."""
        return listed(ranks, self.nodes if len(self.nodes) > 1 else ())

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
        if (why := self.found_lost()) is not None or not self.store.check([self._key(ERROR)]):
            return why
        rank, text = self._error()
        text = f"{self.named([rank])} raised {text}"
        return f"call {self.number}, {signature}, did not end: {text}"

    def absence(self, absent: list[int], call: str) -> str:
        """Writes the message that these ranks did not come to a call."""
        return (
            f"{self.named(absent)} of {self.ranks} did not come to {call}, within "
            f"{self.timeout.total_seconds():g} s, the time-out of the group: dead, slower than "
            "that, or not making the same calls"
        )
