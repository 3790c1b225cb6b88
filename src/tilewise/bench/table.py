"""The lines of one shape while a bench runs: times, errors, and the first provider's ratios."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .timer import Spread
from .ways import SUSTAINED, rate_of

if TYPE_CHECKING:
    from .run import Outcome

DENSE = "dense"  # the first provider at the dense shape that a packed one is held against


def table_of(shape: object, outcomes: Sequence[Outcome]) -> list[str]:
    """The lines of one shape.

    The last column says how many times as long as the first provider this one took; of a dense
    shape, how much of its FLOP/s the first provider keeps on packed sequences. What was measured
    under sustained load is a line below.
    """
    timed = [o for o in outcomes if o.row is not None]
    lines = [f"\n{shape}"]
    if timed:
        head = f"  {'':<20}{'ms':>9}{'p20-p80':>17}{'TFLOP/s':>9}{'error':>10}{'bound':>10}"
        lines.append(f"{head}  time / {timed[0].provider}")
    for outcome in outcomes:
        is_dense = outcome.shape != shape
        name = f"{outcome.provider} {DENSE}" if is_dense else outcome.provider
        if (row := outcome.row) is None:
            why = f"WRONG: {outcome.wrong}" if outcome.wrong else f"not here: {outcome.refused}"
            lines.append(f"  {name:<20}{why}")
            continue
        last = spread_of(outcome.ratio) if outcome.ratio else outcome.shape.sizes
        if is_dense and outcomes[0].kept:
            last += f"; packed keeps {spread_of(outcomes[0].kept)} of its TFLOP/s"
        errors = f"{row.max_error:>10.2g}{row.bound:>10.2g}"
        flushed = Spread(row.median_ms, row.p20_ms, row.p80_ms)
        lines.append(_line(name, flushed, row.tflops, errors, last))
        if row.sustained_ms:
            last = spread_of(outcome.sustained) if outcome.sustained else ""
            rate = rate_of(row, SUSTAINED)
            lines.append(_line("  sustained", Spread.of(row.sustained_ms), rate, "", last))
        if row.joules is not None:
            last = f"{outcome.energy:.3f}" if outcome.energy else ""
            lines.append(f"  {'  joules':<20}{row.joules:>9.3g}{'':>46}{last}")
    return [line.rstrip() for line in lines]


def _line(name: str, ms: Spread, tflops: float, errors: str, last: str) -> str:
    spread = f"{ms.p20:.3g}-{ms.p80:.3g}"
    return f"  {name:<20}{ms.median:>9.3g}{spread:>17}{tflops:>9.3g}{errors:>20}  {last}"


def spread_of(of: Spread) -> str:
    """A median with its percentiles."""
    return f"{of.median:.3f} ({of.p20:.3f}-{of.p80:.3f})"
