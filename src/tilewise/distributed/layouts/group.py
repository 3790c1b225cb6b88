"""Which ranks share a sequence: a process group, a mesh of one dimension, or a number of ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError, a_type


def global_ranks(group: Any) -> list[int]:
    """Lists the ranks of a group among all processes; this one alone where there is no group."""
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def ranks_of(group: Any) -> int:
    """Counts the ranks of a group."""
    group = checked(group)
    return group if type(group) is int else dist.get_world_size(group)


def checked(group: Any) -> Any:
    """Reads `group`: None is torch's default group, an int a number of ranks without processes (to
    plan, and to test), of which this is rank 0.
    """
    if type(group) is int:
        if group < 1:
            raise ArgumentError(f"group={group}: there must be at least 1 rank")
        return group
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            f"group={group!r}, and torch.distributed is not initialized: call "
            "torch.distributed.init_process_group(), or pass a number of ranks to plan for"
        )
    if group is None:
        group = dist.group.WORLD
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise NotImplementedError(
                f"group is a DeviceMesh of {group.ndim} dimensions: a sequence is dealt over one, "
                "so pass mesh[name] of the dimension that it is dealt over"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            f"group is {a_type(group)}: it must be a ProcessGroup, a DeviceMesh of one "
            "dimension, a number of ranks, or None for the default group"
        )
    if dist.get_rank(group) < 0:
        raise ArgumentError("this process is no member of the group: make the layout on its ranks")
    return group
