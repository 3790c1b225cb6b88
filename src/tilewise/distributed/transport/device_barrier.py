"""The barrier of GPUs: they wait for each other on the device, and each says what it calls by a
fingerprint, so that no call after the first of its kind costs the host a round trip.

The texts of calls go through the group's store, once each. The first call of a kind waits on the
host for its barrier, and so is an error where it is made; a later one that fails is an error of the
next call of the library, and until then what it has pulled is NaN.
"""

from __future__ import annotations

import datetime
import zlib
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from ...kernels.portable.signals import RAISED, WORDS, Signals
from .barrier import Barrier
from .failure import PullTimeout, RankLost, RankMismatch
from .memory import Memory, synchronize

Tensor = torch.Tensor
PAD = 8 * WORDS  # bytes
KNOWN = 4096  # calls whose fingerprints are kept
WRITTEN = datetime.timedelta(seconds=1)  # in which a text is in the store


class DeviceBarrier:
    """Barriers of a group on a device. Every rank makes the same, on its current stream."""

    def __init__(
        self, host: Barrier, device: torch.device, pads: list[Tensor], memory: Memory
    ) -> None:
        self.host, self.memory = host, memory  # which keeps the pads mapped
        self.rank, self.ranks = host.rank, host.ranks
        self.store, self.timeout, self.device = host.store, host.timeout, device
        # Of the ranks of other nodes there are none: the host meets those
        self.members = [rank for rank, x in enumerate(pads) if x is not None]
        pads[self.rank].zero_()
        synchronize(device)
        host.meet("a pad of zeros on every rank")
        of_node = [pads[x].view(torch.int64) for x in self.members]
        self.signals = Signals(of_node, self.members.index(self.rank))
        self.known: dict[str, int] = {}
        self.number = 0
        self.last = 0, 0  # number and fingerprint of the last one that was begun
        self.epoch = host.epoch  # after an error all ranks must find the same number again
        self.left: dict[str, str] = {}  # what this rank has in the store, by key
        self.sources: dict[int, tuple[int, ...]] = {}  # by barriers, the ranks of a call's pieces

    @property
    def nanoseconds(self) -> int:
        """How long anything on the device waits."""
        return int(self.timeout.total_seconds() * 1e9)

    def meet(
        self, signature: str, *, is_new: bool = False, behind: Callable[..., None] | None = None
    ) -> None:
        """Lets the stream wait for all ranks, `behind` a launch; the host, too, in a new call."""
        self.check()
        fingerprint = self.known.get(signature)
        if fingerprint is None:
            fingerprint, is_new = self._introduce(signature), True
        self.last = self.number + 1, fingerprint
        self._signal(behind)
        if is_new:
            synchronize(self.device)
            self.check(signature)
            self._forget()  # all have said the same
            self.known[signature] = fingerprint

    def again(self) -> None:
        """Lets the stream wait once more for the ranks of the last barrier."""
        self.last = self.number + 1, self.last[1]
        self._signal()

    def _signal(self, behind: Callable[..., None] | None = None) -> None:
        number, fingerprint = self.last
        self.signals.barrier(number, fingerprint, self.timeout.total_seconds(), behind=behind)
        self.number = number

    def check(self, signature: str = "") -> None:
        """Raises what a barrier has found since the last check. Asks no device."""
        host = self.host
        if host.lost is not None:
            raise RankLost(f"{host.lost}; make a new process group")
        if self.signals.has_failed and (self.epoch == host.epoch or self.signals.late()):
            self._fail(signature)
        if self.epoch != host.epoch:
            self._resume()

    def abandon(self, error: BaseException) -> None:
        """Ends the epoch for ranks that wait on the device, after the host's barrier."""
        if self.epoch != self.host.epoch - 1 or isinstance(error, RankMismatch):
            return
        if self.last[0] > self.number:  # interrupted: without the launch nothing is published
            synchronize(self.device)
            self.number += self.signals.has_come(self.last[0])
        self.number += 1
        self._leave(self.number, f"{type(error).__name__}: {error}")
        self.signals.barrier(self.number, RAISED, 0.0, waits=False)

    def poison(self, tensors: Sequence[Tensor]) -> None:
        """Writes NaN to tensors if a barrier has failed, so that none is taken for a result."""
        self.signals.poison(tensors, self.number)

    def expect(self, sources: tuple[int, ...]) -> None:
        """Notes which ranks' pieces the next launch waits for; an error may come later."""
        self.sources[self.number] = sources
        if len(self.sources) > KNOWN:
            del self.sources[next(iter(self.sources))]

    def _introduce(self, signature: str) -> int:
        """Returns a call's fingerprint, and leaves its text for ranks that call another."""
        if len(self.known) >= KNOWN:
            self.known.clear()
        fingerprint = max(RAISED + 1, zlib.crc32(signature.encode()) & 0x7FFFFFFF)
        self._leave(self.number + 1, signature)
        return fingerprint

    def _leave(self, number: int, text: str) -> None:
        key = self._key(number, self.rank)
        self.left[key] = text
        self.store.set(key, text)

    def _forget(self) -> None:
        while self.left:
            self.store.delete_key(self.left.popitem()[0])

    def _fail(self, signature: str) -> NoReturn:
        """Raises for the barrier or the piece that failed."""
        if (late := self.signals.late()) is not None:  # its copy may never end: no wait for it
            number, piece = late
            self.host.lost = self._why_late(number, piece)
            raise PullTimeout(self.host.lost)
        synchronize(self.device)  # no wait is without a bound, and none after this one waits at all
        number, flags = self.signals.found()
        absent = [rank for rank, flag in zip(self.members, flags) if flag >> 32 != number]
        fingerprints = {rank: flag & 0x7FFFFFFF for rank, flag in zip(self.members, flags)}
        if absent:
            mine = self._text(number, self.rank, fingerprint=fingerprints[self.rank])
            reason = self.host.reported(mine)
            self.host.lost = reason or self.host.absence(absent, f"call {number}, {mine}")
            raise RankLost(self.host.lost)
        earlier = "" if signature else f" (in call {number}, of which this is the next)"
        for rank, fingerprint in fingerprints.items():
            if fingerprint == RAISED:
                self.host.end(
                    f"{self.host.named([rank])} raised {self._text(number, rank)}{earlier}"
                )
        rank = next(r for r, x in fingerprints.items() if x != fingerprints[self.rank])
        first, second = (
            f"{self.host.named([r])} called {self._text(number, r, fingerprint=fingerprints[r])}"
            for r in sorted((self.rank, rank))
        )
        self.host.end(f"{second}; {first}{earlier}")

    def _why_late(self, number: int, piece: int) -> str:
        sources = self.sources[number]
        return (
            f"piece {piece} of {len(sources)} of the keys, of rank {sources[piece - 1]}, did not "
            f"arrive within {self.timeout.total_seconds():g} s, the time-out of the group: DMA "
            "from that GPU stands still, or the device was too busy to begin it"
        )

    def _resume(self) -> None:
        """Lets all ranks go on, after an error, from the largest of their numbers."""
        numbers = self.host.wait("the call after one that failed", str(self.number))
        synchronize(self.device)  # of a call before, on another stream, too
        self.signals.reset()
        synchronize(self.device)
        self.number = max(map(int, numbers))
        self.last = self.number, 0
        self.epoch = self.host.epoch  # from here on an error is one that the device must say
        self.host.meet("the call after one that failed, again")  # all have reset theirs
        self._forget()

    def _text(self, number: int, rank: int, fingerprint: int = RAISED) -> str:
        """Returns a rank's call at a barrier. Calls that all have made are not in the store."""
        key = self._key(number, rank)
        texts = (text for text, x in self.known.items() if x == fingerprint)
        if (text := self.left.get(key) or next(texts, None)) is not None:
            return text
        try:
            self.store.wait([key], WRITTEN)  # `set` returns before the store has it
            return self.store.get(key).decode()
        except dist.DistError:
            pass  # the rank that has the store may have ended; which one this is, is known
        return "an error" if fingerprint == RAISED else "something else"

    def _key(self, number: int, rank: int) -> str:
        return f"device/{self.device.type}/{number}/{rank}"
