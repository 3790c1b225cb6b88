"""Packed documents dealt over ranks: equally many tokens each, and nearly the same work.

Documents are cut into chunks. The chunk with the most work goes to the rank with the least so far
that has room for it (longest processing time first, Graham 1969); where no rank has room for a
whole one, it is cut once more. Then the ranks with the most and the least work exchange chunks of
equal length, as long as that brings them together.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from .work import Band, Span, pairs

CLOSE = 1.005  # of the mean: ranks with no more work exchange nothing
EXCHANGES = 512


class Chunk(NamedTuple):
    """Tokens [start, stop) of a document, and how many pairs their queries are in."""

    work: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Tokens."""
        return self.stop - self.start


def balanced(cu_seqlens: Sequence[int], ranks: int, *, chunk: int) -> list[list[tuple[int, int]]]:
    """Deals chunks to ranks: the runs of each, in the order of the sequence.

    >>> balanced([0, 2, 8], ranks=2, chunk=2)
    [[(2, 4), (6, 8)], [(0, 2), (4, 6)]]
    """
    tokens = cu_seqlens[-1]
    room = [tokens // ranks + (rank < tokens % ranks) for rank in range(ranks)]
    dealt = _deal(_chunks(cu_seqlens, chunk), cu_seqlens, room=room)
    _exchange(dealt)
    return [sorted((x.start, x.stop) for x in chunks) for chunks in dealt]


def _chunks(cu_seqlens: Sequence[int], size: int) -> list[Chunk]:
    """Cuts all documents into chunks, those with the most work first."""
    chunks = [
        _chunk(cu_seqlens, start, stop=min(start + size, last))
        for first, last in itertools.pairwise(cu_seqlens)
        for start in range(first, last, size)
    ]
    return sorted(chunks, key=lambda x: (-x.work, x.start))


def _chunk(cu_seqlens: Sequence[int], start: int, *, stop: int) -> Chunk:
    i = bisect.bisect_right(cu_seqlens, start)
    span = Span(0, start, stop=stop, first=cu_seqlens[i - 1], last=cu_seqlens[i])
    return Chunk(pairs(span, Band(right=0)), start, stop=stop)


def _deal(chunks: list[Chunk], cu_seqlens: Sequence[int], *, room: list[int]) -> list[list[Chunk]]:
    """Gives each rank chunks, as many tokens as it has room for."""
    dealt: list[list[Chunk]] = [[] for _ in room]
    work = [0] * len(room)
    for chunk in chunks:
        start = chunk.start
        while start < chunk.stop:
            fit = [rank for rank, free in enumerate(room) if free >= chunk.stop - start]
            if fit:
                rank = min(fit, key=lambda r: (work[r], r))
            else:
                rank = max(range(len(room)), key=lambda r: (room[r], -r))
            part = _chunk(cu_seqlens, start, stop=min(chunk.stop, start + room[rank]))
            dealt[rank].append(part)
            work[rank] += part.work
            room[rank] -= part.size
            start = part.stop
    return dealt


def _exchange(dealt: list[list[Chunk]]) -> None:
    """Exchanges chunks of equal length between the ranks with the most and the least work."""
    work = [sum(x.work for x in chunks) for chunks in dealt]
    for _ in range(EXCHANGES):
        most, least = work.index(max(work)), work.index(min(work))
        gap = work[most] - work[least]
        if work[most] * len(work) <= CLOSE * sum(work):
            return
        pair = _best_pair(dealt[most], dealt[least], gap=gap)
        if pair is None:
            return
        i, j = pair
        mine, other = dealt[most][i], dealt[least][j]
        dealt[most][i], dealt[least][j] = other, mine
        work[most] += other.work - mine.work
        work[least] += mine.work - other.work


def _best_pair(most: list[Chunk], least: list[Chunk], *, gap: int) -> tuple[int, int] | None:
    """Finds the chunks whose exchange leaves the smallest gap; None where none makes it smaller."""
    order = sorted((x.size, x.work, j) for j, x in enumerate(least))
    best, pair = gap, None
    for i, chunk in enumerate(most):
        place = bisect.bisect_left(order, (chunk.size, chunk.work - gap // 2, -1))
        for size, work, j in order[max(0, place - 1) : place + 1]:
            remaining = abs(gap - 2 * (chunk.work - work))
            if size == chunk.size and remaining < best:
                best, pair = remaining, (i, j)
    return pair
