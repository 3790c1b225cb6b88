"""Attention of a rank's queries to keys of the whole sequence, in calls of the library on runs of
rows: the backward and, where bits need not agree, the forward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...dispatch import choose
from ...emulation import cpu_modes
from ...frontend.call import call
from ...frontend.checks import check
from ...ops import attention as ops
from ...problem import LONG_SEQLEN, WIDEST_EXACT, Between, Extras, Grads, Saved, describe
from ..layouts.work import Band, KeyRun
from ..transport.halves import Arena
from .call_spec import CallSpec
from .run_calls import pad, run_call

Tensor = torch.Tensor
FEW = 16  # rows of a tile: a call of so few queries is split over its keys, by other kernels
MANY = 1024  # calls whose backends are kept


class PulledKeys(NamedTuple):
    """K and V of the whole sequence, or of each run. `arrive(i)` waits for those of span i."""

    k: Tensor
    v: Tensor
    arena: Arena
    marks: tuple[Any, ...]  # of the copies for each span
    is_packed: bool = False  # whether each run has its own, end to end

    def arrive(self, span: int) -> None:
        """Lets the stream wait for the copies of what a span is the first to need."""
        self.arena.arrive(self.marks[span])

    def arrive_all(self) -> None:
        """Lets the stream wait for all copies, which are made in the order of the spans."""
        if self.marks:
            self.arrive(-1)


def backend_of_runs(spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Names the backend by which a call on a run of rows gives those rows the bits of the call on
    all rows; None where there is none. q, k and v are this rank's.

    In the tiles of GPUs a row does not depend on its neighbours, and tiles of all heights have the
    same blocks of keys. But a backend that has more than one tile may choose another for a run, and
    on the CPU BLAS chooses by the shape of a product.
    """
    key = spec.signature, spec.backend, spec.deterministic, q.device, cpu_modes()
    if key not in _backends:
        if len(_backends) >= MANY:
            _backends.clear()
        _backends[key] = _backend_of_runs(spec, q, k=k, v=v)
    return _backends[key]


_backends: dict[Any, str | None] = {}


def _backend_of_runs(spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    layout = spec.layout
    extras = spec.position_free_extras
    if layout.cu_seqlens is not None:
        starts = torch.empty(0, device=q.device)
        extras = extras._replace(cu_seqlens_q=starts, cu_seqlens_k=starts)
    problem = describe(
        q, k, v, extras, scalars=spec.scalars, align=spec.align, deterministic=spec.deterministic
    )
    name = choose(problem, q.device, spec.backend).NAME
    starts = (0, layout.seqlen) if layout.cu_seqlens is None else layout.cu_seqlens
    longest = max((b - a for a, b in itertools.pairwise(starts)), default=0)
    if name == "cpu" or longest * problem.group <= FEW:
        return None
    shortest = min((x.stop - x.start for x in layout.spans), default=longest)
    has_one_tile = name == "hopper" or (longest > LONG_SEQLEN) == (shortest > LONG_SEQLEN)
    return name if has_one_tile else None


def working_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of a backward: fp32 on a CPU; GPU kernels sum 16-bit inputs in fp32."""
    return x.dtype if x.is_cuda else torch.promote_types(x.dtype, torch.float32)


def attend(spec: CallSpec, q: Tensor, pulled: PulledKeys) -> tuple[Tensor, Tensor]:
    """Computes `out` and `lse` of a rank's queries."""
    k, v = pulled.k, pulled.v
    exact = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=exact)
    for i, span in enumerate(spec.layout.spans):
        pulled.arrive(i)
        rows, keys, band, padding = run_call(spec, span)
        queries, extras = pad(q[:, rows], padding), spec.position_free_extras
        run_out, run_lse = attend_run(
            spec, queries, k=k[:, keys], v=v[:, keys], band=band, extras=extras
        )
        nrows = span.stop - span.start
        out[:, rows], lse[:, :, rows] = run_out[:, :nrows], run_lse[:, :, :nrows]
    return out, lse


def attend_run(
    spec: CallSpec, q: Tensor, k: Tensor, v: Tensor, *, band: Band, extras: Extras
) -> tuple[Tensor, Tensor]:
    """Calls the library on runs of rows, without functions of positions and dropout."""
    return call(
        q,
        k,
        v=v,
        extras=extras,
        numbers=(*spec.numbers, 0.0),
        window=("bottom_right", band.left, band.right),
        deterministic=spec.deterministic,
        backend=spec.backend,
    )


# Takes this rank's parts of the gradients of keys, as `Sums.begin` does
AddKeyGrads = Callable[..., None]


