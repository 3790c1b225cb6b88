"""Which ranks share a sequence: a process group, a mesh of one dimension, or of two, nodes and
their ranks; or a number of ranks.
"""

from __future__ import annotations

import contextlib
import datetime
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError, a_type

NODE = "node"  # the dimension of a mesh that counts nodes: another one shards something else
_groups: Any = weakref.WeakKeyDictionary()  # by mesh
_nodes: Any = weakref.WeakKeyDictionary()  # by the store of a group, which lives as long


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
        is_of_nodes = group.ndim == 2 and (group.mesh_dim_names or ("",))[0] == NODE
        if group.ndim != 1 and not is_of_nodes:
            raise NotImplementedError(
                f"group is a DeviceMesh of {group.ndim} dimensions: a sequence is dealt over one, "
                "so pass mesh[name] of the dimension that it is dealt over; or over two of which "
                f'the first is named "{NODE}" and counts nodes'
            )
        group = _group_of_nodes(group) if is_of_nodes else group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            f"group is {a_type(group)}: it must be a ProcessGroup, a DeviceMesh of one "
            "dimension, a number of ranks, or None for the default group"
        )
    if dist.get_rank(group) < 0:
        raise ArgumentError("this process is no member of the group: make the layout on its ranks")
    return group


def _group_of_nodes(mesh: DeviceMesh) -> Any:
    """Returns a group of all ranks of a mesh whose first dimension counts nodes, one per mesh."""
    group: Any = _groups.get(mesh)
    if group not in distributed_c10d._world.pg_map:  # none yet, or it was destroyed
        ranks = sorted(mesh.mesh.flatten().tolist())
        timeout = timeout_of(dist.group.WORLD)  # else it would be torch's, half an hour
        options: Any = dict(timeout=timeout, use_local_synchronization=True)
        _groups[mesh] = group = dist.new_group(ranks, **options)
        nodes = tuple(tuple(sorted(map(ranks.index, node))) for node in mesh.mesh.tolist())
        _nodes[distributed_c10d._get_process_group_store(group)] = nodes
    return group


def given_nodes(group: Any) -> tuple[tuple[int, ...], ...] | None:
    """Returns the nodes that a mesh gave for a group; None where they are to be found."""
    return _nodes.get(distributed_c10d._get_process_group_store(group))


def store_of(group: Any) -> Any:
    """Returns the store of a group, which lives as long as the group; ArgumentError after that."""
    try:
        return distributed_c10d._get_process_group_store(group)
    except KeyError as error:
        raise ArgumentError(
            "the process group was destroyed: make the layout with one that is there"
        ) from error


def timeout_of(group: Any) -> datetime.timedelta:
    """Returns how long collectives wait, or the store where the backend does not say."""
    store: Any = store_of(group)
    for kind in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # it has no backend for these
            options = getattr(group._get_backend(torch.device(kind)), "options", None)
            return getattr(options, "_timeout", store.timeout)
    return store.timeout
