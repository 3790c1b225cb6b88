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
from .call_spec import CallSpec
from .rows import Give, Gradients

Tensor = torch.Tensor


def attend(spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a rank's queries; k and v are of the whole sequence."""
    # Of queries of 0 a row that sees one key has lse 0, for which the CPU's kernel computes short
    # sequences once more, with other bits: it takes such a row for one of NaN (flash.attend)
    out, lse = whole.attend(spec, place(spec.layout, q, value=1.0), k, v)
    return spec.layout.shard(out), spec.layout.shard(lse, 2)


def gradients(spec: CallSpec, saved: Saved, give: Give) -> Gradients:
    """Gradients of a rank's queries; k and v are of the whole sequence. Rows that are 0, with a dO
    of 0, give none.
    """
    layout, (dout, dlse, q, k, v, out, lse) = spec.layout, saved
    dout, q, out = (place(layout, x) for x in (dout, q, out))
    lse = place(layout, lse, 2, torch.inf)
    dlse = None if dlse is None else place(layout, dlse, 2)
    exact = spec._replace(sinks=None if spec.sinks is None else spec.sinks.to(lse.dtype))
    found = whole.backward(exact, Saved(dout, dlse, q, k, v, out, lse))
    give(found.dk, found.dv)
    return Gradients(layout.shard(found.dq), found.dsinks)


def place(layout: Layout, x: Tensor, dim: int = 1, value: float = 0.0) -> Tensor:
    """A rank's rows at their places among those of the whole sequence, which are `value`."""
    shape = list(x.shape)
    shape[dim] = layout.seqlen
    found, row = x.new_full(shape, value), 0
    for start, stop in layout.runs[layout.rank]:
        found.narrow(dim, start, stop - start).copy_(x.narrow(dim, row, stop - start))
        row += stop - start
    return found
