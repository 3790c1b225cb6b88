"""The arena of a process group: which memory its ranks share, and which barrier they meet at."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..layouts.group import given_nodes, store_of
from ..layouts.layout import Layout
from .barrier import Barrier
from .failure import check_group
from .halves import Arena
from .links import Links
from .memory import Files, Ipc, Symmetric, find_nodes, synchronize

# By group, until it is destroyed; and so the arenas, by device, too
_hosts: dict[Any, Barrier] = {}
_arenas: dict[Any, Arena] = {}


def host_of(group: Any) -> Barrier:
    """Returns the barrier of a process group on the host, one for all devices."""
    if group not in _hosts:
        weakref.finalize(store_of(group), _free, group).atexit = False
        _hosts[group] = Barrier(group)
    return _hosts[group]


def arena_of(group: Any, device: torch.device) -> Arena:
    """Returns the arena of a process group for tensors on a device, one for all calls."""
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"tensors on {device}: tilewise.distributed supports CPUs and GPUs"
        )
    key = group, device
    if key not in _arenas:
        if device.type == "cpu":
            check_group(group, device)
            _arenas[key] = Arena(host_of(group), Files(), links=_links_of(group, device))
        else:
            _arenas[key] = _on_gpus(group, device)
    return _arenas[key]


def reporting(layout: Any, tensors: Iterable[Any] = ()) -> contextlib.AbstractContextManager[Any]:
    """Leaves an error inside for the other ranks of a layout, which would wait for this one."""
    if torch.compiler.is_compiling() or not isinstance(layout, Layout) or layout.ranks == 1:
        return contextlib.nullcontext()
    group = layout.group
    if group is not None and group not in _hosts:
        if not any(isinstance(x, FakeTensor) for x in tensors):  # of one rank, perhaps
            host_of(group)
    return Reporting(group)


class Reporting:
    """The ranks of a group learn of an error inside."""

    __slots__ = ("group",)

    def __init__(self, group: Any) -> None:
        self.group = group

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        host = _hosts.get(self.group)
        is_said = host is None or not host.abandon(error)
        for (group, _), arena in list(_arenas.items()):
            if group is self.group:
                arena.abandon(None if is_said else error)


def _free(group: Any) -> None:
    """Frees the arenas of a group that was destroyed."""
    if (host := _hosts.pop(group, None)) is not None:
        host.close()
    for key in [x for x in _arenas if x[0] is group]:
        arena = _arenas.pop(key)
        synchronize(key[1])  # nothing on the device reads what goes with it
        if arena.links is not None:
            arena.links.abort()
        del arena


def _links_of(group: Any, device: torch.device) -> Links | None:
    """Finds the nodes of a group; None where all ranks are of one."""
    host = host_of(group)
    nodes = find_nodes(host, given_nodes(group))
    return None if nodes is None else Links(host, nodes, group=group, device=device)


def _on_gpus(group: Any, device: torch.device) -> Arena:
    """Makes the arena of GPUs: symmetric memory, or CUDA IPC where that fails on any rank."""
    from .device_arena import DeviceArena, refuse_capture
    from .device_barrier import PAD, DeviceBarrier

    refuse_capture()
    host, signature, reasons = host_of(group), f"tilewise.distributed on {device.type}", []
    # Both kinds count on files that ranks share: sockets in the one, counts of users in the other
    links = _links_of(group, device)
    kinds: tuple[type[Symmetric | Ipc], ...] = Symmetric, Ipc
    for kind in kinds if links is None else kinds[1:]:  # torch's is of all ranks of a group
        memory = kind(group, device)
        try:
            title = f"{signature}, by {kind.__name__}"
            pads = memory.allocate(host, PAD, signature=title)
        except NotImplementedError as error:
            reasons.append(str(error))
        else:
            barrier = DeviceBarrier(host, device, pads=pads, memory=memory)
            return DeviceArena(barrier, kind(group, device), device=device, links=links)
    raise RuntimeError(
        f"no memory that GPUs share could be made: {'; '.join(reasons)}. GPUs that cannot map each "
        "other's memory are nodes of their own: make the layout with a DeviceMesh of shape "
        f'({host.ranks}, 1) and names ("node", "rank"), and NCCL connects them'
    )
