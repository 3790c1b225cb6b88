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

from .work import Span, pairs

Chunk = tuple[int, int, int]  # work, start, stop
CLOSE = 1.005  # of the mean: ranks with no more work exchange nothing
EXCHANGES = 512


def balanced(cu_seqlens: Sequence[int], ranks: int, chunk: int) -> list[list[tuple[int, int]]]:
    """The runs of each rank, in the order of the sequence.

    >>> balanced([0, 2, 8], ranks=2, chunk=2)
    [[(2, 4), (6, 8)], [(0, 2), (4, 6)]]
    """
    room = [_share(cu_seqlens[-1], ranks, rank) for rank in range(ranks)]
    dealt = _deal(_chunks(cu_seqlens, chunk), cu_seqlens, room)
    _exchange(dealt)
    return [sorted((start, stop) for _, start, stop in chunks) for chunks in dealt]


def _share(tokens: int, ranks: int, rank: int) -> int:
    return tokens // ranks + (rank < tokens % ranks)


def _chunks(cu_seqlens: Sequence[int], size: int) -> list[Chunk]:
    """The chunks of all documents, those with the most work first."""
    found = [
        _chunk(cu_seqlens, start, min(start + size, last))
        for first, last in itertools.pairwise(cu_seqlens)
        for start in range(first, last, size)
    ]
    return sorted(found, key=lambda x: (-x[0], x[1]))


def _chunk(cu_seqlens: Sequence[int], start: int, stop: int) -> Chunk:
    i = bisect.bisect_right(cu_seqlens, start)
    return pairs(Span(0, start, stop, cu_seqlens[i - 1], cu_seqlens[i]), right=0), start, stop


def _deal(chunks: list[Chunk], cu_seqlens: Sequence[int], room: list[int]) -> list[list[Chunk]]:
    dealt: list[list[Chunk]] = [[] for _ in room]
    work = [0] * len(room)
    for chunk in chunks:
        rest = chunk[1:]
        while rest[0] < rest[1]:
            start, stop = rest
            fit = [rank for rank, free in enumerate(room) if free >= stop - start]
            if fit:
                rank = min(fit, key=lambda r: (work[r], r))
            else:
                rank = max(range(len(room)), key=lambda r: (room[r], -r))
            part = _chunk(cu_seqlens, start, min(stop, start + room[rank]))
            dealt[rank].append(part)
            work[rank] += part[0]
            room[rank] -= part[2] - part[1]
            rest = part[2], stop
    return dealt


def _exchange(dealt: list[list[Chunk]]) -> None:
    """Exchanges chunks of equal length between the ranks with the most and the least work."""
    work = [sum(x[0] for x in chunks) for chunks in dealt]
    for _ in range(EXCHANGES):
        most, least = work.index(max(work)), work.index(min(work))
        gap = work[most] - work[least]
        if work[most] * len(work) <= CLOSE * sum(work):
            return
        pair = _best_pair(dealt[most], dealt[least], gap)
        if pair is None:
            return
        i, j = pair
        mine, other = dealt[most][i], dealt[least][j]
        dealt[most][i], dealt[least][j] = other, mine
        work[most] += other[0] - mine[0]
        work[least] += mine[0] - other[0]


def _best_pair(most: list[Chunk], least: list[Chunk], gap: int) -> tuple[int, int] | None:
    """The chunks whose exchange leaves the smallest gap; None where all leave one as large."""
    order = sorted((stop - start, work, j) for j, (work, start, stop) in enumerate(least))
    best, pair = gap, None
    for i, (work, start, stop) in enumerate(most):
        at = bisect.bisect_left(order, (stop - start, work - gap // 2, -1))
        for length, other, j in order[max(0, at - 1) : at + 1]:
            left = abs(gap - 2 * (work - other))
            if length == stop - start and left < best:
                best, pair = left, (i, j)
    return pair
