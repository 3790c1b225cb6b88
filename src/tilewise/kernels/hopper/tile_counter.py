"""The counters that hand out tiles, one a stream."""

from __future__ import annotations

import functools

import torch

Tensor = torch.Tensor

_counters: dict[tuple[int, int], Tensor] = {}


def counter_of(device: torch.device) -> Tensor:
    """The counter of a launch on the device's current stream."""
    if device.type == "cpu":
        return torch.zeros(1, dtype=torch.int32)
    index = torch.cuda.current_device() if device.index is None else device.index
    return counter(device, index, torch._C._cuda_getCurrentRawStream(index))


def counter(device: torch.device, index: int, stream: int) -> Tensor:
    """The counter that hands out tiles: 0 before and after every launch.

    Launches of one stream follow each other and share it. A captured graph, which may be replayed
    beside them, gets one of its own.
    """
    if torch._C._cuda_isCurrentStreamCapturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = index, stream
    if key not in _counters:
        _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[key]


_many: dict[tuple[int, int], Tensor] = {}


def counters_of(device: torch.device, count: int) -> Tensor:
    """At least `count` counters, as `counter` has one: 0 before and after every launch."""
    if device.type == "cpu":
        return torch.zeros(count, dtype=torch.int32)
    if torch._C._cuda_isCurrentStreamCapturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    key = index, torch._C._cuda_getCurrentRawStream(index)
    if key not in _many or _many[key].numel() < count:
        _many[key] = torch.zeros(max(2 * count, 4096), dtype=torch.int32, device=device)
    return _many[key]


@functools.lru_cache(maxsize=64)
def num_sms(device: torch.device) -> int:
    """The number of SMs; one program runs on each."""
    return torch.cuda.get_device_properties(device).multi_processor_count
