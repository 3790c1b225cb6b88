"""What is raised where ranks disagree or are lost, and how ranks are named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import ArgumentError


class RankMismatch(RuntimeError):
    """The ranks did not make the same call; the message says what each one called."""


class RankLost(RuntimeError):
    """Ranks did not make a call within the group's timeout; the message names them."""


class PullTimeout(RuntimeError):
    """Keys that a kernel waited for did not arrive within the timeout; the message names them."""


def listed(ranks: Sequence[int], nodes: Sequence[Sequence[int]] = ()) -> str:
    """Ranks in words, with the nodes that they are of.

    >>> listed([1]), listed([1, 3]), listed([3], [(0, 1), (2, 3)])
    ('rank 1', 'ranks 1, 3', 'rank 3 (node 1)')
    """
    homes = {x: f" (node {number})" for number, members in enumerate(nodes) for x in members}
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(x) + homes.get(x, '') for x in ranks)}"


def check_group(group: Any, device: torch.device) -> None:
    """Checks that a group's ranks can meet on a device."""
    kind, name = ("CPU", "gloo") if device.type == "cpu" else ("GPU", "nccl")
    try:
        group._get_backend(device)
    except RuntimeError as error:
        raise ArgumentError(
            f"the process group has no backend for the {kind}: make it with "
            f'init_process_group("{name}"), or "cpu:gloo,cuda:nccl"'
        ) from error
