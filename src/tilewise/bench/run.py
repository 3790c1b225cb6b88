"""Runs a suite.

At each shape every provider is first held to fp64, then those that pass are timed in turns: flushed
(`timer`) and, where it is asked for, under sustained load (`sustained`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch

from .check import Inputs, Verdict, backward_of, judge, make_inputs, truth
from .providers import Attend, Provider, provider
from .row import Row, append, stamp
from .shapes import Shape
from .sustained import Plan, Times, measure, plan_for
from .table import DENSE, table_of
from .timer import CallFailed, Clock, Spread, clock_for, ratio
from .ways import ratio_of

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


class Ready(NamedTuple):
    """A provider whose results are right, and what is to be timed."""

    call: Callable[[], object]
    verdict: Verdict


class Stage:
    """A shape, with the inputs and the truth that its providers share."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        self.inputs = {"bshd": make_inputs(shape, device)}
        self.expected = truth(shape, self.inputs["bshd"])

    def ready(self, one: Provider) -> Ready | Outcome[Shape]:
        """The provider once it has been asked and checked, or why it is not timed."""
        try:
            if (reason := one.refuse(self.shape, self.device)) is not None:
                return Outcome(self.shape, one.name, None, refused=reason)
            if one.layout not in self.inputs:
                self.inputs[one.layout] = make_inputs(self.shape, self.device, one.layout)
            inputs = self.inputs[one.layout]
            attend = one.prepare(self.shape, self.device)
            is_ours = one.name.startswith("tilewise")
            verdict = judge(self.shape, attend, inputs, self.expected, is_ours)
            if verdict.passes:
                return Ready(call_of(self.shape, attend, inputs), verdict)
        except Exception as error:  # whatever a peer raises is its reason
            return Outcome(self.shape, one.name, None, refused=_reason(error))
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
    energy: bool = False,
) -> list[Outcome[Shape]]:
    """Times `providers` at `shapes`; the first that runs is the one that ratios are taken against.
    With `with_dense` the first provider also runs, in turn with the others, the dense shape that
    each packed one is held against. With `sustained` all are timed under load too, with `energy`
    joules are measured as well.

    Rows are appended to `save` as each shape ends, so a run that is cut short keeps what it has.
    """
    named = [provider(p) if isinstance(p, str) else p for p in providers]
    chosen = list({one.name: one for one in named}.values())  # two spellings are one provider
    common = stamp(suite, device)
    plan = plan_for(device, rounds, energy) if sustained or energy else None
    versions = f"torch {common['torch']}, triton {common['triton']}"
    show(f"{common['device']}, {versions}, {rounds} rounds in turns")
    outcomes = []
    for shape in shapes:
        entries = {one.name: (shape, one) for one in chosen}
        if with_dense and shape.lengths:
            entries[DENSE] = (shape.dense, chosen[0])
        done = run_entries(entries, common, device, rounds, round_ms, plan)
        if save is not None:
            append(save, [outcome.row for outcome in done if outcome.row is not None])
        for line in table_of(shape, done):
            show(line)
        outcomes += done
    return outcomes


def run_entries(
    entries: dict[str, tuple[Shape, Provider]],
    common: dict,
    device: str,
    rounds: int,
    round_ms: float,
    plan: Plan | None = None,
) -> list[Outcome[Shape]]:
    """What is timed in turns, by name: refuse, check, time."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # so that the memory that is free is known
    stages = {
        shape: Stage(shape, device) for shape in dict.fromkeys(at for at, _ in entries.values())
    }
    tried = {name: stages[shape].ready(one) for name, (shape, one) in entries.items()}
    done = time_ready(entries, tried, common, device, rounds, round_ms, plan=plan)
    return hold_against_dense(done) if DENSE in entries else done


def time_ready(
    entries: dict[str, tuple[Shape, Provider]],
    tried: dict[str, Ready | Outcome[Shape]],
    common: dict,
    device: str,
    rounds: int,
    round_ms: float,
    clock: Clock | None = None,
    plan: Plan | None = None,
) -> list[Outcome[Shape]]:
    """Times in turns those that are ready, by the device's clock if by no other, and with a plan
    under sustained load too; an outcome for each entry.
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
            reason = _reason(failed.error)
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


def make_row(shape: Shape, name: str, times: Times, verdict: Verdict, common: dict) -> Row:
    """A provider's row."""
    spread = Spread.of(times.flushed)
    return Row(
        **common,
        shape=shape._asdict(),
        provider=name,
        median_ms=spread.median,
        p20_ms=spread.p20,
        p80_ms=spread.p80,
        rounds_ms=times.flushed,
        tflops=shape.flops / spread.median / 1e9,
        max_error=verdict.max_error,
        bound=verdict.bound,
        extra=lengths_of(shape) | ({"joules_by": times.joules_by} if times.joules_by else {}),
        sustained_ms=times.sustained,
        joules=times.joules,
    )


def lengths_of(shape: Shape) -> dict:
    """What a packed row says of its lengths beside their name."""
    if not shape.lengths:
        return {}
    each = shape.sequences
    return {"sequences": len(each), "longest": max(each), "tokens": sum(each)}


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines[:4])[:240]}"
