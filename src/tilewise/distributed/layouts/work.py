"""Which keys the queries of a rank see, and how many pairs of both there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...frontend.scalars import Window, band, check_causal
from ...problem import OPEN

Run = tuple[int, int]  # positions [start, stop)


class Band(NamedTuple):
    """How many keys left and right of its diagonal a query sees, OPEN for no limit."""

    left: int = OPEN
    right: int = OPEN


class Span(NamedTuple):
    """Rows [start, stop) of the document [first, last), which are a rank's rows from `row` on."""

    row: int
    start: int
    stop: int
    first: int
    last: int


class KeyRun(NamedTuple):
    """Positions [start, stop) of a sequence, which are the rows from `row` on of packed ones."""

    row: int
    start: int
    stop: int


def band_of(window: Window, causal: bool | str) -> Band:
    """Returns the band of a window, closed to the right under a causal mask. Both are checked."""
    check_causal(causal)
    left, right = band(window, causal is not False)
    return Band(left, right)


def pairs(span: Span, band: Band) -> int:
    """Counts the pairs that the queries of a span are in: query i sees the keys of its document
    from i - left to i + right.

    >>> pairs(Span(0, 2, 4, 0, 4), Band(right=0))  # causal: 3 keys and 4
    7
    """
    start, stop = span.start, span.stop
    if band.right < 0:
        ends = (stop - start) * span.last
    else:
        ends = _sum_of_least(start, stop, shift=band.right + 1, most=span.last)
    if band.left < 0:
        return ends - (stop - start) * span.first
    return ends + _sum_of_least(-stop + 1, -start + 1, shift=band.left, most=-span.first)


def keys_of(spans: Sequence[Span], band: Band) -> list[Run]:
    """Returns the runs of keys that some query of these spans sees, in the sequence's order.

    >>> keys_of([Span(0, 6, 8, 0, 9), Span(2, 2, 3, 0, 9)], Band(left=1, right=0))
    [(1, 3), (5, 8)]
    """
    return joined(keys_of_span(span, band) for span in spans)


def joined(runs: Iterable[Run]) -> list[Run]:
    """Joins runs that touch or overlap, and leaves out empty ones.

    >>> joined([(4, 6), (0, 2), (2, 3), (5, 9), (7, 7)])
    [(0, 3), (4, 9)]
    """
    longer: list[Run] = []
    for start, stop in sorted(x for x in runs if x[0] < x[1]):
        if longer and start <= longer[-1][1]:
            longer[-1] = longer[-1][0], max(longer[-1][1], stop)
        else:
            longer.append((start, stop))
    return longer


def keys_of_span(span: Span, band: Band) -> Run:
    """Returns the keys that the queries of a span see."""
    start = span.first if band.left == OPEN else max(span.first, span.start - band.left)
    stop = span.last if band.right == OPEN else min(span.last, span.stop + band.right)
    return start, stop


def _sum_of_least(start: int, stop: int, *, shift: int, most: int) -> int:
    """Sums min(i + shift, most) for i in [start, stop)."""
    turn = min(max(most - shift, start), stop)  # from here on it is `most`
    return (start + turn - 1) * (turn - start) // 2 + shift * (turn - start) + most * (stop - turn)
