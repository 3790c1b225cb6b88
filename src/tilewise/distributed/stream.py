"""Keys travel, queries stay: each rank pulls the keys and values that its queries see, whole and in
the order of the sequence, so that nothing is merged and no row is rounded twice.

Backward, each rank has a part of the gradient of every key that its queries saw: it publishes them
in fp32, and the owner of a key adds those of all ranks, in their order, and rounds once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..problem import Grads, Saved
from . import placed, rows
from .arena import Arena
from .asked import Asked
from .exchange import Published, publish, publish_rows, runs_in_turn
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


def is_placed(asked: Asked) -> bool:
    """Whether queries are computed at their places, and not in runs."""
    return asked.bitwise or asked.is_modified


class _Stream(torch.autograd.Function):
    """Attention of a rank's queries to pulled keys."""

    @staticmethod
    def forward(ctx: Any, arena: Arena, asked: Asked, q, k, v, sinks):
        k_all, v_all = _pull(arena, asked, k, v, f"attention (stream): {asked.words}")
        compute = placed.attend if is_placed(asked) else rows.attend
        out, lse = compute(asked, q, k_all, v_all)
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
        k_all, v_all = _pull(arena, asked, k, v, words)
        dout = torch.zeros_like(out) if dout is None else dout
        exact = lse.dtype
        dout, q, k_all, v_all, out = (x.to(exact) for x in (dout, q, k_all, v_all, out))
        compute = placed.gradients if asked.is_modified else rows.gradients
        partial = compute(asked, Saved(dout, dlse, q, k_all, v_all, out, lse))
        dk, dv = summed(arena, asked, partial, f"the sums of {words}")
    dsinks = partial.dsinks
    if dsinks is not None and asked.sinks is not None:
        dsinks = dsinks.to(asked.sinks.dtype)
    dtype = k.dtype
    return Grads(partial.dq.to(dtype), dk.to(dtype), dv.to(dtype), dsinks)


def _pull(arena: Arena, asked: Asked, k: Tensor, v: Tensor, words: str) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequence, those that no query here sees 0."""
    layout = asked.layout
    published = publish(arena, words, [k.transpose(0, 1), v.transpose(0, 1)], layout)
    batch = k.shape[0]
    found = [x.new_zeros(batch, layout.seqlen, *x.shape[2:]) for x in (k, v)]
    for rank, row, start, stop in runs_in_turn(layout, keys_of(layout.spans, *asked.sides)):
        for number, x in enumerate(found):
            pulled = published.pull(rank, number, row, row + stop - start)
            x[:, start:stop] = pulled.transpose(0, 1)
    return found[0], found[1]


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
    dtype, shape = published.kinds[number]
    total = torch.zeros(layout.tokens, *shape, dtype=dtype)
    for rank in range(layout.ranks):
        row = 0
        for start, stop in layout.runs[layout.rank]:
            for first, last in seen[rank]:  # of other keys that rank has no part
                a, b = max(start, first), min(stop, last)
                if a < b:
                    total[row + a - start : row + b - start] += published.pull(rank, number, a, b)
            row += stop - start
    return total.transpose(0, 1)
