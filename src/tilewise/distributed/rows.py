"""What the backward and, where bits need not agree, the forward of a rank compute: attention of its
queries to keys of the whole sequence, in calls of the library on runs of rows.

A run of queries [start, stop) and the keys [first, last) that it sees, in one call: the diagonal of
"bottom_right" lies `last - stop` keys further right than that of the whole sequence, by which the
window is moved back. ALiBi measures distances from the diagonal itself, so there the run is made
longer, by rows of zeros that are left out again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..frontend.attention import call
from ..frontend.checks import check
from ..ops import attention as ops
from ..problem import OPEN, Call, Extras, Grads, Saved
from .asked import Asked
from .work import Span

Tensor = torch.Tensor


class Piece(NamedTuple):
    """One call: the rows of this rank and the keys of the sequence that it joins."""

    rows: slice
    keys: slice
    more: int  # rows of zeros behind the others
    left: int
    right: int


def piece_of(asked: Asked, span: Span) -> Piece:
    """The call of a span."""
    left, right = asked.sides
    row, start, stop, first, last = span
    a = first if left == OPEN else max(first, start - left)
    b = last if right == OPEN else min(last, stop + right)
    more = b - stop if asked.alibi_slopes is not None else 0
    shift = b - stop - more
    left = OPEN if left == OPEN else left + shift
    right = OPEN if right == OPEN else right - shift
    return Piece(slice(row, row + stop - start), slice(a, b), more, left, right)


def attend(asked: Asked, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a rank's queries; k and v are of the whole sequence."""
    exact = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=exact)
    for span in asked.layout.spans:
        rows, keys, more, left, right = piece_of(asked, span)
        found = call(
            *(_longer(q[:, rows], more), k[:, keys], v[:, keys]),
            extras=Extras(asked.alibi_slopes, asked.sinks),
            numbers=(asked.scale, asked.softcap, 0.0),
            window=("bottom_right", left, right),
            deterministic=asked.deterministic,
            backend=asked.backend,
        )
        nrows = span.stop - span.start
        out[:, rows], lse[:, :, rows] = found[0][:, :nrows], found[1][:, :, :nrows]
    return out, lse


class Partial(NamedTuple):
    """Gradients of a rank's queries, and its part of those of all keys, in fp32 (fp64)."""

    dq: Tensor
    dk: Tensor  # (batch, seqlen, nheads_k, headdim)
    dv: Tensor
    dsinks: Tensor | None


def gradients(asked: Asked, saved: Saved) -> Partial:
    """Those of a rank's queries; k and v are of the whole sequence, all in fp32 (fp64)."""
    dout, dlse, q, k, v, out, lse = saved
    sinks = asked.sinks
    partial = Partial(
        torch.zeros_like(q),
        torch.zeros_like(k),
        torch.zeros_like(v),
        None if sinks is None else torch.zeros_like(sinks, dtype=lse.dtype),
    )
    for span in asked.layout.spans:
        rows, keys, more, left, right = piece_of(asked, span)
        given = Saved(
            _longer(dout[:, rows], more),
            None if dlse is None else F.pad(dlse[:, :, rows], (0, more)),
            _longer(q[:, rows], more),
            *(k[:, keys], v[:, keys]),
            _longer(out[:, rows], more),
            F.pad(lse[:, :, rows], (0, more), value=torch.inf),  # P of such a row is 0
        )
        found = gradients_of(asked, given, "bottom_right", left, right)
        partial.dq[:, rows] = found.dq[:, : span.stop - span.start]
        partial.dk[:, keys] += found.dk
        partial.dv[:, keys] += found.dv
        if found.dsinks is not None and partial.dsinks is not None:
            partial.dsinks.add_(found.dsinks)
    return partial


def gradients_of(
    asked: Asked,
    saved: Saved,
    align: str,
    left: int,
    right: int,
    extras: Extras | None = None,
    is_long: bool = False,
) -> Grads:
    """Those of one call of the library."""
    sinks = None if asked.sinks is None else asked.sinks.to(saved.lse.dtype)
    extras = Extras(asked.alibi_slopes, sinks) if extras is None else extras
    q, k, v = saved.q, saved.k, saved.v
    checked = check(
        *(q, k, v),
        extras=extras,
        numbers=(asked.scale, asked.softcap),
        align=align,
        window=(left, right),
        deterministic=asked.deterministic,
        dropout_p=asked.dropout_p,
        mods=asked.modifiers.mods,
        is_long=is_long,
    )
    known = Call(checked.problem, checked.scalars, asked.backend)
    known = ops.known_call(known, (q, k, v, *extras.tensors))
    return ops.run_backward(known, saved, extras)


def _longer(x: Tensor, more: int) -> Tensor:
    """(batch, tokens, heads, headdim) with rows of zeros behind."""
    return F.pad(x, (0, 0, 0, 0, 0, more)) if more else x
