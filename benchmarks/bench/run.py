"""Runs a suite.

At each shape every provider is first held to fp64, then those that pass are timed in interleaved
rounds: flushed (`timer`) and, where it is asked for, under sustained load (`sustained`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from tilewise.explain.shapes import Shape

from . import fp8
from .check import Inputs, Verdict, backward_of, judge, make_inputs, truth
from .providers import Attend, Provider, provider
from .row import Row, Stamp, append, stamp
from .shapes import dense_of
from .sustained import Plan, Times, measure, plan_for
from .table import spread_of, table_of
from .timer import CallFailed, Clock, Spread, clock_for, ratio
from .ways import ratio_of

DENSE = "dense"  # the first provider at the dense shape that a packed one is held against
Of = TypeVar("Of")


class Outcome(NamedTuple, Generic[Of]):
    """What became of one provider at one shape, or at whatever else is timed: a row, or the reason
    why there is none.
    """

    shape: Of
    provider: str
    row: Row | None
    ratio: Spread | None = None  # this provider's time over the first one's, round by round
    refused: str | None = None  # it cannot run here
    wrong: str | None = None  # it ran, and its result is wrong
    kept: Spread | None = None  # its FLOP/s on packed sequences over its dense ones, by round
    sustained: Spread | None = None  # as `ratio`, of times under sustained load
    energy: float | None = None  # its joules over the first one's


class Run:
    """What the rows of one run share, the file that they are appended to, and what shows lines."""

    def __init__(
        self,
        suite: str,
        device: str,
        save: str | Path | None,
        show: Callable[[str], object] = print,
    ) -> None:
        self.common, self.save, self.show = stamp(suite, device), save, show

    def begin(self, rounds: int, more: str = "") -> None:
        """Says where it runs."""
        versions = "torch {torch}, triton {triton}".format_map(self.common)
        self.show(f"{self.common['device']}, {versions}, {rounds} interleaved rounds{more}")

    def keep(self, outcomes: Iterable[Any], lines: Iterable[str] = ()) -> None:
        """Appends the rows that there are, and says these lines."""
        if self.save is not None:
            append(self.save, [one.row for one in outcomes if one.row is not None])
        for line in lines:
            self.show(line)


class Ready(NamedTuple):
    """A provider whose results are right, and what is to be timed."""

    call: Callable[[], object]
    verdict: Verdict


class Stage:
    """A shape, with the inputs and the truth that its providers share."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        self.inputs = {"bshd": make_inputs(shape, device)}
        self.expected = {"bshd": truth(shape, self.inputs["bshd"])}

    def ready(self, one: Provider) -> Ready | Outcome[Shape]:
        """The provider once it has been asked and checked, or why it is not timed."""
        try:
            if (reason := one.refuse(self.shape, self.device)) is not None:
                return Outcome(self.shape, one.name, None, refused=reason)
            if one.layout not in self.inputs:
                self.inputs[one.layout] = make_inputs(self.shape, self.device, one.layout)
            inputs = self.inputs[one.layout]
            values = fp8.values_of(one.layout)
            if values not in self.expected:
                self.expected[values] = truth(self.shape, inputs)
            attend = one.prepare(self.shape, self.device)
            is_ours = one.name.startswith("tilewise")
            verdict = judge(self.shape, attend, inputs, self.expected[values], is_ours)
            if verdict.passes:
                return Ready(call_of(self.shape, attend, inputs), verdict)
        except Exception as error:  # whatever a peer raises is its reason
            return Outcome(self.shape, one.name, None, refused=reason_of(error))
        return Outcome(self.shape, one.name, None, wrong=verdict.what)


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
    with_dense: bool = False,
    sustained: bool = False,
    span_ms: float | None = None,
    energy: bool = False,
) -> list[Outcome[Shape]]:
    """Times `providers` at `shapes`; the first that runs is the one that ratios are taken against.
    With `with_dense` the first provider also runs, interleaved with the others, the dense shape
    that each packed one is held against. With `sustained` all are timed under load too, in spans of
    at least `span_ms`; with `energy` joules are measured as well.

    Rows are appended to `save` as each shape ends, so a run that is cut short keeps what it has.
    """
    named = [provider(p) if isinstance(p, str) else p for p in providers]
    chosen = list({one.name: one for one in named}.values())  # two spellings are one provider
    run = Run(suite, device, save, show)
    plan = plan_for(device, rounds, energy, span_ms) if sustained or energy else None
    run.begin(rounds)
    outcomes = []
    for shape in shapes:
        entries = {one.name: (shape, one) for one in chosen}
        if with_dense and shape.lengths:
            entries[DENSE] = (dense_of(shape), chosen[0])
        done = run_entries(entries, run.common, device, rounds, round_ms, plan)
        run.keep(done, lines_of(shape, done))
        outcomes += done
    return outcomes


