"""The copies of keys and values for one launch of all runs, in groups of heads."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ..layouts.pulls import pulls_in_turn
from ..layouts.work import keys_of
from ..transport.copies import CopyList, kind_of, places_of
from ..transport.copy_lists import keys_in_place, keys_to_queries
from ..transport.nodes import Nodes
from .shard_call import ShardCall

Tensor = torch.Tensor


def copies_of(
    spec: ShardCall, k: Tensor, v: Tensor, *, count: int, nodes: Nodes | None = None
) -> CopyList:
    """Lists the copies of keys and values in `count` groups of heads."""
    layout = spec.layout
    pulls = tuple(pulls_in_turn(layout, keys_of(layout.spans, spec.band)))
    options: Any = dict(tokens=layout.seqlen, batch=1, band=spec.band, nodes=nodes)
    return keys_to_queries(layout, (pulls,), **options, **_lies(k, v, count=count))


def copies_in_place(
    spec: ShardCall, k: Tensor, v: Tensor, *, count: int, nodes: Nodes | None = None
) -> CopyList:
    """Lists these copies where keys are read in the arena."""
    layout = spec.layout
    pulls = tuple(pulls_in_turn(layout, keys_of(layout.spans, spec.band)))
    options: Any = dict(band=spec.band, nodes=nodes)
    return keys_in_place(layout, pulls, **options, **_lies(k, v, count=count))


def with_few_lists(copies: CopyList) -> CopyList:
    """Joins lists of pieces, none of which is waited for by itself."""
    chain, lists = itertools.chain.from_iterable, [copies.pieces]
    if copies.is_split:
        lists = [copies.pieces[: copies.early], copies.pieces[copies.early :]]
    return copies._replace(pieces=tuple(tuple(chain(x)) for x in lists), early=1)


def _lies(k: Tensor, v: Tensor, *, count: int) -> dict[str, Any]:
    """Says how keys and values lie: in `count` groups of heads, those of one width as one."""
    heads = k.shape[2] // count
    return dict(
        kinds=(kind_of(k), kind_of(v)),
        sources=places_of((k, v)),
        groups=tuple(range(i * heads, (i + 1) * heads) for i in range(count)),
        side_by_side=k.shape == v.shape,
    )
