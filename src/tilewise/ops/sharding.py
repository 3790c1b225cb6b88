"""How attention is sharded: over the batch or over the heads, each shard an attention of its
own.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from ..features import FEATURES
from ..mods.flat import indices_used
from ..problem import INPUTS, OPTIONAL, Extras, Grads
from .schema import BACKWARD, FORWARD, options_from

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
    ways = _ways(q, k, call=call)
    return [([x["out"], x["lse"]], [x.get(name) for name in FORWARD]) for x in ways]


def _backward_rules(dout, dlse, q, k, v, out, lse, *call) -> list[tuple]:
    rules = []
    for places in _ways(q, k, call=call):
        places |= {"dout": places["out"], "dlse": None if dlse is None else places["lse"]}
        grads = [places[name] for name in Grads._fields]
        rules.append((grads, [places.get(name) for name in BACKWARD]))
    return rules


def _ways(q, k, call) -> list[dict[str, Any]]:
    """The shardings that these tensors allow, a placement for each; a tensor is DTensor's
    description of one.

    What tells rows of the batch or heads apart by their numbers in the whole is not cut there: a
    bias, dropout or what a mask captured nowhere, functions of "b" or "h" not by these.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    extras, (captured, *options) = dict(zip(Extras._fields, call[:OPTIONAL])), call[OPTIONAL:]
    used = {name: x for name, x in extras.items() if x is not None}
    mentioned = indices_used(options_from(options).mods)
    whole = Replicate()

    def along(size: str, bshd: Any, bhs: Any) -> dict[str, Any]:
        """The way that cuts this size; a gradient of what it does not cut is in parts."""
        places = dict.fromkeys(("q", "k", "v", "out", "dq", "dk", "dv"), bshd)
        places |= {"lse": bhs} | dict.fromkeys(Grads._fields[INPUTS:], whole)
        for name, x in used.items():
            shape = FEATURES[name].shape_of(len(x.shape))
            places[name] = Shard(shape.index(size)) if size in shape else whole
            if f"d{name}" in places:
                places[f"d{name}"] = places[name] if size in ("", *shape) else Partial()
        return places

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
