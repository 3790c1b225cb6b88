"""vmap of attention: the mapped dimension joins the batch, so that one launch serves all of it.

What has no batch to join is computed one by one, and so is every backward: always right, and as
slow as it says. `attend` and `call` take a tuple of tensors, and may be mapped or differentiated in
turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors import warn_slow
from ..features import FEATURES
from ..problem import INPUTS, OPTIONAL, Extras

Tensor = torch.Tensor
NO_BATCH = [name for name, x in FEATURES.items() if x.shapes and not x.has("batch")]
UNMAPPED = ", ".join(FEATURES[name].title for name in NO_BATCH if FEATURES[name].title)


def forward(attend: Callable, counts_rows: bool, size: int, in_dims: tuple, tensors: tuple):
    """`attend` of (q, k, v, *extras.tensors), mapped over `size` calls. `counts_rows` is whether a
    mask or score function uses the batch index: then rows must not be joined.
    """
    captured = INPUTS + OPTIONAL
    named = list(zip(Extras._fields, tensors[INPUTS:captured], in_dims[INPUTS:captured]))
    is_captured = any(x is not None for x in tensors[captured:])
    if counts_rows or is_captured or not all(_may_join(name, x, dim=dim) for name, x, dim in named):
        return one_by_one(attend, size, in_dims=in_dims, tensors=tensors)
    batch = tensors[0].shape[1 if in_dims[0] == 0 else 0]
    inputs = [_fold(x, dim, size=size) for x, dim in zip(tensors[:INPUTS], in_dims)]
    optional = [_fold_optional(name, x, dim=dim, size=size, batch=batch) for name, x, dim in named]
    out, lse = attend((*inputs, *optional, *tensors[captured:]))
    return (out.unflatten(0, (size, batch)), lse.unflatten(0, (size, batch))), (0, 0)


def looped(call: Callable) -> Callable:
    """The vmap rule of a function of a tuple that is computed one by one."""

    def vmap(info, in_dims, *args):
        values, structure = tree_flatten(args)

        def call_row(row):
            return call(tree_unflatten(row, structure))

        return one_by_one(call_row, info.batch_size, tree_flatten(in_dims)[0], values)

    return vmap


def one_by_one(call: Callable, size: int, in_dims: Sequence, tensors: Sequence):
    """`call` mapped in a loop."""
    warn_slow(
        f"vmap of attention's backward, of a KV cache or FP8, or over {UNMAPPED}, a bias, dropout, "
        "captured tensors or functions of b, runs its calls one by one: if that is too slow, "
        "fold the mapped dimension into the batch"
    )
    pairs = list(zip(tensors, in_dims))
    rows = [[x if dim is None else x.select(dim, i) for x, dim in pairs] for i in range(size)]
    if not rows:  # zeros give the shapes
        rows = [[x if n is None else x.new_zeros(x.shape[:n] + x.shape[n + 1 :]) for x, n in pairs]]
    results = [call(row) for row in rows]
    stacked = [torch.stack([x[n] for x in results])[:size] for n in range(len(results[0]))]
    return stacked if type(results[0]) is list else tuple(stacked), 0


def _may_join(name: str, x: Tensor | None, dim: int | None) -> bool:
    """Whether an optional tensor leaves mapped calls one call of a larger batch."""
    if x is None:
        return True
    feature = FEATURES[name]
    if feature.is_whole:
        return False
    return feature.has("batch") or (dim is None and feature.has("nheads"))


def _fold(x: Tensor, dim: int | None, size: int) -> Tensor:
    """A tensor with its mapped dimension folded into the batch."""
    x = x.expand((size, *x.shape)) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _fold_optional(
    name: str, x: Tensor | None, dim: int | None, size: int, batch: int
) -> Tensor | None:
    """An optional tensor for the larger batch: one without a batch is shared by all calls, or
    repeated for the batch of each.
    """
    if x is None:
        return None
    rank = x.dim() if dim is None else x.dim() - 1
    if "batch" in FEATURES[name].shape_of(rank):
        return _fold(x, dim, size=size)
    if dim is None:
        return x
    return x.movedim(dim, 0).unsqueeze(1).expand(-1, batch, -1).flatten(0, 1)
