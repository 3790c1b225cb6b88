"""How the first provider stands at the end of a run: against each peer, and against the best one.

A ratio is a peer's time over the first provider's, both from interleaved rounds of one shape;
shapes where the first provider has no row have no ratio. Where there are times under sustained
load, they are the ones that count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.explain.shapes import Shape

from .shapes import dense_of
from .table import aligned

if TYPE_CHECKING:
    from .run import Outcome

BEST_OF = ("fa3", "cudnn", "fa4")  # the peers that a GPU's best time is looked for among
Measure = Callable[["Outcome"], float | None]


mean_of = statistics.geometric_mean  # of ratios


class Standing(NamedTuple):
    """Ratios in figures: above 1 the first provider is the better."""

    mean: float  # geometric
    least: float
    most: float
    ahead: int  # how many are 1 or more
    rows: int
    worst: Any  # what has the least

    @classmethod
    def of(cls, ratios: Mapping[Any, float]) -> Standing:
        """The summary of at least one ratio, each under what it is of."""
        worst, most = (pick(ratios, key=ratios.__getitem__) for pick in (min, max))
        ahead = sum(value >= 1 for value in ratios.values())
        return cls(
            *(mean_of(ratios.values()), ratios[worst], ratios[most]), ahead, len(ratios), worst
        )


def _flushed(outcome: Outcome) -> float | None:
    return outcome.ratio.median if outcome.ratio else None


def _sustained(outcome: Outcome) -> float | None:
    return outcome.sustained.median if outcome.sustained else None


def _energy(outcome: Outcome) -> float | None:
    return outcome.energy


def standings(outcomes: Sequence[Outcome]) -> list[str]:
    """A line a peer and direction, one for the best peer of each shape, and the peers without a
    row; again for each way in which times were taken, and for energy.
    """
    tables = {"sustained ": _sustained, "flushed ": _flushed}
    if not any(map(_sustained, outcomes)):
        tables = {"": _flushed}
    first = outcomes[0].provider if outcomes else ""
    lines = []
    for direction in dict.fromkeys(outcome.shape.direction for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.shape.direction == direction]
        for way, measure in tables.items():
            title = f"{direction}: {way}time of a peer / time of {first}"
            lines += _table(title, _columns(ratios_to_first(mine, measure)))
        title = f"{direction}: joules of a peer / joules of {first}"
        lines += _table(title, _columns(ratios_to_first(mine, _energy)))
    return lines + _absences(outcomes)


def summary(outcomes: Sequence[Outcome]) -> str:
    """One sentence: how the first provider stands against each peer and the best one."""
    is_sustained = any(map(_sustained, outcomes))
    said = [counted(outcomes)]
    if columns := _columns(ratios_to_first(outcomes, _sustained if is_sustained else _flushed)):
        load = "under sustained load " if is_sustained else ""
        said.append(f"{load}not slower than {_figures(columns)}")
    if columns := _columns(ratios_to_first(outcomes, _energy)):
        said.append(f"joules not above those of {_figures(columns)}")
    return "; ".join(said)


def counted(outcomes: Sequence[Outcome]) -> str:
    """How many rows there are, and how many results are wrong."""
    wrong = sum(outcome.wrong is not None for outcome in outcomes)
    return f"{sum(outcome.row is not None for outcome in outcomes)} rows timed, {wrong} wrong"


def _figures(columns: dict[str, dict[Shape, float]]) -> str:
    found = {name: Standing.of(column) for name, column in columns.items()}
    parts = [
        f"{name} {of.ahead}/{of.rows} (mean {of.mean:.3f}, worst {of.least:.3f})"
        for name, of in found.items()
    ]
    return ", ".join(parts)


def ratios_to_first(
    outcomes: Sequence[Outcome], measure: Measure = _flushed
) -> dict[Shape, dict[str, float]]:
    """For each shape where the first provider ran: each other's time, or energy, over its."""
    timed: dict[Shape, dict[str, float]] = {}
    for outcome in outcomes:
        if outcome.row is not None and (value := measure(outcome)) is not None:
            timed.setdefault(outcome.shape, {})[outcome.provider] = value
    first = outcomes[0].provider if outcomes else ""
    return {
        shape: {name: value for name, value in of.items() if name != first}
        for shape, of in timed.items()
        if first in of
    }


def _columns(ratios: dict[Shape, dict[str, float]]) -> dict[str, dict[Shape, float]]:
    """By peer, and of the best peer of each shape."""
    columns = {
        name: {shape: of[name] for shape, of in ratios.items() if name in of}
        for name in dict.fromkeys(name for of in ratios.values() for name in of)
    }
    if ran := [name for name in BEST_OF if name in columns]:
        rivals = {shape: [of[name] for name in ran if name in of] for shape, of in ratios.items()}
        best = {shape: min(values) for shape, values in rivals.items() if values}
        columns[f"best peer ({', '.join(ran)})"] = best
    return columns


def dense_rates(outcomes: Sequence[Outcome]) -> list[str]:
    """A line a set of lengths: FLOP/s of the first provider on packed sequences over those of the
    dense shape, and for ragged lengths also over packed equal ones held against that same shape.
    """
    kept = {outcome.shape: outcome.kept.median for outcome in outcomes if outcome.kept is not None}
    equal = {dense_of(shape): shape for shape in kept if not shape.is_ragged}
    tables: dict[str, dict[str, dict[Shape, float]]] = {}
    for shape, value in kept.items():
        columns = tables.setdefault(shape.direction, {})
        name = f"{shape.lengths} / dense S{dense_of(shape).seqlen_q}"
        columns.setdefault(name, {})[shape] = value
        if shape.is_ragged and dense_of(shape) in equal:
            other = equal[dense_of(shape)]
            name = f"{shape.lengths} / {other.lengths}"
            columns.setdefault(name, {})[shape] = value / kept[other]
    first = outcomes[0].provider if outcomes else ""
    lines = []
    for direction, columns in tables.items():
        lines += _table(f"{direction}: TFLOP/s of {first}, packed / dense or equal", columns)
    return lines


def _table(title: str, columns: dict[str, dict[Shape, float]]) -> list[str]:
    """A line a name: the geometric mean of its figures, the least of them and where that is."""
    rows = [(title, "geometric mean", "worst", "at")]
    for name, column in columns.items():
        of = Standing.of(column)
        where = f"{of.worst}, of {of.rows} shape{'s' if of.rows > 1 else ''}"
        rows.append((f"  {name}", f"{of.mean:.3f}", f"{of.least:.3f}", where))
    return aligned(rows) if columns else []


def _absences(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each provider that lacks a row somewhere, with its first reason."""
    lines = []
    for name in dict.fromkeys(outcome.provider for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.provider == name]
        reasons = [o.refused or f"WRONG: {o.wrong}" for o in mine if o.row is None]
        if reasons:
            also = ", for one" if len(set(reasons)) > 1 else ""
            lines.append(f"{name}: no row at {len(reasons)} of {len(mine)}{also}: {reasons[0]}")
    return lines
