"""What the backward and, where bits need not agree, the forward of a rank compute: attention of its
queries to keys of the whole sequence, in calls of the library on runs of rows.

A run of queries [start, stop) and the keys [first, last) that it sees, in one call: the diagonal of
"bottom_right" lies `last - stop` keys further right than that of the whole sequence, by which the
window is moved back. ALiBi measures distances from the diagonal itself, so there the run is made
longer, by rows of zeros that are left out again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...dispatch import choose
from ...emulation import cpu_modes
from ...frontend.call import call
from ...frontend.checks import check
from ...ops import attention as ops
from ...problem import (
    LONG_SEQLEN,
    OPEN,
    WIDEST_EXACT,
    Between,
    Extras,
    Grads,
    Saved,
    Scalars,
    describe,
)
from ..layouts.work import Span
from ..transport.halves import Arena
from .call_spec import CallSpec

Tensor = torch.Tensor
BLOCK = 128  # keys: a multiple of every kernel's block
FEW = 16  # rows of a tile: a call of so few queries is split over its keys, by other kernels
MANY = 1024  # calls whose backends are kept


class Piece(NamedTuple):
    """One call: the rows of this rank and the keys of the sequence that it joins."""

    rows: slice
    keys: slice
    more: int  # rows of zeros behind the others
    left: int
    right: int


class Keys(NamedTuple):
    """Keys and values of the whole sequence, (batch, seqlen, heads, headdim), or of each run, of
    which those that span i needs are there once `arrive(i)` was called.
    """

    k: Tensor
    v: Tensor
    arena: Arena
    arrivals: tuple[Any, ...]  # of each span
    is_packed: bool = False  # whether each run has its own, end to end

    def arrive(self, span: int) -> None:
        """What is computed next follows the copies of what a span is the first to need."""
        self.arena.arrive(self.arrivals[span])

    def arrive_all(self) -> None:
        """Waits for all copies, which are made in the order of the spans."""
        if self.arrivals:
            self.arrive(-1)


def piece_of(spec: CallSpec, span: Span) -> Piece:
    """The call of a span. Its blocks of keys are those of the whole sequence's."""
    left, right = spec.sides
    row, start, stop, first, last = span
    a = first if left == OPEN else max(first, start - left)
    a = first + (a - first) // BLOCK * BLOCK
    b = last if right == OPEN else min(last, stop + right)
    more = b - stop if spec.alibi_slopes is not None else 0
    shift = b - stop - more
    left = OPEN if left == OPEN else left + shift
    right = OPEN if right == OPEN else right - shift
    return Piece(slice(row, row + stop - start), slice(a, b), more, left, right)


def backend_of_runs(spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """The backend by which a call on a run of rows gives those rows the bits of the call on all
    rows; None where there is none. q, k and v are this rank's.

    In the tiles of GPUs a row does not depend on its neighbours, and tiles of all heights have the
    same blocks of keys. But a backend that has more than one tile may choose another for a run, and
    on the CPU BLAS chooses by the shape of a product.
    """
    key = spec.signature, spec.backend, spec.deterministic, q.device, cpu_modes()
    if key not in _known:
        if len(_known) >= MANY:
            _known.clear()
        _known[key] = _backend_of_runs(spec, q, k, v)
    return _known[key]


_known: dict[Any, str | None] = {}


def _backend_of_runs(spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    layout = spec.layout
    extras = Extras(spec.alibi_slopes, spec.sinks)
    if layout.cu_seqlens is not None:
        starts = torch.empty(0, device=q.device)
        extras = extras._replace(cu_seqlens_q=starts, cu_seqlens_k=starts)
    scalars = Scalars(1.0, spec.softcap or 0.0, *spec.sides)
    align = spec.causal if isinstance(spec.causal, str) else "bottom_right"
    problem = describe(q, k, v, extras, scalars, align, spec.deterministic)
    name = choose(problem, q.device, spec.backend).NAME
    starts = (0, layout.seqlen) if layout.cu_seqlens is None else layout.cu_seqlens
    longest = max((b - a for a, b in itertools.pairwise(starts)), default=0)
    if name == "cpu" or longest * problem.group <= FEW:
        return None
    shortest = min((x.stop - x.start for x in layout.spans), default=longest)
    has_one_tile = name == "hopper" or (longest > LONG_SEQLEN) == (shortest > LONG_SEQLEN)
    return name if has_one_tile else None


def working_dtype(x: Tensor) -> torch.dtype:
    """What gradients are computed in. The kernels of GPUs sum in fp32 what they are given in 16
    bits, and hand those of keys out unrounded; on the CPU inputs are in fp32.
    """
    return x.dtype if x.is_cuda else torch.promote_types(x.dtype, torch.float32)


def attend(spec: CallSpec, q: Tensor, known: Keys, backend: str | None) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a rank's queries, by a backend of this name."""
    k, v = known.k, known.v
    exact = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=exact)
    for i, span in enumerate(spec.layout.spans):
        known.arrive(i)
        rows, keys, more, left, right = piece_of(spec, span)
        found = call(
            *(_longer(q[:, rows], more), k[:, keys], v[:, keys]),
            extras=Extras(spec.alibi_slopes, spec.sinks),
            numbers=(spec.scale, spec.softcap, 0.0),
            window=("bottom_right", left, right),
            deterministic=spec.deterministic,
            backend=backend,
        )
        nrows = span.stop - span.start
        out[:, rows], lse[:, :, rows] = found[0][:, :nrows], found[1][:, :, :nrows]
    return out, lse


Give = Callable[..., None]  # takes this rank's parts of the gradients of keys, as `Sums.begin` does


class Gradients(NamedTuple):
    """Gradients of a rank's queries."""

    dq: Tensor
    dsinks: Tensor | None


def gradients(spec: CallSpec, saved: Saved, known: Keys, give: Give) -> Gradients:
    """Gradients of a rank's queries; k and v are of the whole sequence. Parts of those of keys are
    given as they are computed, of a single run before dQ is rounded.
    """
    if len(spec.layout.spans) == 1:
        return _of_one_run(spec, saved, known, give)
    sinks, exact = spec.sinks, saved.lse.dtype
    dq = torch.empty_like(saved.q)
    dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=exact)
    dk, dv = Sum(saved.k, exact), Sum(saved.v, exact)
    for i, span in enumerate(spec.layout.spans):
        known.arrive(i)
        rows, keys, _, left, right = piece = piece_of(spec, span)
        found = gradients_of(spec, _cut(saved, piece), "bottom_right", left, right)
        dq[:, rows] = found.dq[:, : span.stop - span.start]
        dk.add(keys, found.dk)
        dv.add(keys, found.dv)
        if found.dsinks is not None and dsinks is not None:
            dsinks.add_(found.dsinks)
        del found  # or it would be there beside that of the next run
    give(dk.whole(), dv.whole())
    return Gradients(dq, dsinks)


