"""Heads for rows: an all-to-all gives each rank the whole sequence of some heads, on which the call
is that of one process; another one gives the rows back (DeepSpeed-Ulysses, Jacobs et al. 2023,
arXiv 2309.14509). A rank has whole groups of query heads and their key heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..problem import Grads, Saved
from . import whole
from .call_spec import CallSpec
from .exchange import Published, copy, place, publish_parts, runs_in_turn
from .halves import Arena
from .layout import Layout, Run

Tensor = torch.Tensor
NAME = "heads"
MOST_COPIES = 4  # of what is published of a tensor


def supports(spec: CallSpec, nheads: int, nheads_k: int) -> str | None:
    """None, or why the heads cannot be dealt."""
    ranks = spec.layout.ranks
    if nheads_k % ranks:
        return f"{nheads_k} key heads cannot be dealt evenly over {ranks} ranks"
    if spec.uses_head_index:
        return "dropout, or a mask or score function of h, counts heads of the whole, not a rank's"
    return None


def attend(
    arena: Arena, spec: CallSpec, q: Tensor, k: Tensor, v: Tensor, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """`out` of a rank's rows, and `lse` where it is asked for."""
    ranks, rank = spec.layout.ranks, spec.layout.rank
    each = q.shape[2] // ranks
    signature = f"attention (heads): {spec.signature}"
    q, k, v = _Exchange.apply(arena, spec.layout, signature, True, q, k, v)
    out, lse = whole.attend(spec, q, k, v, slice(rank * each, (rank + 1) * each))
    signature = f"the results of {signature}{' with lse' if return_lse else ''}"
    if not return_lse:
        (out,) = _Exchange.apply(arena, spec.layout, signature, False, out)
        return out, None
    lse = lse.transpose(1, 2).unsqueeze(-1)
    out, lse = _Exchange.apply(arena, spec.layout, signature, False, out, lse)
    return out, lse.squeeze(-1).transpose(1, 2)


def backward(arena: Arena, spec: CallSpec, saved: Saved) -> Grads:
    """The gradients of `attend`, of what a compiled graph has kept, which is rows: heads are
    exchanged for them once more.
    """
    layout, (dout, dlse, q, k, v, out, lse) = spec.layout, saved
    ranks, rank = layout.ranks, layout.rank
    each = q.shape[2] // ranks
    mine = slice(rank * each, (rank + 1) * each)
    by_row = [q, k, v, out, lse.transpose(1, 2).unsqueeze(-1), dout]
    by_row += [] if dlse is None else [dlse.transpose(1, 2).unsqueeze(-1)]
    signature = f"the backward of attention (heads): {spec.signature}"
    with arena.reporting():
        q, k, v, out, lse, dout, *dlses = _exchange(arena, layout, signature, True, by_row)
        lse, *dlses = (x.squeeze(-1).transpose(1, 2).contiguous() for x in (lse, *dlses))
        given = Saved(dout, dlses[0] if dlses else None, q, k, v, out, lse)
        grads = whole.backward(spec, given, mine)
        signature = f"the results of {signature}"
        dq, dk, dv = _exchange(arena, layout, signature, False, [grads.dq, grads.dk, grads.dv])
    dsinks = None
    if spec.sinks is not None and grads.dsinks is not None:
        dsinks = torch.zeros_like(spec.sinks)
        dsinks[mine] = grads.dsinks
    return Grads(dq, dk, dv, dsinks)


