"""Which rows a rank pulls: those whose keys its queries see."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .layout import Layout
from .work import Band, Run, keys_of


class Pull(NamedTuple):
    """Rows of a rank, from its row `row` on, and the rows [start, stop) that they become here."""

    rank: int
    row: int
    start: int
    stop: int


def pulls_in_turn(layout: Layout, wanted: Sequence[Run]) -> Iterator[Pull]:
    """Yields runs of wanted positions: a rank's own, then those of the ranks before it."""
    for step in range(layout.ranks):  # no two ranks read the same one at a time
        rank = (layout.rank - step) % layout.ranks
        for row, start, stop in layout.at(rank).placed:
            for first, last in wanted:
                a, b = max(start, first), min(stop, last)
                if a < b:
                    yield Pull(rank, row + a - start, start=a, stop=b)


@functools.lru_cache(maxsize=256)
def pulls_of(layout: Layout, band: Band) -> tuple[tuple[Pull, ...], ...]:
    """Returns, for each span of this rank, the rows that it is the first to need.

    >>> import tilewise.distributed as td
    >>> for pulls in pulls_of(td.zigzag(8, 2), Band(right=0)):  # rows 0 and 1, then 6 and 7
    ...     print([tuple(pull) for pull in pulls])
    [(0, 0, 0, 2)]
    [(0, 2, 6, 8), (1, 0, 2, 6)]
    """
    by_span, held = [], []
    for i, _ in enumerate(layout.spans):
        wanted = keys_of(layout.spans[: i + 1], band)
        by_span.append(tuple(pulls_in_turn(layout, without(wanted, held))))
        held = wanted
    return tuple(by_span)


@functools.lru_cache(maxsize=256)
def shared_rows(layout: Layout, band: Band) -> tuple[tuple[Run, ...], ...]:
    """Returns the rows of every rank whose keys queries of another one see.

    >>> import tilewise.distributed as td
    >>> shared_rows(td.zigzag(8, 2), Band(right=0))  # the last two keys are seen by rank 0 alone
    (((0, 2),), ((0, 4),))
    """
    ranks = range(layout.ranks)
    shared = []
    for owner in ranks:
        readers = [reader for reader in ranks if reader != owner]
        shared.append(tuple(rows_seen(layout, owner, readers, band=band)))
    return tuple(shared)


def rows_seen(layout: Layout, owner: int, readers: Sequence[int], *, band: Band) -> list[Run]:
    """Returns the rows of a rank whose keys queries of some others see."""
    spans = [x for reader in readers for x in layout.at(reader).spans]
    return rows_of(layout.at(owner), keys_of(spans, band))


def rows_of(layout: Layout, keys: Sequence[Run]) -> list[Run]:
    """Returns the rows of this rank at these positions, runs that continue each other as one."""
    rows: list[Run] = []
    for row, start, stop in layout.placed:
        for first, last in keys:
            a, b = max(start, first), min(stop, last)
            if a < b:
                run = row + a - start, row + b - start
                if rows and rows[-1][1] == run[0]:
                    run = rows.pop()[0], run[1]
                rows.append(run)
    return rows


def place_among(rows: Iterable[Run], row: int) -> int:
    """Counts how many of some rows come before one of them.

    >>> place_among([(0, 2), (6, 8)], 7)
    3
    """
    before = 0
    for start, stop in rows:
        if start <= row < stop:
            return before + row - start
        before += stop - start
    raise ValueError(f"row {row} is none of those that are published")


def without(runs: Sequence[Run], held: Sequence[Run]) -> list[Run]:
    """Returns the parts of some runs that lie in none of others; both in order."""
    parts = []
    for start, stop in runs:
        for a, b in held:
            if a < stop and b > start:
                if start < a:
                    parts.append((start, a))
                start = b
        if start < stop:
            parts.append((start, stop))
    return parts
