"""The sweep of `tilewise tune`: times every configuration of the kernels of a call's shape on this
GPU with Triton's autotuner, on random inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton

from ..kernels.common.arguments import features_of
from ..kernels.common.building import on_device
from ..kernels.common.outputs import empty_grads
from ..kernels.common.program import scratch
from ..kernels.portable import launch
from ..kernels.portable.plan import Plan
from ..problem import OPEN, Extras, Saved, Scalars, describe
from ..tuning.tables import Config, Key

Tensor = torch.Tensor
TOKENS, HIDDEN = 16384, 2048  # of a batch


class Found(NamedTuple):
    """The fastest configuration of a kernel, its time, and that of the one in use before."""

    key: Key
    config: Config
    ms: float
    ms_before: float


def sweep(
    device: torch.device, *, headdim: int, dtype: torch.dtype, is_causal: bool, seqlen: int
) -> Iterator[Found]:
    """The fastest configuration of each of the portable backend's kernels for calls of this shape,
    one after the other.
    """
    shape = max(1, TOKENS // seqlen), seqlen, max(1, HIDDEN // headdim), headdim
    q, k, v, dout = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    with on_device(device):
        triton.set_allocator(scratch)
        for plan in plans(q, k, v=v, dout=dout, is_causal=is_causal):
            key, before = plan.key(), plan.config()
            configs = list(dict.fromkeys([before, *candidates(plan.name, key.bits, key.block_d)]))
            times = measure(plan, configs)
            best = min(times, key=times.__getitem__)
            yield Found(key, best, times[best], times[before])


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


def candidates(kernel: str, bits: int, block_d: int = 128) -> Iterator[Config]:
    """The configurations worth a try; what does not fit the GPU drops out when it is built."""
    blocks = [(64, 64), (64, 128), (128, 64), (128, 128)] if bits == 16 else [(32, 32), (64, 32)]
    if block_d > 256:
        blocks = [(16, 16), (16, 32), (32, 16), (32, 32), (64, 16), (64, 32)]
    if kernel == "bwd_dkdv":
        blocks = [(n, m) for m, n in blocks]
    for (m, n), warps, stages, descriptors in itertools.product(
        blocks, (4, 8), (2, 3), (False, True)
    ):
        if m * n // warps <= 2048:  # more than 64 scores a thread spill
            yield Config(m, n, num_warps=warps, num_stages=stages, descriptors=descriptors)


def measure(plan: Plan, configs: list[Config]) -> dict[Config, float]:
    """Milliseconds of each configuration that this GPU can build; two at least."""
    options: dict[str, Any] = {"FEATURES": features_of(plan.problem), "enable_fp_fusion": True}
    by_tile = {}
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for config in configs:
            tile = {"TILE": plan.tile(config)}
            launched = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            by_tile[triton.Config(tile, **launched)] = config
            plan.kernel.warmup(*plan.args.values(), grid=(1,), **tile, **launched, **options)
    tuner = triton.autotune(configs=list(by_tile), key=[])(plan.kernel)
    tuner[lambda meta: (plan.programs(meta["TILE"]),)](*plan.args.values(), **options)
    return {by_tile[variant]: times[0] for variant, times in tuner.configs_timings.items()}
