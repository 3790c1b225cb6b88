"""vmap of attention: the mapped dimension joins the batch, so that one launch serves all of it.

What has no batch to join is computed one by one, and so is every backward: always right, and as
slow as it says. `attend` and `call` take tensors alone, and may be mapped or differentiated in
turn.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import warn_slow
from ..mods.flat import indices_used
from ..problem import INPUTS, extras_of
from .schema import SAVED_TENSORS, Options, flat

Tensor = torch.Tensor


def forward(attend: Callable, counts_rows: bool, size: int, in_dims: tuple, tensors: tuple):
    """`attend` of (q, k, v, *extras.tensors), mapped over `size` calls. `counts_rows` is whether a
    mask or score function uses the batch index: then rows must not be joined.
    """
    q, k, v, slopes, sinks, seqused_k, *optional = tensors
    if counts_rows or in_dims[4] is not None or any(x is not None for x in optional):
        return one_by_one(attend, size, in_dims=in_dims, tensors=tensors)
    batch = q.shape[1 if in_dims[0] == 0 else 0]
    q, k, v = (_fold(x, dim, size) for x, dim in zip((q, k, v), in_dims))
    seqused_k = _fold(seqused_k, in_dims[5], size)
    slopes = _fold_slopes(slopes, in_dims[3], size=size, batch=batch)
    out, lse = attend(q, k, v, slopes, sinks, seqused_k, *optional)
    return (out.unflatten(0, (size, batch)), lse.unflatten(0, (size, batch))), (0, 0)


def one_by_one(call: Callable, size: int, in_dims: tuple, tensors: tuple):
    """`call` mapped in a loop."""
    warn_slow(
        "vmap of attention's backward, or over sinks, packed sequences, a bias, dropout, "
        "captured tensors or functions of b, runs its calls one by one: if that is too slow, "
        "fold the mapped dimension into the batch"
    )
    results = [
        call(*(x if dim is None else x.select(dim, i) for x, dim in zip(tensors, in_dims)))
        for i in range(size)
    ]
    return tuple(torch.stack(parts) for parts in zip(*results)), (0,) * len(results[0])


def _fold(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """A tensor with its mapped dimension folded into the batch."""
    if x is None:
        return None
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _fold_slopes(slopes: Tensor | None, dim: int | None, size: int, batch: int) -> Tensor | None:
    """Slopes are shared by the batch or not: (nheads,) or (batch, nheads)."""
    if slopes is None or (dim is None and slopes.dim() == 1):
        return slopes
    slopes = slopes.expand(size, *slopes.shape) if dim is None else slopes.movedim(dim, 0)
    if slopes.dim() == 2:  # one set for each mapped call
        slopes = slopes.unsqueeze(1).expand(-1, batch, -1)
    return slopes.flatten(0, 1)


def forward_op(info, in_dims, *args):
    """The operator's forward, mapped."""
    tensors, options = flat(args, INPUTS)

    def attend(*tensors):
        extras = extras_of(tensors[INPUTS:])
        return torch.ops.tilewise.flash_attn_forward(*tensors[:INPUTS], *extras.arguments, *options)

    counts_rows = "b" in indices_used(Options._make(options).mods)
    return forward(attend, counts_rows, info.batch_size, flat(in_dims, INPUTS)[0], tensors)


def backward_op(info, in_dims, *args):
    """Its backward, mapped."""
    tensors, options = flat(args, SAVED_TENSORS)

    def differentiate(*tensors):
        extras = extras_of(tensors[SAVED_TENSORS:])
        return torch.ops.tilewise.flash_attn_backward(
            *tensors[:SAVED_TENSORS], *extras.arguments, *options
        )

    return one_by_one(differentiate, info.batch_size, flat(in_dims, SAVED_TENSORS)[0], tensors)
