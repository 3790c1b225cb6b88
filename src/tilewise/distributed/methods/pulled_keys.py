"""Keys and values that a rank pulls for launches that begin after their copies."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from ...problem import OPEN
from ..layouts.layout import Layout, Run
from ..layouts.pulls import pulls_of, shared_rows, without
from ..layouts.work import keys_of
from ..transport.copies import Group, in_rows, kind_of, strides_of
from ..transport.halves import Arena
from ..transport.key_copies import key_copies, moves_of
from . import packed_runs, rows
from .call_spec import CallSpec

Tensor = torch.Tensor
FEW_LISTS = 4  # of pulls that are waited for one by one
FEW_RUNS = 4  # that are cleared one by one


def pull_keys(
    arena: Arena,
    spec: CallSpec,
    k: Tensor,
    v: Tensor,
    signature: str,
    reads_all: bool,
    packing: packed_runs.Packing | None = None,
) -> rows.Keys:
    """Keys and values of the whole sequence; or those of each run, as they are packed. This rank's
    are there; others arrive. Those that no query here sees are 0, if they are read: all of them
    (`reads_all`), or the first ones of a kernel's blocks.
    """
    layout, batch, nheads_k = spec.layout, k.shape[0], k.shape[2]
    given, groups = (in_rows(k), in_rows(v)), (Group(0, nheads_k),)
    left, right = spec.sides
    pulls = pulls_of(layout, left, right)
    if packing is None:
        lists, tokens = tuple(map(moves_of, pulls.by_span)), layout.seqlen
    else:
        lists, tokens = packed_runs.moves_into(layout, packing, left), packing.starts_k[-1]
    if len(lists) > FEW_LISTS:
        lists = (tuple(x for moves in lists for x in moves),)
    kinds, strides = tuple(map(kind_of, given)), tuple(map(strides_of, given))
    shared = shared_rows(layout, left, right)
    copies = key_copies(layout, lists, tokens, kinds, strides, batch, groups, shared)
    found = [k.new_empty(batch * tokens * nheads_k * x.shape[3]) for x in given]
    shapes = [(batch, tokens, nheads_k, x.shape[3]) for x in given]
    hidden: tuple[Run, ...] = ()
    if packing is not None:
        hidden = packed_runs.hidden_in(layout, packing, left)
    elif reads_all and not pulls.is_whole:
        hidden = unseen_keys(layout, left, right)
    elif not pulls.is_whole:
        hidden = hidden_keys(layout, left, right)
    for start, stop in hidden:
        for x, shape in zip(found, shapes):
            x.view(shape)[:, start:stop] = 0
    room = arena.publish(copies.nbytes, signature)
    arena.copy(copies.rows, given, [room, *found])
    arena.meet(signature)
    ends = itertools.pairwise((0, *copies.ends))
    arrivals = arena.pull_all([copies.pieces[a:b] for a, b in ends], found)
    if len(lists) == 1:
        arrivals = [x for x in arrivals for _ in layout.spans]
    keys, values = (x.view(shape) for x, shape in zip(found, shapes))
    return rows.Keys(keys, values, arena, tuple(arrivals), packing is not None)


@functools.lru_cache(maxsize=256)
def hidden_keys(layout: Layout, left: int, right: int) -> tuple[Run, ...]:
    """The keys that no query of this rank sees, though a kernel's block of keys that some see
    begins with them; all keys, where these are many runs.

    >>> import tilewise.distributed as td
    >>> hidden_keys(td.contiguous(1000, 2).at(1), 200, 0)  # row 500 sees keys from 300 on
    ((256, 300),)
    """
    if left == OPEN:
        return ()
    found = []
    for _, start, _, first, _ in layout.spans:
        seen = max(first, start - left)
        if block := (seen - first) % rows.BLOCK:
            found.append((seen - block, seen))
    return few_or_all(without(found, keys_of(layout.spans, left, right)), layout)


@functools.lru_cache(maxsize=256)
def unseen_keys(layout: Layout, left: int, right: int) -> tuple[Run, ...]:
    """All keys that no query of this rank sees; or all keys, where these are many runs."""
    return few_or_all(without([(0, layout.seqlen)], keys_of(layout.spans, left, right)), layout)


def few_or_all(runs: Sequence[Run], layout: Layout) -> tuple[Run, ...]:
    """Runs of keys that are to be cleared, each by a launch."""
    return tuple(runs) if len(runs) <= FEW_RUNS else ((0, layout.seqlen),)
