"""The sweep: times every configuration of a kernel on this GPU with Triton's autotuner."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import triton

from .config import Config, Key


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
            yield Config(m, n, num_warps=warps, num_stages=stages, descriptors=descriptors)


def search(plans: Iterable[Any], features_of: Callable[[Any], Any]) -> Iterator[Found]:
    """The fastest configuration of each of the portable backend's plans, one after the other."""
    for plan in plans:
        key, before = plan.key(), plan.config()
        configs = list(dict.fromkeys([before, *candidates(plan.name, key.bits, key.block_d)]))
        times = measure(plan, configs, features=features_of(plan.problem))
        best = min(times, key=times.__getitem__)
        yield Found(key, best, times[best], times[before])


def measure(plan: Any, configs: list[Config], features: Any) -> dict[Config, float]:
    """Milliseconds of each configuration that this GPU can build; two at least."""
    options = {"FEATURES": features, "enable_fp_fusion": True}
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
