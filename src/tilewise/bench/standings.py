"""How the first provider stands at the end of a run: against each peer, and against the best one.

A ratio is a peer's time over the first provider's, both taken in turns at one shape; shapes where
the first provider has no row have no ratio.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .shapes import Shape

if TYPE_CHECKING:
    from .run import Outcome

BEST_OF = ("fa3", "cudnn", "fa4")  # the peers that a GPU's best time is looked for among


def standings(outcomes: Sequence[Outcome]) -> list[str]:
    """A line a peer and direction, one for the best peer of each shape, and who has no row."""
    ratios = ratios_to_first(outcomes)
    lines = []
    for direction in dict.fromkeys(outcome.shape.direction for outcome in outcomes):
        here = {shape: of for shape, of in ratios.items() if shape.direction == direction}
        lines += _of_direction(direction, here, outcomes[0].provider)
    return lines + _absences(outcomes)


def ratios_to_first(outcomes: Sequence[Outcome]) -> dict[Shape, dict[str, float]]:
    """For each shape where the first provider ran: each other's time over its."""
    timed: dict[Shape, dict[str, float]] = {}
    for outcome in outcomes:
        if outcome.row is not None and outcome.ratio is not None:
            timed.setdefault(outcome.shape, {})[outcome.provider] = outcome.ratio.median
    first = outcomes[0].provider if outcomes else ""
    return {
        shape: {name: value for name, value in of.items() if name != first}
        for shape, of in timed.items()
        if first in of
    }


def _of_direction(direction: str, ratios: dict[Shape, dict[str, float]], first: str) -> list[str]:
    columns = {
        name: {shape: of[name] for shape, of in ratios.items() if name in of}
        for name in dict.fromkeys(name for of in ratios.values() for name in of)
    }
    if ran := [name for name in BEST_OF if name in columns]:
        rivals = {shape: [of[name] for name in ran if name in of] for shape, of in ratios.items()}
        best = {shape: min(values) for shape, values in rivals.items() if values}
        columns[f"best peer ({', '.join(ran)})"] = best
    return _table(f"{direction}: time of a peer / time of {first}", columns)


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
