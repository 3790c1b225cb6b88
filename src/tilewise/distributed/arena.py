"""The arena of a process group: which memory its ranks share, and which barrier they meet at."""

from __future__ import annotations

from typing import Any

import torch

from .failure import Barrier, check_cpu_group
from .halves import Arena
from .memory import Files, Ipc, Symmetric

_arenas: dict[Any, Arena] = {}


def arena_of(group: Any, device: torch.device) -> Arena:
    """The arena of a process group for tensors on a device, one for all calls."""
    if device.type != "cpu":
        check_device(device)
    key = group, device
    if key not in _arenas:
        if device.type == "cpu":
            check_cpu_group(group)
            _arenas[key] = Arena(Barrier(group), Files())
        else:
            _arenas[key] = _on_gpus(group, device)
    return _arenas[key]


def check_device(device: torch.device) -> None:
    """NotImplementedError but for CPUs and GPUs."""
    if device.type != "cuda":
        raise NotImplementedError(f"tensors on {device}: tilewise.distributed serves CPUs and GPUs")


def _on_gpus(group: Any, device: torch.device) -> Arena:
    """The arena of GPUs: in symmetric memory, or in CUDA IPC where that fails on any rank."""
    from .device_arena import DeviceArena, refuse_capture
    from .device_barrier import PAD, DeviceBarrier

    refuse_capture()
    host, signature, reasons = Barrier(group), f"tilewise.distributed on {device.type}", []
    kinds: tuple[type[Symmetric | Ipc], ...] = Symmetric, Ipc
    for kind in kinds:
        memory, pads, reason = kind(group, device), [], ""
        try:
            pads = memory.allocate(host, PAD, signature)
        except (RuntimeError, ImportError, AttributeError) as error:
            if host.lost is not None:
                raise
            reason = f"{type(error).__name__}: {error}"
        found = host.wait(f"{signature}, by {kind.__name__}", reason)
        if not any(found):
            barrier = DeviceBarrier(host, device, pads, memory)
            return DeviceArena(barrier, kind(group, device), device)
        reasons += [f"{kind.__name__}: {x}" for x in found if x]
    raise RuntimeError("no memory that GPUs share could be made: " + "; ".join(reasons))
