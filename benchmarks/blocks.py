"""The block-size experiment: a portable kernel in every tile, its speed beside what it needs.

Larger tiles read K and V less often and need more registers and shared memory, until few programs
fit on an SM, or registers spill. What a kernel needs the compiler tells, without a GPU; speed takes
one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.bench.call import call_of
from tilewise.bench.launches import Built, build_plan, built_of, config_on, portable_plans
from tilewise.bench.providers import provider
from tilewise.bench.row import append, stamp
from tilewise.bench.run import Outcome, Ready, Stage, time_ready
from tilewise.bench.shapes import Shape

if TYPE_CHECKING:
    from tilewise.tuning.config import Config

KERNELS = {"fwd": "fwd", "bwd_dkdv": "bwd", "bwd_dq": "bwd"}  # and the pass each is timed in
PORTABLE = "tilewise:portable"
SCORES_A_THREAD = 64  # of a tile, where more always spill


class Candidate(NamedTuple):
    """A configuration; what the compiler made of it or why nothing; and its time."""

    name: str
    config: Config
    built: Built | None
    failed: str
    is_default: bool  # what the tables say
    outcome: Outcome | None = None


def configs(
    tiles: Iterable[tuple[int, int]],
    warps: Iterable[int],
    stages: Iterable[int],
    descriptors: Iterable[bool] = (False,),
) -> Iterator[Config]:
    """Every combination whose tile of scores fits the registers of its warps."""
    from tilewise.tuning.config import Config

    for (m, n), count, depth, described in itertools.product(tiles, warps, stages, descriptors):
        if m * n <= SCORES_A_THREAD * 32 * count:
            yield Config(m, n, count, depth, described)


def name_of(config: Config) -> str:
    """`128x64 w4 s3`."""
    how = " tma" if config.descriptors else ""
    return f"{config.BLOCK_M}x{config.BLOCK_N} w{config.num_warps} s{config.num_stages}{how}"


def plan_of(shape: Shape, kernel: str) -> Any:
    """The kernel's plan; of a short call, as lengths do not change what is compiled."""
    short = shape._replace(batch=1, seqlen_q=1024, seqlen_k=1024)
    plans = portable_plans(call_of(short), KERNELS[kernel])
    return next(plan for plan in plans if plan.name == kernel)


def compile_all(
    shape: Shape,
    kernel: str,
    asked: Iterable[Config],
    target: str,
    show: Callable[[str], None] = print,
) -> list[Candidate]:
    """Each configuration compiled for a target, the one that tables choose among them."""
    plan = plan_of(shape, kernel)
    usual = config_on(plan, target)
    found = []
    for config in dict.fromkeys([usual, *asked]):
        built, failed = _build(plan, config, target)
        name = name_of(config)
        needs = f"{built.registers} registers, {built.spills} spilled" if built else failed
        show(f"{name}: {needs}")
        found.append(Candidate(name, config, built, failed, config == usual))
    return found


def _build(plan: Any, config: Config, target: str) -> tuple[Built | None, str]:
    from tilewise.testing import SMEM_LIMIT

    try:
        built = built_of(build_plan(plan, config, target), target)
    except Exception as error:  # what does not compile is a result
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    if built.shared_memory > SMEM_LIMIT[target]:
        return built, f"{built.shared_memory:,} bytes of shared memory, over {SMEM_LIMIT[target]:,}"
    return built, ""


def time_all(
    shape: Shape,
    kernel: str,
    candidates: list[Candidate],
    *,
    device: str,
    rounds: int = 5,
    round_ms: float = 20.0,
    save: str | Path | None = None,
) -> list[Candidate]:
    """The same with times: each is checked, then all take turns. Of a backward kernel the whole
    backward is timed, its other kernels as the tables say.
    """
    from tilewise.tuning.select import override

    shape = shape._replace(direction=KERNELS[kernel])
    stage, common = Stage(shape, device), stamp("blocks", device)
    tried: dict[str, Ready | Outcome] = {}
    for one in candidates:
        if one.failed:
            tried[one.name] = Outcome(shape, one.name, None, refused=one.failed)
            continue
        forced = {kernel: one.config}
        with override(**forced):
            ready = stage.ready(provider(PORTABLE)._replace(name=f"{PORTABLE}:{one.name}"))
        if isinstance(ready, Ready):
            ready = ready._replace(call=_under(forced, ready.call))
        tried[one.name] = ready
    entries = {one.name: (shape, provider(PORTABLE)) for one in candidates}
    outcomes = time_ready(entries, tried, common, device, rounds, round_ms)
    done = [_finished(one, kernel, x) for one, x in zip(candidates, outcomes)]
    if save is not None:
        rows = [one.outcome.row for one in done if one.outcome is not None]
        append(save, [row for row in rows if row is not None])
    return done


def _under(forced: dict, call: Callable[[], object]) -> Callable[[], object]:
    from tilewise.tuning.select import override

    def forced_call():
        with override(**forced):
            return call()

    return forced_call


def _finished(one: Candidate, kernel: str, outcome: Outcome) -> Candidate:
    """With its outcome, whose row says what was launched."""
    if (row := outcome.row) is not None:
        built = {}
        if one.built is not None:
            fits = one.built.occupancy
            built = {**one.built._asdict(), "occupancy": fits._asdict() if fits else None}
        extra = {"kernel": kernel, "config": list(one.config), "built": built}
        extra["is_default"] = one.is_default
        outcome = outcome._replace(row=dataclasses.replace(row, extra={**row.extra, **extra}))
    return one._replace(outcome=outcome)