def lines_of(shape: Shape, done: Sequence[Outcome[Shape]]) -> list[str]:
    """The lines of a shape; those of the dense one beside it say how much of its FLOP/s the first
    provider keeps on packed sequences.
    """
    timed = [one.provider for one in done if one.row is not None]
    named = {x.provider if x.shape == shape else f"{x.provider} {DENSE}": x for x in done}
    lines = table_of(str(shape), named, f"time / {timed[0]}" if timed else "")
    if done[0].kept:
        lines[-1] += f"; packed keeps {spread_of(done[0].kept)} of its TFLOP/s"
    return lines


def run_entries(
    entries: dict[str, tuple[Shape, Provider]],
    common: Stamp,
    device: str,
    rounds: int,
    round_ms: float,
    plan: Plan | None = None,
) -> list[Outcome[Shape]]:
    """Refuses, checks and times entries, by name, in interleaved rounds."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # so that the memory that is free is known
    stages = {
        shape: Stage(shape, device) for shape in dict.fromkeys(at for at, _ in entries.values())
    }
    tried = {name: stages[shape].ready(one) for name, (shape, one) in entries.items()}
    done = time_ready(entries, tried, common, device, rounds, round_ms, plan=plan)
    return hold_against_dense(done) if DENSE in entries else done


def time_ready(
    entries: Mapping[str, tuple[Of, Any]],
    tried: Mapping[str, Ready | Outcome[Of]],
    common: Stamp,
    device: str,
    rounds: int,
    round_ms: float,
    clock: Clock | None = None,
    plan: Plan | None = None,
) -> list[Outcome[Of]]:
    """Times those that are ready in interleaved rounds, by the device's clock if by no other, and
    with a plan under sustained load too; an outcome for each entry: a shape, and what has a `name`.
    """
    outcomes = {name: one for name, one in tried.items() if isinstance(one, Outcome)}
    ready = {name: one for name, one in tried.items() if isinstance(one, Ready)}
    calls = {name: one.call for name, one in ready.items()}
    clock = clock or clock_for(device)
    times = None
    while times is None:  # again without the one that raised
        try:
            times = measure(calls, clock, rounds, round_ms, plan)
        except CallFailed as failed:
            del calls[failed.name], ready[failed.name]  # and its memory
            shape, one = entries[failed.name]
            reason = reason_of(failed.error)
            outcomes[failed.name] = Outcome(shape, one.name, None, refused=reason)
    for name, own in times.items():
        shape, one = entries[name]
        row = make_row(shape, one.name, own, ready[name].verdict, common)
        outcomes[name] = timed(shape, row, own, first=next(iter(times.values())))
    return [outcomes[name] for name in entries]


def timed(shape: Of, row: Row, own: Times, first: Times) -> Outcome[Of]:
    """The outcome of what was timed, beside the first provider's times."""
    return Outcome(
        shape,
        row.provider,
        row,
        ratio(first.flushed, own.flushed),
        sustained=ratio(first.sustained, own.sustained) if own.sustained else None,
        energy=own.joules / first.joules if own.joules and first.joules else None,
    )


def hold_against_dense(outcomes: list[Outcome[Shape]]) -> list[Outcome[Shape]]:
    """The outcomes of a packed shape, of which the last is the first provider's dense one: the
    first says how much of the dense FLOP/s it keeps. Ratios of times are for the packed alone.
    """
    first, *others, dense = outcomes
    dense = dense._replace(ratio=None, sustained=None, energy=None)
    if dense.row is not None:
        beside = {**dense.row.extra, "beside": str(first.shape)}
        dense = dense._replace(row=dataclasses.replace(dense.row, extra=beside))
    if first.row is not None and dense.row is not None:
        times = ratio_of(first.row, dense.row)
        work = first.shape.flops / dense.shape.flops
        kept = Spread(*(work * value for value in times))
        extra = {**first.row.extra, "of_dense": kept.median}
        first = first._replace(kept=kept, row=dataclasses.replace(first.row, extra=extra))
    return [first, *others, dense]


def call_of(shape: Shape, attend: Attend, inputs: Inputs) -> Callable[[], object]:
    """What is timed.

    A backward is asked again and again, so that no forward is in its time.
    """
    if shape.direction == "fwd":

        def forward():
            with torch.no_grad():
                return attend(*inputs.arguments)

        return forward
    if shape.direction == "bwd":
        return backward_of(shape, attend, inputs)[1]
    arguments, wanted = inputs.leaves(shape)
    return lambda: torch.autograd.grad(attend(*arguments), wanted, inputs.dout)


def make_row(shape: Any, name: str, times: Times, verdict: Verdict, common: Stamp) -> Row:
    """A provider's row."""
    extra = lengths_of(shape) | ({"joules_by": times.joules_by} if times.joules_by else {})
    if times.sustained:
        extra["span_ms"] = times.span_ms
    loaded = dict(sustained_ms=times.sustained, joules=times.joules)
    more = dict(flops=shape.flops, extra=extra, **loaded)
    return Row.of(common, shape, name, times.flushed, verdict, **more)


def lengths_of(shape: Any) -> dict:
    """What a packed row says of its lengths beside their name."""
    if not isinstance(shape, Shape) or not shape.lengths:
        return {}
    each = shape.sequences
    return {"sequences": len(each), "longest": max(each), "tokens": sum(each)}


def reason_of(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[:4])[:240]}"