class _Exchange(torch.autograd.Function):
    """Rows of all heads (batch, tokens, heads, ...) to heads of all rows, or back; the gradient
    takes the other way.
    """

    @staticmethod
    def forward(ctx: Any, arena: Arena, layout: Layout, signature: str, to_heads: bool, *tensors):
        ctx.args = arena, layout, signature, to_heads
        ctx.set_materialize_grads(False)
        return _exchange(arena, layout, signature, to_heads, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        arena, layout, signature, to_heads = ctx.args
        present = [grad is not None for grad in grads]
        signature = f"the backward of {signature}, with gradients {present}"
        given = [grad for grad in grads if grad is not None]
        with arena.reporting():
            found = iter(_exchange(arena, layout, signature, not to_heads, given))
        return None, None, None, None, *(next(found) if x else None for x in present)


def _exchange(
    arena: Arena, layout: Layout, signature: str, to_heads: bool, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    by_row = [x.transpose(0, 1) for x in tensors]
    found = (_to_heads if to_heads else _to_rows)(arena, layout, signature, by_row)
    arena.settle(*found)
    return tuple(x.transpose(0, 1) for x in found)


def _to_heads(
    arena: Arena, layout: Layout, signature: str, tensors: Sequence[Tensor]
) -> list[Tensor]:
    """Of (tokens, batch, heads, ...) this rank's heads of the whole sequence."""
    parts = [x.unflatten(2, (layout.ranks, -1)).movedim(2, 0) for x in tensors]
    published = publish_parts(arena, signature, parts, layout.counts, left_out=layout.rank)
    found = [x.new_empty(layout.seqlen, *x.shape[2:]) for x in parts]
    with arena.copying():
        for rank, row, start, stop in runs_in_turn(layout, [(0, layout.seqlen)]):
            if rank == layout.rank:
                continue
            for number, x in enumerate(found):
                rows = published.pull(rank, number, row, row + stop - start, layout.rank)
                x[start:stop].copy_(rows)
        arrived = arena.mark()
    for x, of_ranks in zip(found, parts):  # beside the copies from the other ranks
        place(layout, of_ranks[layout.rank].unsqueeze(0), x.unsqueeze(0))
    arena.arrive(arrived)
    return found


def _to_rows(
    arena: Arena, layout: Layout, signature: str, tensors: Sequence[Tensor]
) -> list[Tensor]:
    """Of (seqlen, batch, this rank's heads, ...) this rank's rows of all heads."""
    rows = _rows_at(layout)
    published = Published(arena, [x.unsqueeze(0) for x in tensors], [layout.seqlen] * layout.ranks)
    arena.publish(published.nbytes, signature)
    for start, stop in _between([run for _, run in rows], layout.seqlen):
        for number, x in enumerate(tensors):
            copy(x[start:stop], published.view(layout.rank, number)[0, start:stop])
    arena.meet(signature)
    # (tokens, batch, ranks, heads of one, ...); rows come contiguous, as DMA copies them
    found = [x.new_empty(layout.tokens, x.shape[1], layout.ranks, *x.shape[2:]) for x in tensors]
    pulled = [x.new_empty(layout.ranks - 1, layout.tokens, *x.shape[1:]) for x in tensors]
    others = [(layout.rank - step) % layout.ranks for step in range(1, layout.ranks)]
    with arena.copying():
        for at, rank in enumerate(others):
            for mine, (start, stop) in rows:
                for number, x in enumerate(pulled):
                    x[at, mine].copy_(published.pull(rank, number, start, stop))
        arrived = arena.mark()
    for mine, (start, stop) in rows:  # beside the copies from the other ranks
        for x, y in zip(found, tensors):
            copy(y[start:stop], x[mine, :, layout.rank])
    arena.arrive(arrived)
    for x, from_others in zip(found, pulled):
        for at, rank in enumerate(others):
            copy(from_others[at], x[:, :, rank])
    return [x.flatten(2, 3) for x in found]


def _between(runs: list[Run], seqlen: int) -> list[Run]:
    """The positions of the other ranks, where these are few copies; else all."""
    ends = [0, *(x for run in sorted(runs) for x in run), seqlen]
    found = [(a, b) for a, b in zip(ends[::2], ends[1::2]) if a < b]
    return found if len(found) <= MOST_COPIES else [(0, seqlen)]


def _rows_at(layout: Layout) -> list[tuple[slice, Run]]:
    """The rows of this rank that each of its runs of positions are."""
    ends = itertools.accumulate((stop - start for start, stop in layout.runs[layout.rank]))
    return [
        (slice(end - (run[1] - run[0]), end), run)
        for end, run in zip(ends, layout.runs[layout.rank])
    ]
