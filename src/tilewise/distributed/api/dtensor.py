"""DTensors: of q, k and v that are sharded along the tokens each rank has its rows, which the call
is made of, and so is `out`. Other dimensions of the mesh may shard the batch or the heads, each
shard an attention of its own.

A DTensor's order of tokens is that of the layout's ranks, one after another, which is the order of
the sequence in a contiguous layout alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...errors import ArgumentError
from ...mods.flat import indices_used
from ...mods.flatten import modifiers_of
from ..layouts.group import global_ranks
from ..layouts.layout import Layout

Tensor = torch.Tensor


class Places(NamedTuple):
    """How the tensors of a call lie on their mesh."""

    mesh: Any
    inputs: tuple[Any, ...]  # the placements of q, k, v and out
    order: str  # their dimensions: batch, s for tokens, heads, d for headdim
    out: dict[str, int]  # the sizes of the whole out, by dimension

    def of(self, order: str, default: Any) -> list[Any]:
        """Returns the placements of a tensor of other dimensions; `default` where it lacks one."""
        from torch.distributed.tensor import Shard

        names = [self.order[x.dim] if x.is_shard() else None for x in self.inputs]
        return [
            x if name is None else Shard(order.index(name)) if name in order else default
            for x, name in zip(self.inputs, names)
        ]


def are_dtensors(*inputs: Any) -> bool:
    """Tells whether some of these are DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in inputs)


def places_of(layout: Layout, q: Any, k: Any, v: Any, *, order: str) -> Places:
    """Checks and returns how q, k and v are placed."""
    if not all(map(are_dtensors, (q, k, v))):
        raise ArgumentError(
            "some of q, k and v are DTensors and others are not: make all of them DTensors"
        )
    mesh, placements = q.device_mesh, q.placements
    for name, x in (("k", k), ("v", v)):
        if (x.device_mesh, x.placements) != (mesh, placements):
            raise ArgumentError(
                f"{name} is placed as {x.placements} on {x.device_mesh} and q as {placements} on "
                f"{mesh}: they must have one mesh and placements, so redistribute them"
            )
    order = "shd" if q.dim() == 3 else order
    heads = order.index("h")
    for i, x in enumerate(placements):
        if not x.is_replicate() and not (x.is_shard() and order[x.dim : x.dim + 1] in tuple("bsh")):
            raise NotImplementedError(
                f"q, k and v are placed as {placements}: only batch, tokens and heads may be "
                "sharded, not headdim, and none may be Partial; redistribute them"
            )
        if x.is_shard() and order[x.dim] == "s":
            _check_ranks(layout, mesh, dim=i)
        if x.is_shard() and x.dim == heads and k.shape[heads] % mesh.size(i):
            raise NotImplementedError(
                f"{k.shape[heads]} key heads cannot be sharded evenly over {mesh.size(i)} "
                "ranks: replicate the heads"
            )
    return Places(mesh, placements, order=order, out=dict(zip(order, q.shape[:-1] + v.shape[-1:])))


def _check_ranks(layout: Layout, mesh: Any, *, dim: int) -> None:
    ranks, layout_ranks = global_ranks(mesh.get_group(dim)), global_ranks(layout.group)
    if ranks != layout_ranks:
        raise ArgumentError(
            f"tokens of q are sharded over ranks {ranks} and the layout's are {layout_ranks}: make "
            "the layout with that dimension of the mesh, mesh[name]"
        )


def of_heads(places: Places, x: Any, *, is_learned: bool) -> Any:
    """Returns this rank's part of a tensor (nheads,) or (batch, nheads), and a plain tensor as it
    is. The gradient of a learned one is a part of a sum over all ranks that have
    other tokens or batches.
    """
    if not are_dtensors(x):
        return x
    from torch.distributed.tensor import Partial, Replicate

    order = "h" if x.dim() == 1 else "bh"
    grads = places.of(order, Partial()) if is_learned else None
    redistributed = x.redistribute(places.mesh, places.of(order, Replicate()))
    return redistributed.to_local(grad_placements=grads)


def check_indices(places: Places, mask_mod: Any, score_mod: Any, *, dropout_p: float) -> None:
    """Refuses functions and dropout that use the numbers of sharded heads or rows in the whole."""
    modifiers = modifiers_of(mask_mod, score_mod, None, (0, 0, 0, 0))
    used = indices_used(modifiers.mods)
    sharded = {places.order[x.dim] for x in places.inputs if x.is_shard()}
    for name, index in (("rows of the batch", "b"), ("heads", "h")):
        if index in sharded and (index in used or dropout_p):
            subject = "dropout" if dropout_p else f"a mask or score function of {index}"
            raise NotImplementedError(
                f"{subject} counts {name} in the whole, and these DTensors shard them: replicate "
                "them"
            )


def joined(places: Places, out: Tensor, *, lse: Tensor | None) -> tuple[Any, Any]:
    """Returns `out` and `lse` of this rank as DTensors."""
    from torch.distributed.tensor import Replicate

    whole = _dtensor(places, out, placements=places.inputs, order=places.order)
    if lse is None:
        return whole, None
    order = "bhs" if "b" in places.order else "hs"
    return whole, _dtensor(places, lse, placements=places.of(order, Replicate()), order=order)


def _dtensor(places: Places, x: Tensor, *, placements: Sequence[Any], order: str) -> Any:
    from torch.distributed.tensor import DTensor

    shape = torch.Size(places.out[name] for name in order)
    return DTensor.from_local(
        x.contiguous(),
        places.mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
