"""Keys and values that a rank pulls for launches that begin after their copies."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from ...problem import OPEN
from ..layouts.layout import Layout
from ..layouts.pulls import pulls_of, without
from ..layouts.work import Band, Run, keys_of
from ..transport.copies import in_rows, kind_of, places_of
from ..transport.copy_lists import keys_to_queries
from ..transport.exchange import publish_copies
from ..transport.halves import Arena
from . import packed_runs, rows
from .run_calls import BLOCK
from .shard_call import ShardCall

Tensor = torch.Tensor
FEW_LISTS = 4  # of pulls that are waited for one by one
FEW_RUNS = 4  # that are cleared one by one


def pull_keys(
    arena: Arena,
    spec: ShardCall,
    k: Tensor,
    v: Tensor,
    *,
    signature: str,
    reads_all: bool,
    groups: tuple[range, ...],
    packing: packed_runs.Packing | None = None,
) -> list[rows.PulledKeys]:
    """Pulls keys and values of the whole sequence; or those of each run, as they are packed; of
    each group of heads. This rank's are there; others arrive, group by group. Those that no query
    here sees are 0, if they are read: all of them (`reads_all`), or the first ones of a kernel's
    blocks.
    """
    layout, band, batch = spec.layout, spec.band, k.shape[0]
    tensors = in_rows(k), in_rows(v)
    if packing is None:
        pulls, tokens = pulls_of(layout, band), layout.seqlen
        hidden = unseen_keys(layout, band) if reads_all else hidden_keys(layout, band)
    else:
        pulls = packed_runs.pulls_into(layout, packing, left=band.left)
        *begins, tokens = packing.starts_k
        # Packed keys that a run does not see, though its first block begins with them
        firsts = (min((x.start for x in part), default=0) for part in pulls)
        hidden = [(row, first) for row, first in zip(begins, firsts) if row < first]
    if len(pulls) > FEW_LISTS:
        pulls = (tuple(x for part in pulls for x in part),)
    copies = keys_to_queries(
        layout,
        pulls,
        tokens=tokens,
        kinds=tuple(map(kind_of, tensors)),
        sources=places_of(tensors),
        batch=batch,
        groups=groups,
        band=band,
        nodes=arena.nodes,
    )
    memory = [x.new_empty((batch, tokens, *x.shape[2:])) for x in tensors]
    views = [[heads_of(x, group) for x in memory] for group in groups]
    for (start, stop), of_group in itertools.product(hidden, views):
        for x in of_group:
            x[:, start:stop] = 0
    publish_copies(arena, copies, signature=signature, sources=tensors, targets=memory)
    marks = arena.pull(copies.pieces, memory, traffic=copies.traffic)
    parts = []
    for number, (keys, values) in enumerate(views):
        of_spans = tuple(marks[len(pulls) * number :][: len(pulls)])
        if len(pulls) == 1:
            of_spans *= len(layout.spans)
        is_packed = packing is not None
        parts.append(
            rows.PulledKeys(keys, values, arena=arena, marks=of_spans, is_packed=is_packed)
        )
    return parts


def heads_of(x: Tensor, group: range) -> Tensor:
    """Views a group of the heads in memory for (batch, tokens, heads, headdim), in which groups
    lie end to end, each dense.
    """
    if len(group) == x.shape[2]:
        return x
    shape = *x.shape[:2], len(group), x.shape[3]
    return x.view(-1)[group.start * x[:, :, 0].numel() :][: math.prod(shape)].view(shape)


@functools.lru_cache(maxsize=256)
def hidden_keys(layout: Layout, band: Band) -> tuple[Run, ...]:
    """Returns the keys that no query of this rank sees, though a kernel's block of keys that some
    see begins with them; all keys, where these are many runs.

    >>> import tilewise.distributed as td
    >>> hidden_keys(td.contiguous(1000, 2).at(1), Band(200, 0))  # row 500 sees keys from 300 on
    ((256, 300),)
    """
    if band.left == OPEN:
        return ()
    runs = []
    for span in layout.spans:
        first = max(span.first, span.start - band.left)
        if block := (first - span.first) % BLOCK:
            runs.append((first - block, first))
    return few_or_all(without(runs, keys_of(layout.spans, band)), layout)


@functools.lru_cache(maxsize=256)
def unseen_keys(layout: Layout, band: Band) -> tuple[Run, ...]:
    """Returns all keys that no query of this rank sees; or all keys, where these are many runs."""
    return few_or_all(without([(0, layout.seqlen)], keys_of(layout.spans, band)), layout)


def few_or_all(runs: Sequence[Run], layout: Layout) -> tuple[Run, ...]:
    """Returns runs of keys to clear, each by a launch."""
    return tuple(runs) if len(runs) <= FEW_RUNS else ((0, layout.seqlen),)
