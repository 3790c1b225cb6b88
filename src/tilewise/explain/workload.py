"""What `tilewise tune` times: the launches of a call's shape, on random inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..kernels.common.arguments import features_of
from ..kernels.portable import launch
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
    with launch.on_device(device):
        yield from search(plans(work, device), features_of)


def plans(work: Workload, device: torch.device) -> Iterator[launch.Plan]:
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
    yield launch.plan_forward(problem, q, k, v, out, lse, extras, scalars)
    saved = Saved(dout, None, q, k, v, out, lse)
    delta, *_ = launch.run_delta(problem, saved, extras, False)
    grads = launch.empty_grads(problem, q, k, v, extras)
    yield from launch.plan_backward(
        problem, dout, q, k, v, (lse, delta, None), grads, extras, scalars
    )
