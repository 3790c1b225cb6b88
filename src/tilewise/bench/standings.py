"""How the first provider stands at the end of a run: against each peer, and against the best one.

A ratio is a peer's time over the first provider's, both taken in turns at one shape; shapes where
the first provider has no row have no ratio. Where there are times under sustained load, they are
the ones that count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .shapes import Shape

if TYPE_CHECKING:
    from .run import Outcome

BEST_OF = ("fa3", "cudnn", "fa4")  # the peers that a GPU's best time is looked for among
Measure = Callable[["Outcome"], float | None]


def _flushed(outcome: Outcome) -> float | None:
    return outcome.ratio.median if outcome.ratio else None


def _sustained(outcome: Outcome) -> float | None:
    return outcome.sustained.median if outcome.sustained else None


def _energy(outcome: Outcome) -> float | None:
    return outcome.energy


def standings(outcomes: Sequence[Outcome]) -> list[str]:
    """A line a peer and direction, one for the best peer of each shape, and who has no row; again
    for each way in which times were taken, and for energy.
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
    wrong = sum(outcome.wrong is not None for outcome in outcomes)
    timed = sum(outcome.row is not None for outcome in outcomes)
    is_sustained = any(map(_sustained, outcomes))
    said = [f"{timed} rows timed, {wrong} wrong"]
    if columns := _columns(ratios_to_first(outcomes, _sustained if is_sustained else _flushed)):
        load = "under sustained load " if is_sustained else ""
        parts = [f"{name} {_figures(list(column.values()))}" for name, column in columns.items()]
        said.append(f"{load}not slower than {', '.join(parts)}")
    if columns := _columns(ratios_to_first(outcomes, _energy)):
        parts = [f"{name} {_figures(list(column.values()))}" for name, column in columns.items()]
        said.append(f"joules not above those of {', '.join(parts)}")
    return "; ".join(said)


def _figures(ratios: list[float]) -> str:
    mean, ahead = statistics.geometric_mean(ratios), sum(value >= 1 for value in ratios)
    return f"{ahead}/{len(ratios)} (mean {mean:.3f}, worst {min(ratios):.3f})"


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
    equal = {shape.dense: shape for shape in kept if not shape.is_ragged}
    tables: dict[str, dict[str, dict[Shape, float]]] = {}
    for shape, value in kept.items():
        columns = tables.setdefault(shape.direction, {})
        name = f"{shape.lengths} / dense S{shape.dense.seqlen_q}"
        columns.setdefault(name, {})[shape] = value
        if shape.is_ragged and shape.dense in equal:
            other = equal[shape.dense]
            name = f"{shape.lengths} / {other.lengths}"
            columns.setdefault(name, {})[shape] = value / kept[other]
    first = outcomes[0].provider if outcomes else ""
    lines = []
    for direction, columns in tables.items():
        lines += _table(f"{direction}: TFLOP/s of {first}, packed / dense or equal", columns)
    return lines


def _table(title: str, columns: dict[str, dict[Shape, float]]) -> list[str]:
    """A line a name: the geometric mean of its figures, the least of them and where that is."""
    if not columns:
        return []
    width = max(len(name) for name in [*columns, title]) + 2
    lines = [f"{title:<{width + 2}}{'geometric mean':>14}{'worst':>8}  at"]
    for name, column in columns.items():
        mean = statistics.geometric_mean(column.values())
        worst = min(column, key=column.__getitem__)
        count = f"{len(column)} shape{'s' if len(column) > 1 else ''}"
        lines.append(f"  {name:<{width}}{mean:>14.3f}{column[worst]:>8.3f}  {worst}, of {count}")
    return lines


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
