"""Relaunches of a decode step of one or two kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..common import decode_step
from ..common.cached import Cached
from ..common.relaunch import Launched, Relaunch, relaunches_of

Tensor = torch.Tensor


class DecodeStep(decode_step.DecodeStep):
    """The launches of a decode step."""

    launches: list[Relaunch]

    def launch(self, stream: int, row: list[Any]) -> None:
        """Launches them."""
        for launch in self.launches:
            launch.launch(stream, row)


def step_of(
    cached: Cached, out: Tensor, lse: Tensor, states: Sequence[Tensor], launches: list[Launched]
) -> DecodeStep | None:
    """The launches of a call; None where it may not be relaunched."""
    given = [x for x in cached.tensors if x is not None]
    relaunches = relaunches_of(launches, (*given, out, lse, *states))
    if relaunches is None:
        return None
    step = DecodeStep(cached.q.device, given, out, lse, states)
    step.launches = relaunches
    return step
