"""How many pairs of a query and a key a band leaves: what balance is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...problem import OPEN


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


def keys_of(spans: Sequence[Span], left: int = OPEN, right: int = OPEN) -> list[tuple[int, int]]:
    """The runs of keys that some query of these spans sees, in the order of the sequence.

    >>> keys_of([Span(0, 6, 8, 0, 9), Span(2, 2, 3, 0, 9)], left=1, right=0)
    [(1, 3), (5, 8)]
    """
    found: list[tuple[int, int]] = []
    for _, start, stop, first, last in sorted(spans, key=lambda x: x.start):
        a = first if left == OPEN else max(first, start - left)
        b = last if right == OPEN else min(last, stop + right)
        if found and a <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], b)
        else:
            found.append((a, b))
    return found


def _sum_of_least(start: int, stop: int, shift: int, most: int) -> int:
    """The sum of min(i + shift, most) for i in [start, stop)."""
    turn = min(max(most - shift, start), stop)  # from here on it is `most`
    return (start + turn - 1) * (turn - start) // 2 + shift * (turn - start) + most * (stop - turn)