class QueryGrads(NamedTuple):
    """Gradients of a rank's queries, and this rank's part of that of the sinks."""

    dq: Tensor
    dsinks: Tensor | None

    @classmethod
    def of(cls, grads: Grads, rows: int | None = None) -> QueryGrads:
        """Takes the gradients of a call's first rows."""
        return cls(grads.dq[:, :rows], grads.dsinks)

    def with_keys(self, dk: Tensor, dv: Tensor, extras: Extras) -> Grads:
        """All gradients, each in the dtype of its tensor."""
        dsinks = self.dsinks
        if dsinks is not None and extras.sinks is not None:
            dsinks = dsinks.to(extras.sinks.dtype)
        return Grads(self.dq.to(dk.dtype), dk, dv=dv, dsinks=dsinks)


def joined(groups: list[QueryGrads]) -> QueryGrads:
    """Joins the gradients of groups of heads."""
    if len(groups) == 1:
        return groups[0]
    sinks = [x.dsinks for x in groups if x.dsinks is not None]
    return QueryGrads(torch.cat([x.dq for x in groups], 2), torch.cat(sinks) if sinks else None)


def gradients(
    spec: CallSpec, saved: Saved, pulled: PulledKeys, *, add_key_grads: AddKeyGrads
) -> QueryGrads:
    """Computes gradients of a rank's queries. A single run adds those of keys early."""
    if len(spec.layout.spans) == 1:
        return _gradients_of_one_run(spec, saved, pulled=pulled, add_key_grads=add_key_grads)
    sinks, exact = spec.extras.sinks, saved.lse.dtype
    dq = torch.empty_like(saved.q)
    dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=exact)
    dk, dv = Sum(saved.k, exact), Sum(saved.v, exact)
    for i, span in enumerate(spec.layout.spans):
        pulled.arrive(i)
        run = run_call(spec, span)
        grads = gradients_of(spec, run.saved_of(saved), band=run.band)
        dq[:, run.rows] = grads.dq[:, : span.stop - span.start]
        dk.add(run.keys, grads.dk)
        dv.add(run.keys, grads.dv)
        if grads.dsinks is not None and dsinks is not None:
            dsinks.add_(grads.dsinks)
        del grads  # they must not be in memory with those of the next run
    add_key_grads(dk.whole(), dv.whole())
    return QueryGrads(dq, dsinks)


def _gradients_of_one_run(
    spec: CallSpec, saved: Saved, pulled: PulledKeys, *, add_key_grads: AddKeyGrads
) -> QueryGrads:
    span = spec.layout.spans[0]
    run = run_call(spec, span)
    key_runs = (KeyRun(row=0, start=run.keys.start, stop=run.keys.stop),)

    def add(grads: Grads) -> None:
        add_key_grads(grads.dk, grads.dv, runs=key_runs)

    between = Between(pulled.arrive_all, add)
    grads = gradients_of(spec, run.saved_of(saved), band=run.band, between=between)
    return QueryGrads.of(grads, span.stop - span.start)


class Sum:
    """The sum of parts that have some rows each, one after the other; the other rows are 0. Where
    runs see all keys before them, the longest part is the sum so far. `add` takes a part's memory.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.like, self.dtype = like, dtype
        self.rows, self.total = slice(0, 0), like.new_empty(0)

    def add(self, rows: slice, part: Tensor) -> None:
        """Adds a part that has these rows."""
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
        """Returns the sum with all rows."""
        if self.rows.start >= self.rows.stop:
            return torch.zeros_like(self.like, dtype=self.dtype)
        if self.rows == slice(0, self.like.shape[1]):
            return self.total if self.total.dtype == self.dtype else self.total.to(self.dtype)
        whole = torch.empty_like(self.like, dtype=self.dtype)
        whole[:, : self.rows.start] = 0
        whole[:, self.rows.stop :] = 0
        whole[:, self.rows] = self.total
        return whole


def _within(rows: slice, outer: slice) -> slice:
    return slice(rows.start - outer.start, rows.stop - outer.start)


def gradients_of(
    spec: CallSpec,
    saved: Saved,
    *,
    band: Band,
    align: str = "bottom_right",
    extras: Extras | None = None,
    is_long: bool = False,
    rounds: bool = False,
    between: Between | None = None,
) -> Grads:
    """Computes the gradients of one call of the library; parts of sums stay in fp32."""
    if extras is None:
        extras = spec.summing_in(saved.lse.dtype).position_free_extras
    q, k, v = saved.q, saved.k, saved.v
    checked = check(
        q,
        k,
        v,
        extras=extras,
        numbers=spec.numbers,
        align=align,
        window=(band.left, band.right),
        deterministic=spec.deterministic,
        dropout_p=spec.dropout_p,
        mods=spec.mods,
        is_long=is_long,
    )
    checked.backend = spec.backend
    if not rounds and q.dtype.itemsize == 2 and max(q.shape[3], v.shape[3]) <= WIDEST_EXACT:
        checked.problem = checked.problem._replace(has_fp32_key_grads=True)
    cached = ops.known_call(checked, (q, k, v, *extras.tensors))
    return ops.run_backward(cached, saved, extras=extras, between=between)
