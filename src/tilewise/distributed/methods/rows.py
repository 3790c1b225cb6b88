"""Attention of a rank's queries to keys of the whole sequence, in calls of the library on runs of
rows: the backward and, where bits need not agree, the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...dispatch import choose
from ...emulation import cpu_modes
from ...frontend.values import check_scores, knows_values
from ...kernels.common.outputs import empty_out
from ...ops import attention as ops
from ...ops.calls import entry_of
from ...problem import LONG_SEQLEN, WIDEST_EXACT, Between, Call, Extras, Grads, Saved
from ..layouts.work import KeyRun
from ..transport.halves import Arena
from .grads import LearnedSum, QueryGrads
from .run_calls import pad, run_call
from .shard_call import ShardCall

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


def backend_of_runs(spec: ShardCall, q: Tensor, k: Tensor, v: Tensor) -> str | None:
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


def _backend_of_runs(spec: ShardCall, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    layout, longest = spec.layout, spec.layout.longest
    problem = spec.on_rows(q, k, v=v, extras=spec.extras_per_head, align=spec.align).problem
    problem = problem._replace(is_packed=layout.cu_seqlens is not None)
    name = choose(problem, q.device, backend=spec.backend).NAME
    if name == "cpu" or longest * problem.group <= FEW:
        return None
    shortest = min((x.stop - x.start for x in layout.spans), default=longest)
    has_one_tile = name == "hopper" or (longest > LONG_SEQLEN) == (shortest > LONG_SEQLEN)
    return name if has_one_tile else None


def working_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of a backward: fp32 on a CPU; GPU kernels sum 16-bit inputs in fp32."""
    return x.dtype if x.is_cuda else torch.promote_types(x.dtype, torch.float32)


def attend(spec: ShardCall, q: Tensor, pulled: PulledKeys) -> tuple[Tensor, Tensor]:
    """Computes `out` and `lse` of a rank's queries."""
    k, v = pulled.k, pulled.v
    out, lse = empty_out(q, v.shape[3])
    for i, span in enumerate(spec.layout.spans):
        pulled.arrive(i)
        rows, keys, band, padding = run_call(spec, span)
        queries, per_head = pad(q[:, rows], padding), spec.extras_per_head
        parts = attend_run(spec, queries, k[:, keys], v=v[:, keys], band=band, extras=per_head)
        run_out, run_lse = parts
        nrows = span.stop - span.start
        out[:, rows], lse[:, :, rows] = run_out[:, :nrows], run_lse[:, :, :nrows]
    return out, lse


def attend_run(
    spec: ShardCall, q: Tensor, k: Tensor, v: Tensor, *, extras: Extras, **options: Any
) -> tuple[Tensor, Tensor]:
    """Computes `out` and `lse` of one call of the library; `options` are those of `on_rows`."""
    tensors = q, k, v, *extras.tensors
    needs_dispatcher = ops.needs_dispatcher(tensors)
    key = "shards", spec.scalars, spec.mods, spec.deterministic, spec.backend, *options.items()
    entry = None if needs_dispatcher else entry_of(tensors, key)
    call = None if entry is None else entry.call
    if call is None:
        call = spec.on_rows(q, k, v=v, extras=extras, **options)
        call.needs_grad = not needs_dispatcher and ops.needs_grad(tensors)
        if entry is not None:
            entry.call = call
    if not q.is_cpu and knows_values(q):
        check_scores(q, k, call.scalars)
    return ops.attention(call, q, k, v, extras, needs_dispatcher)


# Takes this rank's parts of the gradients of keys, as `Sums.begin` does
AddKeyGrads = Callable[..., None]


def gradients(
    spec: ShardCall, saved: Saved, pulled: PulledKeys, *, add_key_grads: AddKeyGrads
) -> QueryGrads:
    """Computes gradients of a rank's queries. A single run adds those of keys early."""
    if len(spec.layout.spans) == 1:
        return _gradients_of_one_run(spec, saved, pulled=pulled, add_key_grads=add_key_grads)
    exact = saved.lse.dtype
    dq, dlearned = torch.empty_like(saved.q), LearnedSum(spec.extras, exact)
    dk, dv = (torch.zeros_like(x, dtype=exact) for x in (saved.k, saved.v))
    for i, span in enumerate(spec.layout.spans):
        pulled.arrive(i)
        run = run_call(spec, span)
        grads = gradients_of(spec, run.saved_of(saved), band=run.band)
        dq[:, run.rows] = grads.dq[:, : span.stop - span.start]
        dk[:, run.keys].add_(grads.dk)
        dv[:, run.keys].add_(grads.dv)
        dlearned.add(grads)
        del grads  # they must not be in memory with those of the next run
    add_key_grads(dk, dv)
    return QueryGrads(dq, dlearned.total)


def _gradients_of_one_run(
    spec: ShardCall, saved: Saved, pulled: PulledKeys, *, add_key_grads: AddKeyGrads
) -> QueryGrads:
    span = spec.layout.spans[0]
    run = run_call(spec, span)
    key_runs = (KeyRun(row=0, start=run.keys.start, stop=run.keys.stop),)

    def add(grads: Grads) -> None:
        add_key_grads(grads.dk, grads.dv, runs=key_runs)

    between = Between(pulled.arrive_all, add)
    grads = gradients_of(spec, run.saved_of(saved), band=run.band, between=between)
    return QueryGrads.of(grads, span.stop - span.start)


def gradients_of(
    spec: ShardCall,
    saved: Saved,
    *,
    extras: Extras | None = None,
    rounds: bool = False,
    between: Between | None = None,
    **options: Any,
) -> Grads:
    """Computes the gradients of `attend_run`; parts of sums stay in fp32 unless it rounds."""
    if extras is None:
        extras = spec.summing_in(saved.lse.dtype).extras_per_head
    q, k, v = saved.q, saved.k, saved.v

    def checked() -> Call:
        call = spec.on_rows(q, k, v=v, extras=extras, **options)
        if not rounds and q.dtype.itemsize == 2 and max(q.shape[3], v.shape[3]) <= WIDEST_EXACT:
            call.problem = call.problem._replace(has_fp32_key_grads=True)
        return call

    key = "gradients of shards", spec.scalars, spec.mods, spec.deterministic, spec.backend, rounds
    tensors = q, k, v, *extras.tensors
    call = ops.known(tensors, (*key, *options.items()), make=checked)
    return ops.run_backward(call, saved, extras=extras, between=between)
