"""The copies of keys and values for one launch of all runs, in groups of heads."""

from __future__ import annotations

from typing import Any

import torch

from ..layouts.pulls import pulls_in_turn
from ..layouts.work import keys_of
from ..transport.copies import MOST_PITCH, CopyList, kind_of, places_of
from ..transport.copy_lists import keys_in_place, keys_to_queries
from ..transport.nodes import Nodes
from .shard_call import ShardCall

Tensor = torch.Tensor


def copies_of(
    spec: ShardCall, k: Tensor, v: Tensor, *, count: int, is_in_place: bool, nodes: Nodes | None
) -> CopyList:
    """Lists the copies of K and V, in `count` groups of heads, to new memory or in the arena."""
    layout, heads = spec.layout, k.shape[2] // count
    pulls = tuple(pulls_in_turn(layout, keys_of(layout.spans, spec.band)))
    options: Any = dict(
        band=spec.band,
        nodes=nodes,
        kinds=(kind_of(k), kind_of(v)),
        sources=places_of((k, v)),
        groups=tuple(range(i * heads, (i + 1) * heads) for i in range(count)),
        side_by_side=k.shape == v.shape,
    )
    if is_in_place:
        return keys_in_place(layout, pulls, **options)
    return keys_to_queries(layout, (pulls,), tokens=layout.seqlen, batch=1, **options)


def in_batches(copies: CopyList, *, tensors: int) -> CopyList:
    """Joins the lists of groups of heads to one. The first tiles wait for the first group, and each
    copy costs the host, so a batch has as many groups as came before it. A kernel is told once all
    of a batch has arrived; of one group, as what `tensors` share has.
    """
    groups, joined, first = copies.pieces, [], 0
    is_near = all(y.offset - x.offset <= MOST_PITCH for x, y in zip(groups[0], groups[-1]))
    while first < len(groups):
        batch = groups[first : max(1, 2 * first)] if is_near else groups[first : first + 1]
        rows, after = len(batch), batch[len(batch) > 1]
        before = (first + rows - 1) * len(after)
        for number, (x, y) in enumerate(zip(batch[0], after), 1):
            is_told = number % tensors == 0 if rows == 1 else number == len(after)
            arrived = (before + number) // tensors if is_told else 0
            pitch, step = y.start - x.start, y.offset - x.offset
            joined.append(x._replace(rows=rows, pitch=pitch, step=step, arrived=arrived))
        first += rows
    return copies._replace(pieces=(tuple(joined),))
