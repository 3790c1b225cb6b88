"""Times under sustained load, which are the ones that count where calls follow one another.

Behind a pause a call runs below the card's power limit. Back to back, as in training, calls reach
it and the clock falls until they keep to it: then other things decide which is the faster. So a
call is timed in spans of calls without a pause, on a card that has been under load for seconds, in
an order drawn at random for each round; ratios are taken round by round, as in `timer`.

Short spans of a round follow each other faster than the times of a provider settle: bf16 took 2.85
ms in spans of 10 ms beside FP8, and 3.24 in spans of a second (one H200), as if providers shared a
clock. So calls that ask for unlike power, as dtypes may, are compared in spans of a second.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from .energy import Meter, NoEnergy, block, open_meter
from .timer import Call, Clock, attempt, calls_in, time_interleaved

LEAST_ROUNDS = 8
SPAN_MS = {"cuda": 10.0, "cpu": 1.0}


class Span(Protocol):
    """One call that is not timed, as the one before was another's, then `calls` of them back to
    back: milliseconds of each.
    """

    def __call__(self, call: Call, calls: int) -> float: ...


def cpu_span(call: Call, calls: int) -> float:
    """Wall time."""
    call()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) * 1e3 / calls


def cuda_span(call: Call, calls: int) -> float:
    """Device time between two events."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


class Plan(NamedTuple):
    """How sustained times are taken."""

    span: Span
    draw: random.Random  # of the orders
    rounds: int = LEAST_ROUNDS
    span_ms: float = SPAN_MS["cuda"]  # a span has at least so many
    load_ms: float = 2000.0  # what the card has done before the first round
    meter: Meter | None = None  # of energy; None: not asked


def plan_for(
    device: str, rounds: int, with_energy: bool = False, span_ms: float | None = None
) -> Plan:
    """The plan of a device; on a CPU spans are short and nothing precedes them. NoEnergy where its
    energy cannot be asked for.
    """
    rounds, draw = max(rounds, LEAST_ROUNDS), random.Random(0)
    if device.startswith("cuda"):
        meter = open_meter(device) if with_energy else None
        return Plan(cuda_span, draw, rounds, span_ms or SPAN_MS["cuda"], meter=meter)
    if with_energy:
        raise NoEnergy(f"a GPU's driver measures it, and {device} is no GPU")
    return Plan(cpu_span, draw, rounds, span_ms or SPAN_MS["cpu"], load_ms=0.0)


class Times(NamedTuple):
    """What was measured of one provider: milliseconds by round in both ways, joules a call."""

    flushed: list[float]
    sustained: list[float]  # none where it is not asked for
    joules: float | None = None
    joules_by: str = ""  # what they are measured by
    span_ms: float = 0.0  # the least of a sustained span


def measure(
    calls: Mapping[str, Call], clock: Clock, rounds: int, round_ms: float, plan: Plan | None
) -> dict[str, Times]:
    """Every call in the flushed way and, by a plan, in the sustained one; CallFailed names the one
    that raises.
    """
    flushed = time_interleaved(calls, clock=clock, rounds=rounds, round_ms=round_ms)
    if plan is None:
        return {name: Times(times, []) for name, times in flushed.items()}
    if plan.meter is None:
        sustained = time_sustained(calls, plan)
        return {name: Times(flushed[name], sustained[name], span_ms=plan.span_ms) for name in calls}
    joules, by = joules_of(calls, plan), plan.meter.kind
    # The blocks have put the card under load; what is left learns how long a call takes
    sustained = time_sustained(calls, plan._replace(load_ms=plan.load_ms / 10))
    return {
        name: Times(flushed[name], sustained[name], joules[name], by, plan.span_ms)
        for name in calls
    }


def time_sustained(calls: Mapping[str, Call], plan: Plan) -> dict[str, list[float]]:
    """For each named call milliseconds by round."""

    def timed(name: str, count: int) -> float:
        return attempt(name, lambda: plan.span(calls[name], count))

    names = list(calls)
    counts = {name: calls_in(plan.span_ms, timed(name, 2)) for name in names}
    done = 0.0
    while names and done < plan.load_ms:
        for name in names:
            each = timed(name, counts[name])
            done += each * counts[name]
            counts[name] = calls_in(plan.span_ms, each)  # the first ones had the host's time in it
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(plan.rounds):
        for name in plan.draw.sample(names, len(names)):
            times[name].append(timed(name, counts[name]))
    return times


def joules_of(calls: Mapping[str, Call], plan: Plan) -> dict[str, float]:
    """Joules a call: a block of each, in an order drawn at random for each shape, so that over
    the rows of a table no provider has the warmer card.
    """
    assert plan.meter is not None
    span, meter = plan.span, plan.meter
    names = plan.draw.sample(list(calls), len(calls))
    found = {
        name: attempt(name, lambda name=name: block(calls[name], span, meter)) for name in names
    }
    return {name: found[name] for name in calls}
