"""The sweep: times every configuration of a kernel on this GPU with Triton's autotuner."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import triton

from ..kernels.common.arguments import features_of
from ..kernels.portable import launch
from ..problem import OPEN, Extras, Saved, Scalars, describe
from ..tuning.config import Config, Key


class Workload(NamedTuple):
    """What to tune for: a call's shape."""

    headdim: int
    dtype: torch.dtype
    is_causal: bool
    seqlen: int
    tokens: int = 16384
    hidden: int = 2048


class Found(NamedTuple):
    """The fastest configuration of a kernel, its time, and that of the one in use before."""

    key: Key
    config: Config
    ms: float
    ms_before: float


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
            yield Config(m, n, warps, stages, descriptors)


def search(work: Workload, device: torch.device) -> Iterator[Found]:
    """The fastest configuration of each kernel for a workload, one kernel after the other."""
    for plan in plans(work, device):
        before = plan.config()
        bits, block_d = work.dtype.itemsize * 8, plan.key().block_d
        configs = list(dict.fromkeys([before, *candidates(plan.name, bits, block_d)]))
        times = measure(plan, configs)
        best = min(times, key=times.__getitem__)
        yield Found(plan.key(), best, times[best], times[before])


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


def measure(plan: launch.Plan, configs: list[Config]) -> dict[Config, float]:
    """Milliseconds of each configuration that this GPU can build; two at least."""
    options = {"FEATURES": features_of(plan.problem), "enable_fp_fusion": True}
    by_tile = {}
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for config in configs:
            tile = {"TILE": plan.tile(config)}
            launched = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            by_tile[triton.Config(tile, **launched)] = config
            plan.kernel.warmup(*plan.args, grid=(1,), **tile, **launched, **options)
    tuner = triton.autotune(configs=list(by_tile), key=[])(plan.kernel)
    with launch.on_device(plan.read[0].device):
        tuner[lambda meta: (plan.programs(meta["TILE"]),)](*plan.args, **options)
    return {by_tile[variant]: times[0] for variant, times in tuner.configs_timings.items()}
