"""How many rows enter a node from others, by the layout alone: those of keys, and of the parts of
their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ...errors import ArgumentError
from .layout import Layout
from .work import Band, Run, keys_of


class Moved(NamedTuple):
    """What a rank pulls in its node, and receives from others: rows, bytes or milliseconds."""

    pulled: float = 0  # keys; again in the backward
    parts: float = 0  # of their gradients, which the owner of a key adds
    received: float = 0
    parts_received: float = 0

    def totals(self, learns: bool) -> tuple[float, float]:
        """Counts what is pulled and what is received in a call."""
        if not learns:
            return self.pulled, self.received
        return 2 * self.pulled + self.parts, 2 * self.received + self.parts_received


def nodes_of(layout: Layout, nodes: int) -> list[range]:
    """Returns the ranks of each node, as many in each."""
    if nodes < 1 or layout.ranks % nodes:
        raise ArgumentError(
            f"nodes={nodes}: it must divide the number of ranks in the layout, {layout.ranks}"
        )
    size = layout.ranks // nodes
    return [range(first, first + size) for first in range(0, layout.ranks, size)]


@functools.lru_cache(maxsize=256)
def crossing(layout: Layout, band: Band, nodes: int) -> tuple[Moved, ...]:
    """Counts the rows that each rank receives, where nodes have equal sizes: rank i of a node keeps
    what rank i of another one publishes.

    >>> import tilewise.distributed as td
    >>> for x in crossing(td.contiguous(8, 4), Band(right=0), 2):  # causal: parts go back
    ...     print(x.received, x.parts_received)
    0 4
    0 4
    2 0
    2 0
    """
    members = nodes_of(layout, nodes)
    if nodes == 1:
        return (Moved(),) * layout.ranks
    owned = [sorted(x) for x in layout.runs]
    spans = [layout.at(rank).spans for rank in range(layout.ranks)]
    visible = [keys_of(x, band) for x in spans]  # by each rank
    rows = []
    for node in members:
        wanted = keys_of([x for rank in node for x in spans[rank]], band)
        mine = sorted(run for rank in node for run in owned[rank])
        for place in range(len(node)):
            remote = [other[place] for other in members if other is not node]
            keys = sum(common(owned[x], wanted) for x in remote)
            parts = sum(common(visible[x], mine) for x in remote)
            rows.append(Moved(received=keys, parts_received=parts))
    return tuple(rows)


def common(left: Sequence[Run], right: Sequence[Run]) -> int:
    """Counts the positions that two lists of runs share, both in order.

    >>> common([(0, 4), (6, 8)], [(2, 7)])
    3
    """
    count = i = j = 0
    while i < len(left) and j < len(right):
        count += max(0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return count
