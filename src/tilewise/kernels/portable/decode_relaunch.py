"""Relaunches of a decode step for other tensors of the same signature: no checks, and addresses as
the only arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..common.cached import Cached
from ..common.relaunch import Launched, Relaunch, addresses_of, may_relaunch, relaunches_of

Tensor = torch.Tensor


class DecodeStep(NamedTuple):
    """The launches of a decode step. Holds no tensor."""

    launches: list[Relaunch]
    device: int | None
    out: tuple[int, ...]  # shapes
    lse: tuple[int, ...]
    states: tuple[int, ...]  # floats of each of the states that lie between launches

    def __call__(
        self, tensors: Sequence[Tensor | None], out: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """`out` and `lse` of `Cached.tensors`; None where it may not be launched past Triton."""
        if not may_relaunch(self.device):
            return None
        q = tensors[0]
        if out is None:
            out = q.new_empty(self.out)
        lse = q.new_empty(self.lse, dtype=torch.float32)
        row = addresses_of((*tensors, out, lse))
        if self.states:
            states = q.new_empty(sum(self.states), dtype=torch.float32)
            at = states.data_ptr()
            for floats in self.states:
                row.append(at)
                at += 4 * floats
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        for launch in self.launches:
            launch.launch(stream, row)
        return out, lse


def step_of(
    cached: Cached, out: Tensor, lse: Tensor, states: Sequence[Tensor], launches: list[Launched]
) -> DecodeStep | None:
    """The launches of a call; None where it may not be relaunched."""
    relaunches = relaunches_of(launches, (*cached.tensors, out, lse, *states))
    if relaunches is None:
        return None
    shapes = tuple(out.shape), tuple(lse.shape), tuple(x.numel() for x in states)
    return DecodeStep(relaunches, cached.q.device.index, *shapes)
