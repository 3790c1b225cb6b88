"""How many pairs of a query and a key a band leaves: what balance is measured by."""

from __future__ import annotations

from typing import NamedTuple

from ..problem import OPEN


class Span(NamedTuple):
    """Rows [start, stop) of a sequence that a rank has in one piece, from its row `row` on, in the
    document [first, last).
    """

    row: int
    start: int
    stop: int
    first: int
    last: int


def pairs(span: Span, left: int = OPEN, right: int = OPEN) -> int:
    """The pairs that the queries of a span are in: query i sees the keys of its document from
    i - left to i + right.

    >>> pairs(Span(0, 2, 4, 0, 4), right=0)  # causal: 3 keys and 4
    7
    """
    _, start, stop, first, last = span
    ends = (stop - start) * last if right < 0 else _sum_of_least(start, stop, right + 1, last)
    if left < 0:
        return ends - (stop - start) * first
    return ends + _sum_of_least(-stop + 1, -start + 1, left, -first)


def _sum_of_least(start: int, stop: int, shift: int, most: int) -> int:
    """The sum of min(i + shift, most) for i in [start, stop)."""
    turn = min(max(most - shift, start), stop)  # from here on it is `most`
    return (start + turn - 1) * (turn - start) // 2 + shift * (turn - start) + most * (stop - turn)
