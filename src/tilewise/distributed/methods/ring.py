"""Shards of keys in turn, results merged: each rank attends to one rank's keys after another and
folds what it gets by the log-sum-exp, in fp32 (Liu et al. 2023, arXiv 2310.01889).

It needs room for one shard of keys at a time and rounds more than the other methods: `out` is not
that of one process to the bit, so it serves only calls that do not ask for it. A sink joins once,
after the last shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ...frontend.call import call
from ...ops.calls import resolved
from ...problem import OPEN, Extras, Grads, Saved
from ...reference import merge_states
from ..layouts.work import Span
from ..transport.arena import reporting
from ..transport.exchange import Published, publish_rows
from ..transport.halves import Arena
from .call_spec import CallSpec
from .rows import Give, Gradients, gradients_of, working_dtype
from .sums import Sums

Tensor = torch.Tensor


def supports(spec: CallSpec, nheads: int, nheads_k: int) -> str | None:
    """None, or why results cannot be merged."""
    if spec.bitwise and spec.layout.ranks > 1:
        return "it merges results, which differ from those of one process in the last bits: pass "
        "bitwise=False"
    if spec.is_modified or spec.alibi_slopes is not None:
        return "a shard of keys knows no positions in the whole for ALiBi, masks and dropout"
    return None


def attend(arena: Arena, spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a rank's rows."""
    return _Ring.apply(arena, spec, q, k, v, spec.sinks)


class Meeting(NamedTuple):
    """One call: rows of this rank, rows of a shard of keys, and the band between them."""

    rows: slice
    keys: slice
    left: int
    right: int


def meeting(mine: Span, other: Span, left: int, right: int) -> Meeting | None:
    """The call of two spans; None where no query of the one sees a key of the other."""
    if mine.first != other.first:  # of another document
        return None
    a, b, c, d = mine.start, mine.stop, other.start, other.stop
    if right != OPEN:
        a, d = max(a, c - right), min(d, b + right)
    if left != OPEN:
        b, c = min(b, d + left), max(c, a - left)
    if a >= b or c >= d:
        return None
    shift = d - b  # of the diagonal of "bottom_right"
    rows = slice(mine.row + a - mine.start, mine.row + b - mine.start)
    keys = slice(other.row + c - other.start, other.row + d - other.start)
    left = OPEN if left == OPEN else left + shift
    right = OPEN if right == OPEN else right - shift
    return Meeting(rows, keys, left, right)


class Shard(NamedTuple):
    """The keys and values of a rank, (batch, tokens, heads, headdim), and what meets them."""

    rank: int
    met: list[Meeting]
    keys: Tensor
    values: Tensor


def steps(published: Published, spec: CallSpec) -> Iterator[Shard]:
    """The shard of each rank, this one's first. The next one is pulled beside what is computed on
    one.
    """
    layout, arena = spec.layout, published.arena
    ahead = None
    for step in range(layout.ranks):
        rank = (layout.rank - step) % layout.ranks
        pairs = ((x, y) for x in layout.spans for y in layout.at(rank).spans)
        met = [x for x in (meeting(*y, *spec.sides) for y in pairs) if x is not None]
        if not met:
            continue
        rows = [published.pull(rank, number) for number in (0, 1)]
        copies = [torch.empty_like(x, dtype=working_dtype(x)) for x in rows]
        with arena.copying():
            for copy, x in zip(copies, rows):
                copy.copy_(x)
            arrival = arena.mark()
        if ahead is not None:
            arena.arrive(ahead[1])
            yield ahead[0]
        ahead = Shard(rank, met, *(x.transpose(0, 1) for x in copies)), arrival
    if ahead is not None:
        arena.arrive(ahead[1])
        yield ahead[0]


