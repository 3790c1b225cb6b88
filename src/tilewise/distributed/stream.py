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
from . import packed_runs, placed, rows
from .asked import Asked
from .exchange import Published, publish, publish_rows, pulls_of
from .halves import Arena
from .work import keys_of

Tensor = torch.Tensor
NAME = "stream"


def supports(asked: Asked, nheads: int, nheads_k: int) -> str | None:
    """None: any number of heads, ranks and tokens, and every feature that is checked before."""
    return None


def attend(
    arena: Arena, asked: Asked, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`out` and `lse` of a rank's rows."""
    return _Stream.apply(arena, asked, q, k, v, asked.sinks)


def by_runs(asked: Asked, q: Tensor) -> ModuleType:
    """What computes runs of rows: a call for each, or one for all."""
    return packed_runs if packed_runs.serves(asked, q) else rows


class _Stream(torch.autograd.Function):
    """Attention of a rank's queries to pulled keys."""

    @staticmethod
    def forward(ctx: Any, arena: Arena, asked: Asked, q, k, v, sinks):
        keys = _pull(arena, asked, k, v, f"attention (stream): {asked.words}")
        backend = rows.backend_of_runs(asked, q, k, v) if asked.bitwise else asked.backend
        if asked.is_modified or (asked.bitwise and backend is None):
            keys.arrive_all()
            out, lse = placed.attend(asked, q, keys.k, keys.v)
        else:
            out, lse = by_runs(asked, q).attend(asked, q, keys, backend)
        arena.settle(out, lse)
        ctx.arena, ctx.asked = arena, asked
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout, dlse):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = Saved(dout, dlse, *ctx.saved_tensors)
        grads = backward(ctx.arena, ctx.asked, saved)
        return None, None, grads.dq, grads.dk, grads.dv, grads.dsinks


def backward(arena: Arena, asked: Asked, saved: Saved) -> Grads:
    """The gradients of `attend`."""
    dout, dlse, q, k, v, out, lse = saved
    words = f"the backward of attention (stream): {asked.words}"
    with arena.reporting():
        keys = _pull(arena, asked, k, v, words)
        dout = torch.zeros_like(out) if dout is None else dout
        exact = rows.working_dtype(q)
        dout, q, out = (x.to(exact) for x in (dout, q, out))
        if exact != k.dtype:
            keys.arrive_all()
            keys = keys._replace(k=keys.k.to(exact), v=keys.v.to(exact))
        given = Saved(dout, dlse, q, keys.k, keys.v, out, lse)
        if asked.is_modified:
            keys.arrive_all()
            partial = placed.gradients(asked, given)
        else:
            partial = by_runs(asked, q).gradients(asked, given, keys)
        dk, dv = summed(arena, asked, partial, f"the sums of {words}")
        arena.settle(partial.dq, dk, dv)
    dsinks = partial.dsinks
    if dsinks is not None and asked.sinks is not None:
        dsinks = dsinks.to(asked.sinks.dtype)
    dtype = k.dtype
    return Grads(partial.dq.to(dtype), dk.to(dtype), dv.to(dtype), dsinks)


def _pull(arena: Arena, asked: Asked, k: Tensor, v: Tensor, words: str) -> rows.Keys:
    """Keys and values of the whole sequence, those that no query here sees 0."""
    layout = asked.layout
    published = publish(arena, words, [k.transpose(0, 1), v.transpose(0, 1)], layout)
    pulls = pulls_of(layout, *asked.sides)
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


def summed(arena: Arena, asked: Asked, partial: rows.Partial, words: str) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's keys: the parts of all ranks, added in their order."""
    layout = asked.layout
    parts = [x.transpose(0, 1) for x in (partial.dk, partial.dv)]
    published = publish_rows(arena, words, parts, [layout.seqlen] * layout.ranks)
    return _of_mine(published, asked, 0), _of_mine(published, asked, 1)


def _of_mine(published: Published, asked: Asked, number: int) -> Tensor:
    layout = asked.layout
    others = (layout.at(rank).spans for rank in range(layout.ranks))
    seen = [keys_of(spans, *asked.sides) for spans in others]
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
