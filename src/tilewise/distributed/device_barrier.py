"""The barrier of GPUs: they wait for each other on the device, and each says what it calls by a
fingerprint, so that no call after the first of its kind costs the host a round trip.

The texts of calls go through the group's store, once each. The first call of a kind waits on the
host for its barrier, and so is an error where it is made; a later one that fails is an error of the
next call of the library, and until then what it has pulled is NaN.
"""

from __future__ import annotations

import zlib
from typing import NoReturn

import torch
import torch.distributed as dist

from ..kernels.portable.signals import RAISED, WORDS, Signals
from .failure import Barrier, PullTimeout, RankLost, RankMismatch
from .memory import Memory

Tensor = torch.Tensor
PAD = 8 * WORDS  # bytes
KNOWN = 4096  # calls whose fingerprints are kept


class DeviceBarrier:
    """Barriers of a group on a device, one after another. Every rank makes the same ones, each on
    its current stream.
    """

    def __init__(
        self, host: Barrier, device: torch.device, pads: list[Tensor], memory: Memory
    ) -> None:
        self.host, self.memory = host, memory  # which keeps the pads mapped
        self.rank, self.ranks = host.rank, host.ranks
        self.store, self.timeout, self.device = host.store, host.timeout, device
        pads[self.rank].zero_()
        synchronize(device)
        host.wait("a pad of zeros on every rank")
        self.signals = Signals([x.view(torch.int64) for x in pads], self.rank)
        self.known: dict[str, int] = {}
        self.number = 0
        self.is_broken = False  # all ranks must find the same number again
        self.sources: dict[int, tuple[int, ...]] = {}  # by barriers, the ranks of a call's pieces

    @property
    def lost(self) -> str | None:
        """Why no further call can be made."""
        return self.host.lost

    @property
    def nanoseconds(self) -> int:
        """How long anything on the device waits."""
        return int(self.timeout.total_seconds() * 1e9)

    def wait(self, signature: str, is_new: bool = False) -> None:
        """What this rank's stream does next follows what each rank's did before this barrier. Waits
        on the host where the call is new, or said to be.
        """
        self.check()
        fingerprint = self.known.get(signature)
        if fingerprint is None:
            fingerprint, is_new = self._introduce(signature), True
        self.number += 1
        self.signals.barrier(self.number, fingerprint, self.timeout.total_seconds())
        if is_new:
            synchronize(self.device)
            self.check(signature)

    def check(self, signature: str = "") -> None:
        """Raises what a barrier has found since the last check. Asks no device."""
        if self.host.lost is not None:
            raise RankLost(f"{self.host.lost}; make a new process group")
        if self.signals.has_failed:
            self._fail(signature)
        if self.is_broken:
            self._resume(signature)

    def catch_up(self, signature: str) -> None:
        """After `abandon`, before this rank's memory is written to again."""
        self.check(signature)

    def abandon(self, error: BaseException) -> None:
        """Leaves an error for the ranks that wait, and waits for none of them."""
        if self.lost is None and not isinstance(error, RankMismatch):
            self.number += 1
            self.store.set(self._raised(self.rank, self.number), f"{type(error).__name__}: {error}")
            self.signals.barrier(self.number, RAISED, 0.0, waits=False)
            self.is_broken = True

    def poison(self, *tensors: Tensor) -> None:
        """NaN in them if a barrier before has failed, so that nothing false is taken for a
        result.
        """
        self.signals.poison(tensors, self.number)

    def expect(self, sources: tuple[int, ...]) -> None:
        """What is launched next waits for pieces of these ranks. The host, which runs ahead, may
        learn calls later which did not arrive.
        """
        self.sources[self.number] = sources
        if len(self.sources) > KNOWN:
            del self.sources[next(iter(self.sources))]

    def _introduce(self, signature: str) -> int:
        """The fingerprint of a call, with its text left for those that call another."""
        if len(self.known) >= KNOWN:
            self.known.clear()
        found = max(RAISED + 1, zlib.crc32(signature.encode()) & 0x7FFFFFFF)
        self.store.set(self._text(found), signature)
        self.known[signature] = found
        return found

    def _fail(self, signature: str) -> NoReturn:
        """Raises for the barrier or the piece that failed."""
        if (late := self.signals.late()) is not None:  # its copy may never end: no wait for it
            self.host.lost = self._why_late(*late)
            raise PullTimeout(self.host.lost)
        synchronize(self.device)  # no wait is without a bound, and none after this one waits at all
        number, words = self.signals.found()
        self.signals.report.zero_()  # raised once; the device knows until ranks resume
        absent = [str(r) for r, word in enumerate(words) if word >> 32 != number]
        if absent:
            ranks = "rank" if len(absent) == 1 else "ranks"
            mine = self._said(words[self.rank] & 0x7FFFFFFF)
            self.host.lost = (
                f"{ranks} {', '.join(absent)} of {self.ranks} did not come to call {number}, "
                f"{mine}, within {self.timeout.total_seconds():g} s, the time-out of the group: "
                "dead, slower than that, or not making the same calls"
            )
            raise RankLost(self.host.lost)
        self.is_broken = True
        said = [word & 0x7FFFFFFF for word in words]
        earlier = "" if signature else f" (in call {number}, of which this is the next)"
        for rank, fingerprint in enumerate(said):
            if fingerprint == RAISED:
                why = self._text_of(self._raised(rank, number))
                raise RankMismatch(f"rank {rank} raised {why}{earlier}")
        rank = next(r for r, x in enumerate(said) if x != said[self.rank])
        first, second = sorted((self.rank, rank))
        raise RankMismatch(
            f"rank {second} called {self._said(said[second])}; "
            f"rank {first} called {self._said(said[first])}{earlier}"
        )

    def _why_late(self, number: int, piece: int) -> str:
        sources = self.sources[number]
        return (
            f"piece {piece} of {len(sources)} of the keys, of rank {sources[piece - 1]}, did not "
            f"arrive within {self.timeout.total_seconds():g} s, the time-out of the group: DMA "
            "from that GPU stands still, or the device was too busy to begin it"
        )

    def _resume(self, signature: str) -> None:
        """After a failure that left all ranks alive: the ranks have run ahead by different numbers
        of barriers, and go on from the largest.
        """
        found = self.host.wait("the call after one that failed", str(self.number))
        synchronize(self.device)  # of a call before, on another stream, too
        self.signals.reset()
        synchronize(self.device)
        self.number = max(map(int, found))
        self.host.wait("the call after one that failed, again")  # all have reset theirs
        self.is_broken = False

    def _said(self, fingerprint: int) -> str:
        return self._text_of(self._text(fingerprint))

    def _text_of(self, key: str) -> str:
        try:
            self.store.wait([key], self.timeout)
            return self.store.get(key).decode()
        except dist.DistError as error:
            return f"something that the group's store does not say ({error})"

    def _text(self, fingerprint: int) -> str:
        return f"tilewise/call/{fingerprint:08x}"

    def _raised(self, rank: int, number: int) -> str:
        return f"tilewise/raised/{number}/{rank}"


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
