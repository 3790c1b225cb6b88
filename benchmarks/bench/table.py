"""What a bench prints: aligned columns, and the lines of one shape while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .timer import Spread
from .ways import SUSTAINED, rate_of

if TYPE_CHECKING:
    from .row import Row
    from .run import Outcome


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines: the first column to the left, those between to the right. A row may be
    shorter than others; the last cell of each stands as it is.

    >>> aligned([("", "ms", "at"), ("fa3", "12.5", "S512"), ("flex", "not here")])
    ['        ms  at', 'fa3   12.5  S512', 'flex  not here']
    """
    columns = max(map(len, rows), default=1) - 1
    widths = [max(len(row[n]) for row in rows if len(row) > n + 1) for n in range(columns)]
    lines = []
    for first, *cells in rows:
        named = f"{first:<{widths[0]}}" if cells else first
        between = [f"{cell:>{width}}" for cell, width in zip(cells[:-1], widths[1:])]
        lines.append("  ".join([named, *between, *cells[-1:]]).rstrip())
    return lines


def table_of(title: str, named: Mapping[str, Outcome], last: str = "") -> list[str]:
    """The lines of outcomes, by what each is called: times, errors, and how many times as long as
    the first it took, under the heading `last`. What was measured under sustained load is a line
    below.
    """
    lines: list[tuple[str, ...]] = [("", "ms", "p20-p80", "TFLOP/s", "error", "bound", last)]
    for name, outcome in named.items():
        if (row := outcome.row) is None:
            lines.append((f"  {name}", why_not(outcome)))
            continue
        flushed = Spread(row.median_ms, row.p20_ms, row.p80_ms)
        ratio = spread_of(outcome.ratio) if outcome.ratio else str(outcome.shape)
        errors = f"{row.max_error:.2g}", f"{row.bound:.2g}"
        lines.append((f"  {name}", *times(flushed, row.tflops), *errors, ratio))
        lines += _loaded(row, outcome)
    return [f"\n{title}", *aligned(lines)]


def _loaded(row: Row, outcome: Outcome) -> list[tuple[str, ...]]:
    """The lines below a row: back to back, and joules."""
    lines = []
    if row.sustained_ms:
        own = times(Spread.of(row.sustained_ms), rate_of(row, SUSTAINED))
        ratio = spread_of(outcome.sustained) if outcome.sustained else ""
        lines.append(("    sustained", *own, "", "", ratio))
    if row.joules is not None:
        energy = f"{outcome.energy:.3f}" if outcome.energy else ""
        lines.append(("    joules", f"{row.joules:.3g}", "", "", "", "", energy))
    return lines


def why_not(outcome: Outcome) -> str:
    """Why there is no row."""
    return f"WRONG: {outcome.wrong}" if outcome.wrong else f"not here: {outcome.refused}"


def times(ms: Spread, tflops: float) -> tuple[str, str, str]:
    """Milliseconds, their spread and the rate, to three digits."""
    return f"{ms.median:.3g}", f"{ms.p20:.3g}-{ms.p80:.3g}", f"{tflops:.3g}"


def spread_of(of: Spread) -> str:
    """A median with its percentiles."""
    return f"{of.median:.3f} ({of.p20:.3f}-{of.p80:.3f})"
