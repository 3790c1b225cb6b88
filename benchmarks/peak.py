"""The most memory that a call holds at once, beside what was there before it.

On a GPU torch's allocator counts it. On a CPU torch's profiler sees each allocation and release of
the allocator of torch's CPU tensors, scratch memory of its operators among them; what a library
such as MKL allocates for itself it does not see.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

Call = Callable[[], object]


def peak_bytes(call: Call, device: str) -> int:
    """Bytes beside those of the inputs; torch.OutOfMemoryError where they do not fit."""
    gc.collect()
    return _on_gpu(call, device) if device.startswith("cuda") else _on_cpu(call)


def _on_gpu(call: Call, device: str) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()  # pieces kept by others are no memory of this call
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    del result
    return peak - before


def _on_cpu(call: Call) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    profile = torch.profiler.profile(activities=activities, profile_memory=True)
    with _quiet():
        profile.start()
    try:
        result = call()
        del result
    finally:
        with _quiet():
            profile.stop()
    return peak_of(changes(profile))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines that torch's profiler writes to stderr at each start and stop."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def changes(profile: torch.profiler.profile) -> list[int]:
    """Bytes taken (above 0) and given back (below 0), in the order of time."""
    profiler: Any = profile.profiler  # no stub has its events' sizes
    events = profiler.kineto_results.events()
    found = [event for event in events if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]


def peak_of(steps: list[int]) -> int:
    """The highest that the running sum gets.

    >>> peak_of([100, 50, -100, 80])
    150
    """
    held = most = 0
    for step in steps:
        held += step
        most = max(most, held)
    return most


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: torch's for GPUs, or the CPU allocator's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
