"""Keys travel, queries stay: each rank pulls the keys and values that its queries see, whole and in
the order of the sequence, so that nothing is merged and no row is rounded twice.

Backward, each rank has a part of the gradient of every key that its queries saw: see
`stream_backward`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...ops.calls import eager_apply, resolved
from ...problem import Saved
from ..transport.arena import reporting
from ..transport.halves import Arena
from . import one_launch, packed_runs, placed, rows
from .call_spec import CallSpec
from .pulled_keys import pull_keys
from .stream_backward import backward

Tensor = torch.Tensor


def supports(spec: CallSpec, nheads: int, nheads_k: int) -> str | None:
    """None: any number of heads, ranks and tokens, and every feature that is checked before."""
    return None


def attend(
    arena: Arena, spec: CallSpec, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`out` and `lse` of a rank's rows."""
    if spec.found is None:
        return _Stream.apply(arena, spec, q, k, v, spec.sinks)
    if spec.learns:
        return _apply_eagerly(arena, spec, q, k, v, spec.sinks)
    return _forward(arena, spec, q, k, v)


def _forward(
    arena: Arena, spec: CallSpec, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    if one_launch.serves(arena, spec, q, k, v):
        return one_launch.attend(arena, spec, q, k, v)
    out, lse = _attend(arena, spec, q, k, v)
    arena.settle(out, lse)
    return out, lse


def by_runs(spec: CallSpec, q: Tensor) -> ModuleType:
    """What computes runs of rows: a call for each, or one for all."""
    return packed_runs if packed_runs.serves(spec, q) else rows


class _Stream(torch.autograd.Function):
    """Attention of a rank's queries to pulled keys."""

    @staticmethod
    def forward(ctx: Any, arena: Arena, spec: CallSpec, q, k, v, sinks):
        out, lse = _forward(arena, spec, q, k, v)
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


_apply_eagerly = eager_apply(_Stream)


def _attend(arena: Arena, spec: CallSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`out` and `lse`, in launches that begin after copies."""
    backend = rows.backend_of_runs(spec, q, k, v) if spec.bitwise else spec.backend
    is_placed = spec.is_modified or (spec.bitwise and backend is None)
    way = by_runs(spec, q)
    signature = f"attention (stream): {spec.signature}"
    reads_all = is_placed or packed_runs.reads_between(spec, q)
    keys = pull_keys(arena, spec, k, v, signature, reads_all)
    if is_placed:
        keys.arrive_all()
        return placed.attend(spec, q, keys.k, keys.v)
    return way.attend(spec, q, keys, backend)