def _of_one_run(spec: CallSpec, saved: Saved, known: Keys, give: Give) -> Gradients:
    """Gradients of a rank whose rows are one run."""
    span = spec.layout.spans[0]
    _, keys, _, left, right = piece = piece_of(spec, span)
    of_keys = ((0, keys.start, keys.stop),)
    between = Between(known.arrive_all, lambda found: give(found.dk, found.dv, of_keys))
    given = _cut(saved, piece)
    found = gradients_of(spec, given, "bottom_right", left, right, between=between)
    return Gradients(found.dq[:, : span.stop - span.start], found.dsinks)


def _cut(saved: Saved, piece: Piece) -> Saved:
    """What one call takes of all rows and keys."""
    dout, dlse, q, k, v, out, lse = saved
    rows, keys, more, *_ = piece
    return Saved(
        _longer(dout[:, rows], more),
        None if dlse is None else _longer(dlse[:, :, rows], more, 2).contiguous(),
        _longer(q[:, rows], more),
        *(k[:, keys], v[:, keys]),
        _longer(out[:, rows], more),
        _longer(lse[:, :, rows], more, 2, torch.inf).contiguous(),  # P of such a row is 0
    )


class Sum:
    """The sum of parts that are of some rows each, one after the other; the others are 0. Of runs
    that see all keys before them, the longest part is the sum so far. A part is the sum's from then
    on.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.like, self.dtype = like, dtype
        self.rows, self.total = slice(0, 0), like.new_empty(0)

    def add(self, rows: slice, part: Tensor) -> None:
        """A part of these rows."""
        if rows.start >= rows.stop:
            return
        if self.rows.start >= self.rows.stop:
            self.rows, self.total = rows, part.to(self.dtype)
        elif rows.start <= self.rows.start and self.rows.stop <= rows.stop:
            part = part.to(self.dtype)
            part[:, _within(self.rows, rows)] += self.total
            self.rows, self.total = rows, part
        else:
            if rows.start < self.rows.start or self.rows.stop < rows.stop:
                self.rows, self.total = slice(0, self.like.shape[1]), self.whole()
            self.total[:, _within(rows, self.rows)] += part

    def whole(self) -> Tensor:
        """The sum of all rows."""
        if self.rows.start >= self.rows.stop:
            return torch.zeros_like(self.like, dtype=self.dtype)
        if self.rows == slice(0, self.like.shape[1]):
            return self.total if self.total.dtype == self.dtype else self.total.to(self.dtype)
        found = torch.empty_like(self.like, dtype=self.dtype)
        found[:, : self.rows.start] = 0
        found[:, self.rows.stop :] = 0
        found[:, self.rows] = self.total
        return found


def _within(rows: slice, others: slice) -> slice:
    return slice(rows.start - others.start, rows.stop - others.start)


def gradients_of(
    spec: CallSpec,
    saved: Saved,
    align: str,
    left: int,
    right: int,
    extras: Extras | None = None,
    is_long: bool = False,
    rounds: bool = False,
    between: Between | None = None,
) -> Grads:
    """Gradients of one call of the library; of keys in fp32 where they are parts of sums."""
    sinks = None if spec.sinks is None else spec.sinks.to(saved.lse.dtype)
    extras = Extras(spec.alibi_slopes, sinks) if extras is None else extras
    q, k, v = saved.q, saved.k, saved.v
    known = check(
        q,
        k,
        v,
        extras=extras,
        numbers=(spec.scale, spec.softcap),
        align=align,
        window=(left, right),
        deterministic=spec.deterministic,
        dropout_p=spec.dropout_p,
        mods=spec.modifiers.mods,
        is_long=is_long,
    )
    known.backend, problem = spec.backend, known.problem
    if not rounds and q.dtype.itemsize == 2 and max(q.shape[3], v.shape[3]) <= WIDEST_EXACT:
        known.problem = problem._replace(has_fp32_key_grads=True)
    known = ops.known_call(known, (q, k, v, *extras.tensors))
    return ops.run_backward(known, saved, extras, between)


def _longer(x: Tensor, more: int, dim: int = 1, value: float = 0.0) -> Tensor:
    """x with so many rows of this value behind."""
    return F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), 0, more), value=value) if more else x
