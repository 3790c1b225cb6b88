"""A rank's queries at their places in a whole sequence whose other rows are constant: a call on it
is that of one process, tile by tile, and gives this rank's rows their very bits, with masks, score
functions and dropout by position.

Of kernels in whose tiles a row does not depend on its neighbours (those for GPUs) runs of rows give
the same bits for a fraction of the work. On the CPU BLAS chooses by the shape of a product, so that
nothing less than the same call promises them; all ranks then do the work of one process.
"""

from __future__ import annotations

import torch

from ...problem import Saved
from ..layouts.layout import Layout
from . import whole
from .grads import QueryGrads
from .rows import AddKeyGrads, PulledKeys
from .run_calls import map_saved
from .shard_call import ShardCall

Tensor = torch.Tensor


def attend(spec: ShardCall, q: Tensor, pulled: PulledKeys) -> tuple[Tensor, Tensor]:
    """Computes `out` and `lse` of a rank's queries, like `rows.attend`."""
    pulled.arrive_all()
    # Of queries of 0 a row that sees one key has lse 0, for which the CPU's kernel computes short
    # sequences once more, with other bits: it takes such a row for one of NaN (flash.attend)
    out, lse = whole.attend(spec, among(spec.layout, q, value=1.0), k=pulled.k, v=pulled.v)
    return spec.layout.shard(out), spec.layout.shard(lse, 2)


def gradients(
    spec: ShardCall, saved: Saved, pulled: PulledKeys, *, add_key_grads: AddKeyGrads
) -> QueryGrads:
    """Computes gradients of a rank's queries. Rows of 0, with a dO of 0, contribute none."""
    layout = spec.layout
    pulled.arrive_all()
    placed = map_saved(
        saved,
        queries=lambda x: among(layout, x),
        lse=lambda x, value: among(layout, x, dim=2, value=value),
    )
    grads = whole.backward(spec.summing_in(saved.lse.dtype), placed)
    add_key_grads(grads.dk, grads.dv)
    return QueryGrads.of(grads._replace(dq=layout.shard(grads.dq)))


def among(layout: Layout, x: Tensor, *, dim: int = 1, value: float = 0.0) -> Tensor:
    """Returns a rank's rows among those of the whole sequence, which are `value`."""
    shape = list(x.shape)
    shape[dim] = layout.seqlen
    whole = x.new_full(shape, value)
    place(layout, x, whole=whole, dim=dim)
    return whole


def place(layout: Layout, part: Tensor, *, whole: Tensor, dim: int = 1) -> None:
    """Copies a rank's rows to their places in the whole sequence."""
    for row, start, stop in layout.placed:
        whole.narrow(dim, start, stop - start).copy_(part.narrow(dim, row, stop - start))
