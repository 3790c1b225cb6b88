"""Which rows a rank pulls: those whose keys its queries see."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .layout import Layout, Run
from .work import keys_of

Pull = tuple[int, int, int, int]  # rank, its row, and the positions [start, stop) of its rows


def runs_in_turn(layout: Layout, wanted: Sequence[Run]) -> Iterator[Pull]:
    """(rank, row, start, stop) of each run of positions that is wanted and that a rank has from its
    row `row` on: of this rank first and then of the ones before it, so that no two ranks read the
    same one at a time.
    """
    for step in range(layout.ranks):
        rank = (layout.rank - step) % layout.ranks
        row = 0
        for start, stop in layout.runs[rank]:
            for first, last in wanted:
                a, b = max(start, first), min(stop, last)
                if a < b:
                    yield rank, row + a - start, a, b
            row += stop - start


class Pulls(NamedTuple):
    """What a rank pulls: for each of its spans the rows that it is the first to need, and whether
    all rows of the sequence are among them.
    """

    by_span: tuple[tuple[Pull, ...], ...]
    is_whole: bool


@functools.lru_cache(maxsize=256)
def pulls_of(layout: Layout, left: int, right: int) -> Pulls:
    """The pulls of a layout under a band.

    >>> import tilewise.distributed as td
    >>> pulls_of(td.zigzag(8, 2), -1, 0).by_span  # rows 0 and 1, then 6 and 7; all before them
    (((0, 0, 0, 2),), ((0, 2, 6, 8), (1, 0, 2, 6)))
    """
    found, held = [], []
    for i, _ in enumerate(layout.spans):
        wanted = keys_of(layout.spans[: i + 1], left, right)
        found.append(tuple(runs_in_turn(layout, without(wanted, held))))
        held = wanted
    return Pulls(tuple(found), held == [(0, layout.seqlen)])


@functools.lru_cache(maxsize=256)
def shared_rows(layout: Layout, left: int, right: int) -> tuple[tuple[Run, ...], ...]:
    """The rows of every rank whose keys queries of another one see.

    >>> import tilewise.distributed as td
    >>> shared_rows(td.zigzag(8, 2), -1, 0)  # the last two keys are seen by rank 0 alone
    (((0, 2),), ((0, 4),))
    """
    spans = []
    for rank in range(layout.ranks):
        of = layout.at(rank)
        others = (x for r in range(layout.ranks) if r != rank for x in layout.at(r).spans)
        spans.append(tuple(rows_of(of, keys_of(list(others), left, right))))
    return tuple(spans)


def rows_of(layout: Layout, keys: Sequence[Run]) -> list[Run]:
    """The rows of this rank at these positions, runs that continue each other as one."""
    found: list[Run] = []
    row = 0
    for start, stop in layout.runs[layout.rank]:
        for first, last in keys:
            a, b = max(start, first), min(stop, last)
            if a < b:
                run = row + a - start, row + b - start
                if found and found[-1][1] == run[0]:
                    run = found.pop()[0], run[1]
                found.append(run)
        row += stop - start
    return found


def without(runs: Sequence[Run], held: Sequence[Run]) -> list[Run]:
    """The parts of some runs that lie in none of others; both in order."""
    found = []
    for start, stop in runs:
        for a, b in held:
            if a < stop and b > start:
                if start < a:
                    found.append((start, a))
                start = b
        if start < stop:
            found.append((start, stop))
    return found
