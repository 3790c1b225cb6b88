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


class Dims(NamedTuple):
    """Where a tensor has batch, tokens and heads; -1 for nowhere."""

    batch: int
    tokens: int
    heads: int


class Places(NamedTuple):
    """How the tensors of a call lie on their mesh."""

    mesh: Any
    inputs: tuple[Any, ...]  # the placements of q, k, v and out
    dims: Dims
    out: tuple[int, ...]  # the shape of the whole

    def of(self, dims: Dims, default: Any) -> list[Any]:
        """Returns the placements for other dimensions; `default` where one of them is not there."""
        from torch.distributed.tensor import Shard

        to = dict(zip(self.dims, dims))
        shards = [to[x.dim] if x.is_shard() else None for x in self.inputs]
        return [
            x if dim is None else default if dim < 0 else Shard(dim)
            for x, dim in zip(self.inputs, shards)
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
    dims = Dims(0, tokens=1, heads=2) if order == "bshd" else Dims(0, tokens=2, heads=1)
    dims = Dims(-1, tokens=0, heads=1) if q.dim() == 3 else dims
    for i, x in enumerate(placements):
        if not x.is_replicate() and not (x.is_shard() and x.dim in dims):
            raise NotImplementedError(
                f"q, k and v are placed as {placements}: only batch, tokens and heads may be "
                "sharded, not headdim, and none may be Partial; redistribute them"
            )
        if x.is_shard() and x.dim == dims.tokens:
            _check_ranks(layout, mesh, dim=i)
        if x.is_shard() and x.dim == dims.heads and k.shape[dims.heads] % mesh.size(i):
            raise NotImplementedError(
                f"{k.shape[dims.heads]} key heads cannot be sharded evenly over {mesh.size(i)} "
                "ranks: replicate the heads"
            )
    return Places(mesh, placements, dims=dims, out=(*q.shape[:-1], v.shape[-1]))


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

    dims = Dims(-1, tokens=-1, heads=0) if x.dim() == 1 else Dims(0, tokens=-1, heads=1)
    grads = places.of(dims, Partial()) if is_learned else None
    redistributed = x.redistribute(places.mesh, places.of(dims, Replicate()))
    return redistributed.to_local(grad_placements=grads)


def check_indices(places: Places, mask_mod: Any, score_mod: Any, *, dropout_p: float) -> None:
    """Refuses functions and dropout that use the numbers of sharded heads or rows in the whole."""
    modifiers = modifiers_of(mask_mod, score_mod, None, (0, 0, 0, 0))
    used = indices_used(modifiers.mods)
    sharded = {x.dim for x in places.inputs if x.is_shard()}
    for name, index, dim in (("rows of the batch", "b", 0), ("heads", "h", places.dims.heads)):
        if dim in sharded and dim >= 0 and (index in used or dropout_p):
            subject = "dropout" if dropout_p else f"a mask or score function of {index}"
            raise NotImplementedError(
                f"{subject} counts {name} in the whole, and these DTensors shard them: replicate "
                "them"
            )


def joined(places: Places, out: Tensor, *, lse: Tensor | None) -> tuple[Any, Any]:
    """Returns `out` and `lse` of this rank as DTensors."""
    from torch.distributed.tensor import Replicate

    has_batch = places.dims.batch == 0
    dims = Dims(0, tokens=2, heads=1) if has_batch else Dims(-1, tokens=1, heads=0)  # of lse
    sizes = dict(zip(dims, (places.out[x] for x in places.dims)))
    shape = tuple(sizes[i] for i in range(len(places.out) - 1))
    whole = _dtensor(places, out, placements=places.inputs, shape=places.out)
    if lse is None:
        return whole, None
    placements = places.of(dims, Replicate())
    return whole, _dtensor(places, lse, placements=placements, shape=shape)


def _dtensor(places: Places, x: Tensor, *, placements: Sequence[Any], shape: Sequence[int]) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        x.contiguous(),
        places.mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
