"""The counters that hand out tiles, one a stream.

A counter is kept by the handle of a stream that torch owns, which lives as long as the process. A
handle of another library's stream may name a new stream once that is destroyed, while kernels of
the old one still run: such streams get zeros for each launch. No launch leaves a counter behind
that is not 0: one that is refused does not run, and after one that is aborted none runs any more.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable

import torch

from ..common.kept import kept
from ..common.operand import Provided

Tensor = torch.Tensor
RESERVED = 2**18  # counters set aside at a time for captured graphs: 1 MB
LINE = 32  # of a line of the L2 cache: no two graphs count in one

# By device, stream, and whether there is one alone: a launch of many may begin beside one of one
_counters: dict[tuple[int, int, bool], Tensor] = {}
# Zeros that were made on another library's stream, until its next launch has others
_last: dict[tuple[int, int, bool], Tensor] = {}


def tile_counter() -> Provided:
    """The counter of tiles as a plan has it: the program gets that of its device and stream."""
    return Provided("tile_counter", functools.partial(counters, count=1))


def tile_counters(count: int) -> Provided:
    """At least `count` counters as a plan has them: the program gets those of its device and
    stream.
    """
    return Provided("tile_counters", functools.partial(counters, count=count))


def counters(device: torch.device, index: int | None, stream: int, count: int) -> Tensor:
    """At least `count` counters that hand out tiles: 0 before and after every launch.

    Launches of one stream follow each other and share them. A captured graph, which may be replayed
    beside them, gets some of its own.
    """
    if index is None:  # of a CPU
        return torch.zeros(count, dtype=torch.int32)
    if torch._C._cuda_isCurrentStreamCapturing():
        return _captured.counters(device, index, stream, count)
    key = index, stream, count == 1
    if key not in _counters or _counters[key].numel() < count:
        if is_external(index, stream):  # `_counters` has those of torch's streams alone
            _last[key] = torch.zeros(count, dtype=torch.int32, device=device)
            return _last[key]
        room = 1 if count == 1 else max(2 * count, 4096)
        _counters[key] = kept_zeros(room, device, index=index)
        _captured.reserve(device, index)
    return _counters[key]


def is_external(index: int, stream: int) -> bool:
    """Whether the current stream is another library's: torch numbers those by their handles."""
    return stream != 0 and torch._C._cuda_getCurrentStream(index)[0] == stream


def kept_zeros(count: int, device: torch.device, index: int) -> Tensor:
    """Counters for as long as the process lives, which any stream may use when this returns."""
    where = torch.device(device.type, index)
    return kept(lambda: torch.zeros(count, dtype=torch.int32, device=where), index)


class Captured:
    """Counters of captured graphs, from zeros that were made before. Zeros made by the graph itself
    would be a node in front of each launch, in every replay.

    A capture's launches on one stream share theirs. They are not given back: a graph may always be
    replayed once more.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.zeros: dict[int, Tensor] = {}  # what is left, by device
        self.given: dict[tuple[int, int], tuple[int, Tensor]] = {}  # by stream: a capture's

    def reserve(self, device: torch.device, index: int) -> None:
        """Zeros, outside of captures, for those that follow."""
        if index not in self.zeros or self.zeros[index].numel() < RESERVED // 2:
            self.zeros[index] = kept_zeros(RESERVED, device, index=index)

    def counters(self, device: torch.device, index: int, stream: int, count: int) -> Tensor:
        """At least `count` of the capture that the stream is in."""
        capture = capture_of(stream)
        before, counters = self.given.get((index, stream), (None, None))
        if counters is not None and capture == before is not None and counters.numel() >= count:
            return counters
        room = -(-count // LINE) * LINE
        with self.lock:  # threads may capture at a time
            left = self.zeros.get(index)
            if left is None or left.numel() < room:
                return torch.zeros(count, dtype=torch.int32, device=device)
            counters, self.zeros[index] = left[:room], left[room:]
        if capture is not None:
            self.given[index, stream] = capture, counters
        return counters


_captured = Captured()


def capture_of(stream: int) -> int | None:
    """The number of the capture that a stream is in; None where the driver does not say."""
    ask = _capture_info()
    if ask is None:
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    unread = (None, None, None)  # the graph, and what the next node would follow
    failed = ask(stream, ctypes.byref(status), ctypes.byref(number), *unread)
    return None if failed or status.value != 1 else number.value


@functools.lru_cache(maxsize=1)
def _capture_info() -> Callable[..., int] | None:
    try:
        call = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_void_p,) * 6
    call.restype = ctypes.c_int
    return call
