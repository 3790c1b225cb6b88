"""Runs a suite.

At each shape every provider is first held to fp64, then those that pass are timed in turns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .check import Inputs, Verdict, judge, make_inputs, truth
from .providers import Attend, Provider, provider
from .row import Row, append, stamp
from .shapes import Shape
from .standings import ratios_to_first
from .timer import CallFailed, Spread, clock_for, ratio, time_interleaved


class Outcome(NamedTuple):
    """What became of one provider at one shape: a row, or the reason why there is none."""

    shape: Shape
    provider: str
    row: Row | None
    ratio: Spread | None = None  # this provider's time over the first one's, round by round
    refused: str | None = None  # it cannot run here
    wrong: str | None = None  # it ran, and its result is wrong


def run_suite(
    shapes: Iterable[Shape],
    providers: Sequence[str | Provider],
    *,
    suite: str = "adhoc",
    device: str = "cpu",
    rounds: int = 5,
    round_ms: float = 30.0,
    save: str | Path | None = None,
    show: Callable[[str], None] = print,
) -> list[Outcome]:
    """Times `providers` at `shapes`; the first that runs is the one that ratios are taken against.

    Rows are appended to `save` as each shape ends, so a run that is cut short keeps what it has.
    """
    named = [provider(p) if isinstance(p, str) else p for p in providers]
    chosen = list({one.name: one for one in named}.values())  # two spellings are one provider
    common = stamp(suite, device)
    versions = f"torch {common['torch']}, triton {common['triton']}"
    show(f"{common['device']}, {versions}, {rounds} rounds in turns")
    outcomes = []
    for shape in shapes:
        done = run_shape(shape, chosen, common, device, rounds, round_ms)
        if save is not None:
            append(save, [outcome.row for outcome in done if outcome.row is not None])
        for line in table_of(shape, done):
            show(line)
        outcomes += done
    return outcomes


def run_shape(
    shape: Shape,
    providers: Sequence[Provider],
    common: dict,
    device: str,
    rounds: int,
    round_ms: float,
) -> list[Outcome]:
    """One shape: refuse, check, time."""
    outcomes: dict[str, Outcome] = {}
    calls: dict[str, Callable[[], object]] = {}
    verdicts: dict[str, Verdict] = {}
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # so that the memory that is free is known
    inputs = {"bshd": make_inputs(shape, device)}
    expected = truth(shape, inputs["bshd"])
    for one in providers:
        try:
            if (reason := one.refuse(shape, device)) is not None:
                outcomes[one.name] = Outcome(shape, one.name, None, refused=reason)
                continue
            if one.layout not in inputs:
                inputs[one.layout] = make_inputs(shape, device, one.layout)
            mine = inputs[one.layout]
            attend = one.prepare(shape, device)
            verdict = judge(shape, attend, mine, expected, one.name.startswith("tilewise"))
            calls[one.name] = call_of(shape, attend, mine)
        except Exception as error:  # whatever a peer raises is its reason
            outcomes[one.name] = Outcome(shape, one.name, None, refused=_reason(error))
            continue
        verdicts[one.name] = verdict
        if not verdict.passes:
            del calls[one.name]
            outcomes[one.name] = Outcome(shape, one.name, None, wrong=verdict.what)
    clock = clock_for(device)
    times = None
    while times is None:  # again without the one that raised
        try:
            times = time_interleaved(calls, clock=clock, rounds=rounds, round_ms=round_ms)
        except CallFailed as failed:
            del calls[failed.name]
            reason = _reason(failed.error)
            outcomes[failed.name] = Outcome(shape, failed.name, None, refused=reason)
    baseline = next(iter(times.values()), None)
    for name, own in times.items():
        row = make_row(shape, name, own, verdicts[name], common)
        outcomes[name] = Outcome(shape, name, row, ratio(baseline, own))
    return [outcomes[one.name] for one in providers]


def call_of(shape: Shape, attend: Attend, inputs: Inputs) -> Callable[[], object]:
    """What is timed.

    A backward keeps its graph and is asked again, so that no forward is in its time.
    """
    if shape.direction == "fwd":

        def forward():
            with torch.no_grad():
                return attend(*inputs[:3])

        return forward
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    if shape.direction == "bwd":
        out = attend(*leaves)
        return lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
    return lambda: torch.autograd.grad(attend(*leaves), leaves, inputs.dout)


def make_row(shape: Shape, name: str, times: list[float], verdict: Verdict, common: dict) -> Row:
    """A provider's row."""
    spread = Spread.of(times)
    return Row(
        **common,
        shape=shape._asdict(),
        provider=name,
        median_ms=spread.median,
        p20_ms=spread.p20,
        p80_ms=spread.p80,
        rounds_ms=times,
        tflops=shape.flops / spread.median / 1e9,
        max_error=verdict.max_error,
        bound=verdict.bound,
    )


def table_of(shape: Shape, outcomes: Sequence[Outcome]) -> list[str]:
    """The lines of one shape.

    The last column says how many times as long as the first provider this one took.
    """
    timed = [o for o in outcomes if o.row is not None]
    lines = [f"\n{shape}"]
    if timed:
        head = f"  {'':<20}{'ms':>9}{'p20-p80':>17}{'TFLOP/s':>9}{'error':>10}{'bound':>10}"
        lines.append(f"{head}  time / {timed[0].provider}")
    for outcome in outcomes:
        if (row := outcome.row) is None:
            why = f"WRONG: {outcome.wrong}" if outcome.wrong else f"not here: {outcome.refused}"
            lines.append(f"  {outcome.provider:<20}{why}")
            continue
        spread = f"{row.p20_ms:.3g}-{row.p80_ms:.3g}"
        times = f"{outcome.ratio.median:.3f} ({outcome.ratio.p20:.3f}-{outcome.ratio.p80:.3f})"
        lines.append(
            f"  {outcome.provider:<20}{row.median_ms:>9.3g}{spread:>17}{row.tflops:>9.3g}"
            f"{row.max_error:>10.2g}{row.bound:>10.2g}  {times}"
        )
    return lines


def summary(outcomes: Sequence[Outcome]) -> str:
    """One sentence: how the first provider stands against each peer."""
    wrong = sum(outcome.wrong is not None for outcome in outcomes)
    timed = sum(outcome.row is not None for outcome in outcomes)
    ratios: dict[str, list[float]] = {}
    for of_shape in ratios_to_first(outcomes).values():
        for name, value in of_shape.items():
            ratios.setdefault(name, []).append(value)
    parts = [
        f"{name} {sum(value >= 1 for value in values)}/{len(values)} (worst {min(values):.2f})"
        for name, values in ratios.items()
    ]
    against = f"; not slower than {', '.join(parts)}" if parts else ""
    return f"{timed} rows timed, {wrong} wrong{against}"


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[:4])[:240]}"


def warn(line: str) -> None:
    """`show` for callers whose standard output is JSON."""
    print(line, file=sys.stderr)
