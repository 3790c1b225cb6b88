"""What `tilewise tune` times: the launches of a call's shape, on random inputs."""

from __future__ import annotations

from collections.abc import Iterator

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

Tensor = torch.Tensor
TOKENS, HIDDEN = 16384, 2048  # of a batch


def sweep(
    device: torch.device, *, headdim: int, dtype: torch.dtype, is_causal: bool, seqlen: int
) -> Iterator[Found]:
    """The fastest configuration of each kernel for calls of this shape."""
    shape = max(1, TOKENS // seqlen), seqlen, max(1, HIDDEN // headdim), headdim
    q, k, v, dout = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    with on_device(device):
        triton.set_allocator(scratch)
        yield from search(plans(q, k, v=v, dout=dout, is_causal=is_causal), features_of)


def plans(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, is_causal: bool) -> Iterator[Plan]:
    """The launches of one forward and one backward."""
    extras = Extras()
    scalars = Scalars(q.shape[-1] ** -0.5, 0.0, left=OPEN, right=0 if is_causal else OPEN)
    problem = describe(q, k, v, extras, scalars, "bottom_right", False)
    out, lse = launch.prepare(problem, scalars, q, k)(q, k, v, extras)
    yield launch.plan_forward(problem, scalars, extras, q=q, k=k, v=v, out=out, lse=lse)
    saved = Saved(dout, None, q=q, k=k, v=v, out=out, lse=lse)
    grads, stats = empty_grads(problem, q, k, v, extras), (lse, torch.zeros_like(lse), None)
    yield from launch.plan_backward(problem, scalars, saved, stats, grads, extras)
