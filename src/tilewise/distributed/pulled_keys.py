"""Keys and values that a rank pulls for launches that begin after their copies."""

from __future__ import annotations

import itertools

import torch

from . import packed_runs, rows
from .call_spec import CallSpec
from .copies import Group, in_rows, kind_of, strides_of
from .exchange import pulls_of
from .halves import Arena
from .key_copies import key_copies, moves_of

Tensor = torch.Tensor
FEW_LISTS = 4  # of pulls that are waited for one by one


def pull_keys(
    arena: Arena,
    spec: CallSpec,
    k: Tensor,
    v: Tensor,
    signature: str,
    packing: packed_runs.Packing | None = None,
) -> rows.Keys:
    """Keys and values of the whole sequence, those that no query here sees 0; or those of each run,
    as they are packed. This rank's are there; others arrive.
    """
    layout, batch, nheads_k = spec.layout, k.shape[0], k.shape[2]
    given, groups = (in_rows(k), in_rows(v)), (Group(0, nheads_k),)
    pulls = pulls_of(layout, *spec.sides)
    if packing is None:
        lists, tokens = tuple(map(moves_of, pulls.by_span)), layout.seqlen
    else:
        lists, tokens = packed_runs.moves_into(layout, packing), packing.starts_k[-1]
    if len(lists) > FEW_LISTS:
        lists = (tuple(x for moves in lists for x in moves),)
    kinds, strides = tuple(map(kind_of, given)), tuple(map(strides_of, given))
    copies = key_copies(layout, lists, tokens, kinds, strides, batch, groups)
    empty = k.new_empty if pulls.is_whole or packing is not None else k.new_zeros
    found = [empty(batch * tokens * nheads_k * x.shape[3]) for x in given]
    room = arena.publish(copies.nbytes, signature)
    arena.copy(copies.rows, given, [room, *found])
    arena.meet(signature)
    ends = itertools.pairwise((0, *copies.ends))
    arrivals = arena.pull_all([copies.pieces[a:b] for a, b in ends], found)
    if len(lists) == 1:
        arrivals = [x for x in arrivals for _ in layout.spans]
    keys, values = (x.view(batch, tokens, nheads_k, y.shape[3]) for x, y in zip(found, given))
    return rows.Keys(keys, values, arena, tuple(arrivals), packing is not None)
