"""How attention is sharded: over the batch or over the heads, each shard an attention of its
own.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch

from ..features import FEATURES
from ..mods.flat import indices_used
from ..problem import INPUTS, OPTIONAL, Extras, Grads
from .schema import options_from

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
    return [([way.bshd, way.bhs], [way.bshd] * INPUTS + way.call) for way in _ways(q, k, call=call)]


def _backward_rules(dout, dlse, q, k, v, out, lse, *call) -> list[tuple]:
    rules = []
    for way in _ways(q, k, call=call):
        grads = [way.bshd] * INPUTS + way.grads
        saved = [_if(dout, way.bshd), _if(dlse, way.bhs)] + [way.bshd] * 4 + [way.bhs]
        rules.append((grads, saved + way.call))
    return rules


class _Way(NamedTuple):
    """One way to shard along one dimension of the mesh: a placement for each kind of tensor."""

    bshd: Any
    bhs: Any
    call: list  # the optional tensors, and nothing for the other arguments
    grads: list  # of the optional tensors that have one


def _ways(q, k, call) -> list[_Way]:
    """The shardings that these tensors allow; a tensor is DTensor's description of one.

    What tells rows of the batch or heads apart by their numbers in the whole is not cut there: a
    bias, dropout or what a mask captured nowhere, functions of "b" or "h" not by these.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    extras, (captured, *options) = dict(zip(Extras._fields, call[:OPTIONAL])), call[OPTIONAL:]
    used = {name: x for name, x in extras.items() if x is not None}
    mentioned = indices_used(options_from(options).mods)
    whole = Replicate()

    def along(size: str, bshd: Any, bhs: Any) -> _Way:
        """The way that cuts this size. What is not cut by it has a part of its gradient there."""
        places, of_grads = {}, {}
        for name, x in used.items():
            shape = FEATURES[name].shape_of(len(x.shape))
            places[name] = Shard(shape.index(size)) if size in shape else whole
            of_grads[f"d{name}"] = places[name] if size in shape or not size else Partial()
        call = [places.get(name) for name in extras] + [None] * (1 + len(options))
        return _Way(bshd, bhs, call, [of_grads.get(name, whole) for name in Grads._fields[INPUTS:]])

    ways = [along("", whole, whole)]
    if captured or any(FEATURES[name].is_whole for name in used):
        return ways
    is_packed = "cu_seqlens_q" in used or "cu_seqlens_k" in used  # a cut of a batch of 1 is none
    if not is_packed and "b" not in mentioned:
        ways.append(along("batch", Shard(0), Shard(0)))
    if "h" not in mentioned and _groups_stay_whole(q.shape[2], k.shape[2], tuple(q.mesh.shape)):
        ways.append(along("nheads", Shard(2), Shard(1)))
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