class _Ring(torch.autograd.Function):
    """Attention of a rank's queries, shard by shard of keys."""

    @staticmethod
    def forward(ctx: Any, arena: Arena, spec: CallSpec, q, k, v, sinks):
        signature = f"attention (ring): {spec.signature}"
        tensors = [k.transpose(0, 1), v.transpose(0, 1)]
        published = publish_rows(arena, signature, tensors, counts=spec.layout.counts)
        exact = torch.promote_types(q.dtype, torch.float32)
        total = q.new_zeros(*q.shape[:3], v.shape[3], dtype=exact)
        lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=exact)
        for _, met, keys, values in steps(published, spec):
            for x in met:
                part = call(
                    *(q[:, x.rows].to(keys.dtype), keys[:, x.keys], values[:, x.keys]),
                    extras=Extras(),
                    numbers=(spec.scale, spec.softcap, 0.0),
                    window=("bottom_right", x.left, x.right),
                    deterministic=spec.deterministic,
                    backend=spec.backend,
                )
                before = total[:, x.rows], lse[:, :, x.rows]
                total[:, x.rows], lse[:, :, x.rows] = merge_states(*before, *part)
        if sinks is not None:
            whole = torch.logaddexp(lse, sinks.to(exact).unsqueeze(1))
            total *= torch.exp(lse - whole).transpose(1, 2).unsqueeze(-1)
            lse = whole
        out = total.to(q.dtype)
        arena.settle(out, lse)
        ctx.arena, ctx.spec = arena, spec
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout, dlse):  # pyright: ignore[reportIncompatibleMethodOverride]
        with reporting(ctx.spec.layout):
            saved = Saved(*resolved((dout, dlse)), *ctx.saved_tensors)
            grads = backward(ctx.arena, ctx.spec, saved)
        return None, None, grads.dq, grads.dk, grads.dv, grads.dsinks


def backward(arena: Arena, spec: CallSpec, saved: Saved) -> Grads:
    """The gradients of `attend`."""
    signature = f"the sums of the backward of attention (ring): {spec.signature}"
    sums = Sums(arena, spec, signature, saved.k.dtype)
    dq, dsinks = _gradients(arena, spec, saved, sums.begin)
    dk, dv = sums.finish()
    arena.settle(dq, dk, dv)
    if dsinks is not None and spec.sinks is not None:
        dsinks = dsinks.to(spec.sinks.dtype)
    return Grads(dq.to(dk.dtype), dk, dv, dsinks)


def _gradients(arena: Arena, spec: CallSpec, saved: Saved, give: Give) -> Gradients:
    """Gradients of a rank's queries; its part of those of all keys is given: P = exp(S - LSE) of a
    shard's keys is that of the whole row.
    """
    dout, dlse, q, k, v, out, lse = saved
    signature = f"the backward of attention (ring): {spec.signature}"
    tensors = [k.transpose(0, 1), v.transpose(0, 1)]
    published = publish_rows(arena, signature, tensors, counts=spec.layout.counts)
    dout = torch.zeros_like(out) if dout is None else dout
    dout, q, out = (x.to(working_dtype(q)) for x in (dout, q, out))
    seqlen, batch = spec.layout.seqlen, q.shape[0]
    dq = torch.zeros_like(q, dtype=lse.dtype)
    dk, dv = (lse.new_zeros(batch, seqlen, *x.shape[2:]) for x in (k, v))
    plain = spec._replace(sinks=None)
    for rank, met, keys, values in steps(published, spec):
        places = spec.layout.at(rank)
        parts = [torch.zeros_like(x, dtype=lse.dtype) for x in (keys, values)]
        for x in met:
            given = Saved(
                dout[:, x.rows],
                None if dlse is None else dlse[:, :, x.rows],
                *(q[:, x.rows], keys[:, x.keys], values[:, x.keys]),
                *(out[:, x.rows], lse[:, :, x.rows].contiguous()),
            )
            found = gradients_of(plain, given, "bottom_right", x.left, x.right)
            dq[:, x.rows] += found.dq
            parts[0][:, x.keys] += found.dk
            parts[1][:, x.keys] += found.dv
        for total, part in zip((dk, dv), parts):
            row = 0
            for start, stop in places.runs[rank]:
                total[:, start:stop] = part[:, row : row + stop - start]
                row += stop - start
    give(dk, dv)
    return Gradients(dq, _of_sinks(spec, dout, out, lse, dlse))


def _of_sinks(
    spec: CallSpec, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None
) -> Tensor | None:
    """A sink's P is exp(sink - LSE) and its dP is 0, so its dS is -P delta."""
    if spec.sinks is None:
        return None
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    delta = delta if dlse is None else delta - dlse
    p = torch.exp(spec.sinks.to(lse.dtype).unsqueeze(1) - lse)
    return -(p * delta).sum((0, 2))
