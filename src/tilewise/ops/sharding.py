"""How attention is sharded: over the batch or over the heads, each shard an attention of its
own.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch

from ..mods.flatten import indices_used
from ..problem import OPTIONAL
from .schema import Options

_registered = False


def register() -> bool:
    """Registers the sharding rules of both operators with DTensor, once.

    Example:
        >>> from tilewise.integrations import dtensor
        >>> dtensor.register() == torch.distributed.is_available()
        True

    Returns:
        False where torch has no DTensor.
    """
    global _registered
    if _registered or not torch.distributed.is_available():
        return _registered
    try:
        from torch.distributed.tensor.experimental import register_sharding
    except ImportError:  # an experimental name may move; attention on plain tensors needs none
        return False
    register_sharding(torch.ops.tilewise.flash_attn_forward.default)(_forward_rules)
    register_sharding(torch.ops.tilewise.flash_attn_backward.default)(_backward_rules)
    _registered = True
    return True


def _forward_rules(q, k, v, *call) -> list[tuple]:
    extras, (captured, *options) = call[:OPTIONAL], call[OPTIONAL:]
    return [
        ([way.bshd, way.bhs], [way.bshd] * 3 + way.extras + [None] * (1 + len(options)))
        for way in _ways(q, k, captured, indices_used(Options(*options).mods), *extras)
    ]


def _backward_rules(dout, dlse, q, k, v, out, lse, *call) -> list[tuple]:
    extras, (captured, *options) = call[:OPTIONAL], call[OPTIONAL:]
    rules = []
    for way in _ways(q, k, captured, indices_used(Options(*options).mods), *extras):
        given = [_if(dout, way.bshd), _if(dlse, way.bhs)]
        saved = [way.bshd] * 4 + [way.bhs]
        grads = [way.bshd] * 3 + [way.dsinks, way.dbias]
        rules.append((grads, given + saved + way.extras + [None] * (1 + len(options))))
    return rules


class _Way(NamedTuple):
    """One way to shard along one dimension of the mesh: a placement for each kind of tensor."""

    bshd: Any
    bhs: Any
    extras: list
    dsinks: Any
    dbias: Any


def _ways(q, k, captured, mentioned, alibi_slopes, sinks, *others) -> list[_Way]:
    """The shardings that these tensors allow; a tensor is DTensor's description of one.

    What tells rows of the batch or heads apart by their numbers in the whole is not cut there: a
    bias, dropout or what a mask captured nowhere, functions that have `mentioned` "b" or "h" not by
    these.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole, first, second = Replicate(), Shard(0), Shard(1)
    slopes_by_batch = alibi_slopes is not None and len(alibi_slopes.shape) == 2

    def extras(slopes, sink, used) -> list:
        return [_if(alibi_slopes, slopes), _if(sinks, sink), *(_if(x, used) for x in others)]

    by_batch = extras(first if slopes_by_batch else whole, whole, first)
    ways = [
        _Way(whole, whole, extras(whole, whole, whole), whole, whole),
        _Way(first, first, by_batch, whole if sinks is None else Partial(), whole),
    ]
    if captured or any(x is not None for x in others[4:]):
        return ways[:1]
    is_packed = any(x is not None for x in others[2:])  # a cut of the batch of 1 is none
    if is_packed or "b" in mentioned:
        del ways[1]
    if "h" not in mentioned and _groups_stay_whole(q.shape[2], k.shape[2], tuple(q.mesh.shape)):
        by_head = extras(second if slopes_by_batch else first, first, whole)
        ways.append(_Way(Shard(2), second, by_head, whole if sinks is None else first, whole))
    return ways


def _groups_stay_whole(nheads: int, nheads_k: int, mesh: tuple[int, ...]) -> bool:
    """Whether equal cuts of the heads leave each key head with its query heads.

    The heads may be cut along several dimensions of the mesh. An uneven cut is right only where
    each query head has a key head of its own.
    """
    if nheads == nheads_k:
        return True
    dims = (n for n in range(1, len(mesh) + 1))
    cuts = (math.prod(chosen) for n in dims for chosen in itertools.combinations(mesh, n))
    return all(nheads_k % cut == 0 for cut in cuts if cut <= nheads_k)


def _if(tensor: Any, placement: Any) -> Any:
    """The placement, or None where the optional tensor is absent."""
    return None if tensor is None else placement
