"""The two ways in which a row is timed, and which of them a figure is of.

Flushed: each call by itself, the L2 cache flushed before it. Sustained: calls back to back, on a
card under load, as in training. Rows from before the second way have the first alone. A ratio is of
one way: the sustained one wherever both rows have it.
"""

from __future__ import annotations

from collections.abc import Sequence

from .row import Row
from .timer import Spread, ratio

FLUSHED, SUSTAINED = "flushed", "sustained"


def way_of(*rows: Row) -> str:
    """The way that counts: sustained where all rows were timed so, in equally many rounds."""
    counts = {len(row.sustained_ms) for row in rows}
    return SUSTAINED if len(counts) == 1 and counts != {0} else FLUSHED


def rounds_of(row: Row, way: str) -> Sequence[float]:
    """Milliseconds of a call, one a round."""
    return row.sustained_ms if way == SUSTAINED else row.rounds_ms


def median_of(row: Row, way: str) -> float:
    """Milliseconds of a call."""
    return Spread.of(row.sustained_ms).median if way == SUSTAINED else row.median_ms


def rate_of(row: Row, way: str) -> float:
    """TFLOP/s."""
    return row.tflops * row.median_ms / median_of(row, way) if way == SUSTAINED else row.tflops


def ratio_of(own: Row, other: Row) -> Spread:
    """How many times as long as `own` the `other` took, round by round, in the way that counts."""
    way = way_of(own, other)
    return ratio(list(rounds_of(own, way)), list(rounds_of(other, way)))
