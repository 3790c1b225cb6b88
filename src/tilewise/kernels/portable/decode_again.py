"""A step of decoding that was launched before, for other tensors of the same look: no checks, and
no arguments but the addresses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..common.cached import Cached
from ..common.relaunch import Again, is_watched, pattern_of

Tensor = torch.Tensor


class Step(NamedTuple):
    """What a call launched. It holds no tensor."""

    launches: list[Again]
    device: int | None
    out: tuple[int, ...]  # shapes
    lse: tuple[int, ...]
    states: tuple[int, ...]  # floats of each of the states that lie between launches

    def __call__(
        self, q: Tensor, out: Tensor | None, addresses: list[int]
    ) -> tuple[Tensor, Tensor] | None:
        """`out` and `lse`; None where another device is current, or somebody watches launches."""
        if torch._C._cuda_getDevice() != self.device or is_watched():
            return None
        if out is None:
            out = q.new_empty(self.out)
            addresses = [*addresses[:-1], out.data_ptr()]
        lse = q.new_empty(self.lse, dtype=torch.float32)
        states = q.new_empty(sum(self.states), dtype=torch.float32)
        at = states.data_ptr()
        addresses = [*addresses, lse.data_ptr()]
        for floats in self.states:
            addresses.append(at)
            at += 4 * floats
        for launch in self.launches:
            launch.launch(self.device, addresses)
        return out, lse


def step_of(cached: Cached, out: Tensor, lse: Tensor, plans: list, compiled: list) -> Step | None:
    """What the plans launched; None where a tensor was copied to be contiguous."""
    extras = cached.extras
    states = [x for x in plans[0].args[2][:3] if x is not None]
    row = (
        *(cached.q, cached.k, cached.v, cached.page_table, extras.seqused_k, extras.cu_seqlens_q),
        *(extras.alibi_slopes, extras.sinks, out, lse, *states),
    )
    launches = []
    for plan, kernel in zip(plans, compiled):
        args = pattern_of((*plan.args, *plan.constants.values()), row)
        if kernel is None or args is None or torch.version.hip is not None:
            return None
        launches.append(Again(kernel, plan.programs, args))
    shapes = tuple(out.shape), tuple(lse.shape), tuple(x.numel() for x in states)
    return Step(launches, cached.q.device.index, *shapes)
