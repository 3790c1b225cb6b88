"""Keys travel, queries stay: each rank pulls the keys and values that its queries see, whole and in
the order of the sequence, so that nothing is merged and no row is rounded twice.

Backward, each rank has a part of the gradient of every key that its queries saw: it publishes them
in fp32, and the owner of a key adds those of all ranks, in their order, and rounds once.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..problem import Grads, Saved
from . import one_launch, packed_runs, placed, rows
from .call_spec import CallSpec
from .exchange import Published, publish, publish_rows, pulls_of
from .halves import Arena
from .work import keys_of

Tensor = torch.Tensor
NAME = "stream"


def supports(spec: CallSpec, nheads: int, nheads_k: int) -> str | None:
    """None: any number of heads, ranks and tokens, and every feature that is checked before."""
    return None


def attend(
    arena: Arena, spec: CallSpec, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`out` and `lse` of a rank's rows."""
    return _Stream.apply(arena, spec, q, k, v, spec.sinks)


def by_runs(spec: CallSpec, q: Tensor) -> ModuleType:
    """What computes runs of rows: a call for each, or one for all."""
    return packed_runs if packed_runs.serves(spec, q) else rows


class _Stream(torch.autograd.Function):
    """Attention of a rank's queries to pulled keys."""

    @staticmethod
    def forward(ctx: Any, arena: Arena, spec: CallSpec, q, k, v, sinks):
        if one_launch.serves(arena, spec, q, k, v):
            out, lse = one_launch.attend(arena, spec, q, k, v)
        else:
            out, lse = _attend(arena, spec, q, k, v)
        arena.settle(out, lse)
        ctx.arena, ctx.spec = arena, spec
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout, dlse):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = Saved(dout, dlse, *ctx.saved_tensors)
        grads = backward(ctx.arena, ctx.spec, saved)
        return None, None, grads.dq, grads.dk, grads.dv, grads.dsinks


def _attend(arena: Arena, spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse`, in launches that begin after copies."""
    keys = _pull(arena, spec, k, v, f"attention (stream): {spec.signature}")
    backend = rows.backend_of_runs(spec, q, k, v) if spec.bitwise else spec.backend
    if spec.is_modified or (spec.bitwise and backend is None):
        keys.arrive_all()
        return placed.attend(spec, q, keys.k, keys.v)
    return by_runs(spec, q).attend(spec, q, keys, backend)


def backward(arena: Arena, spec: CallSpec, saved: Saved) -> Grads:
    """The gradients of `attend`."""
    dout, dlse, q, k, v, out, lse = saved
    signature = f"the backward of attention (stream): {spec.signature}"
    with arena.reporting():
        keys = _pull(arena, spec, k, v, signature)
        dout = torch.zeros_like(out) if dout is None else dout
        exact = rows.working_dtype(q)
        dout, q, out = (x.to(exact) for x in (dout, q, out))
        if exact != k.dtype:
            keys.arrive_all()
            keys = keys._replace(k=keys.k.to(exact), v=keys.v.to(exact))
        given = Saved(dout, dlse, q, keys.k, keys.v, out, lse)
        if spec.is_modified:
            keys.arrive_all()
            partial = placed.gradients(spec, given)
        else:
            partial = by_runs(spec, q).gradients(spec, given, keys)
        dk, dv = summed(arena, spec, partial, f"the sums of {signature}")
        arena.settle(partial.dq, dk, dv)
    dsinks = partial.dsinks
    if dsinks is not None and spec.sinks is not None:
        dsinks = dsinks.to(spec.sinks.dtype)
    dtype = k.dtype
    return Grads(partial.dq.to(dtype), dk.to(dtype), dv.to(dtype), dsinks)


def _pull(arena: Arena, spec: CallSpec, k: Tensor, v: Tensor, signature: str) -> rows.Keys:
    """Keys and values of the whole sequence, those that no query here sees 0."""
    layout = spec.layout
    published = publish(arena, signature, [k.transpose(0, 1), v.transpose(0, 1)], layout)
    pulls = pulls_of(layout, *spec.sides)
    shapes = [(layout.seqlen, x.shape[0], *x.shape[2:]) for x in (k, v)]
    found = [(k.new_empty if pulls.is_whole else k.new_zeros)(shape) for shape in shapes]
    arrivals = []
    with arena.copying():
        for pulled in pulls.by_span:
            for rank, row, start, stop in pulled:
                for number, x in enumerate(found):
                    x[start:stop].copy_(published.pull(rank, number, row, row + stop - start))
            arrivals.append(arena.mark())
    k, v = (x.transpose(0, 1) for x in found)
    return rows.Keys(k, v, arena, tuple(arrivals))


def summed(
    arena: Arena, spec: CallSpec, partial: rows.Partial, signature: str
) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's keys: the parts of all ranks, added in their order."""
    layout = spec.layout
    parts = [x.transpose(0, 1) for x in (partial.dk, partial.dv)]
    published = publish_rows(arena, signature, parts, [layout.seqlen] * layout.ranks)
    return _of_mine(published, spec, 0), _of_mine(published, spec, 1)


def _of_mine(published: Published, spec: CallSpec, number: int) -> Tensor:
    layout = spec.layout
    others = (layout.at(rank).spans for rank in range(layout.ranks))
    seen = [keys_of(spans, *spec.sides) for spans in others]
    dtype, _, shape = published.kinds[number]
    device = published.view(layout.rank, number).device
    total = torch.zeros(layout.tokens, *shape, dtype=dtype, device=device)
    for rank in range(layout.ranks):
        row = 0
        for start, stop in layout.runs[layout.rank]:
            for first, last in seen[rank]:  # of other keys that rank has no part
                a, b = max(start, first), min(stop, last)
                if a < b:
                    total[row + a - start : row + b - start] += published.pull(rank, number, a, b)
            row += stop - start
    return total.transpose(0, 1)
