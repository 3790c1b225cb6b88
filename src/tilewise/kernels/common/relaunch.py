"""Launches of compiled kernels without Triton's front end, which inspects every argument and takes
longer than a short kernel runs: where they may be, and what it would compile apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from triton import knobs

from .alignment import ALIGNMENT

Tensor = torch.Tensor


def has_launch_hooks() -> bool:
    """Whether a profiler has set Triton's launch hooks, which must then be called."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if getattr(hook, "calls", hook):
            return True
    return False


def may_relaunch(device: int | None) -> bool:
    """Whether kernels may be launched without Triton's front end: the device is current, and no
    profiler has set launch hooks.
    """
    return torch._C._cuda_getDevice() == device and not has_launch_hooks()


def relaunch(compiled: Any, programs: int, index: int, *args: Any) -> None:
    """Launches on the current stream of device `index`, which is current. `args` are all of the
    kernel's, constants too, with the types and alignment that it was compiled for.
    """
    stream = torch._C._cuda_getCurrentRawStream(index)
    before = (stream, compiled.function, compiled.packed_metadata, None, None, None)
    compiled.run(programs, 1, 1, *before, *args)


def class_of(x: Tensor | int | None) -> Any:
    """The specialization class of an argument: one compiled kernel serves all its values."""
    if x is None:
        return None
    if isinstance(x, int):
        return 1 if x == 1 else (x % 16 == 0, -(2**31) <= x < 2**31)
    return x.dtype, x.data_ptr() % ALIGNMENT == 0


def addresses_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """The addresses of tensors; 0 for None."""
    return [0 if x is None else x.data_ptr() for x in tensors]
