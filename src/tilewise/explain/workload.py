"""What `tilewise tune` times: the launches of a call's shape, on random inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton

from ..kernels.common.arguments import features_of
from ..kernels.common.building import on_device
from ..kernels.common.outputs import empty_grads
from ..kernels.common.program import scratch
from ..kernels.portable import launch
from ..kernels.portable.plan import Plan
from ..problem import OPEN, Extras, Saved, Scalars, describe
from ..tuning.search import Found, search


class Workload(NamedTuple):
    """What to tune for: a call's shape."""

    headdim: int
    dtype: torch.dtype
    is_causal: bool
    seqlen: int
    tokens: int = 16384
    hidden: int = 2048


def sweep(work: Workload, device: torch.device) -> Iterator[Found]:
    """The fastest configuration of each kernel for a workload."""
    with on_device(device):
        triton.set_allocator(scratch)
        yield from search(plans(work, device), features_of)


def plans(work: Workload, device: torch.device) -> Iterator[Plan]:
    """The launches of one forward and one backward on random inputs."""
    batch, nheads = max(1, work.tokens // work.seqlen), max(1, work.hidden // work.headdim)
    shape = (batch, work.seqlen, nheads, work.headdim)
    q, k, v, dout = (torch.randn(shape, device=device, dtype=work.dtype) for _ in range(4))
    extras, scalars = (
        Extras(),
        Scalars(work.headdim**-0.5, 0.0, OPEN, 0 if work.is_causal else OPEN),
    )
    problem = describe(q, k, v, extras, scalars, "bottom_right", False)
    out, lse = launch.forward(problem, q, k, v, extras, scalars)
    yield launch.plan_forward(problem, scalars, extras, q=q, k=k, v=v, out=out, lse=lse)
    saved = Saved(dout, None, q, k, v, out, lse)
    grads, stats = empty_grads(problem, q, k, v, extras), (lse, torch.zeros_like(lse), None)
    yield from launch.plan_backward(problem, scalars, saved, stats, grads, extras)
