"""Which method serves a call, and the call itself, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...errors import ArgumentError
from ...ops.calls import eager_apply, resolved
from ...problem import INPUTS, Grads, Saved
from ..layouts.layout import Layout
from ..methods import heads, ring, stream, whole
from ..methods.grads import LEARNED
from ..methods.shard_call import ShardCall
from ..transport.arena import Arena, arena_of, reporting
from .plan import plan

Tensor = torch.Tensor
METHODS = {"heads": heads, "stream": stream, "ring": ring}
BY_NAME = ("ring",)  # never chosen by the model


def arena_for(layout: Layout, device: torch.device) -> Arena | None:
    """Returns the arena of a layout's ranks; None where there is one rank."""
    return None if layout.ranks == 1 else arena_of(layout.group, device)


class _Attention(torch.autograd.Function):
    """Attention of a rank's rows by a method whose backward takes what the forward was given."""

    @staticmethod
    def forward(ctx: Any, module: Any, arena: Arena, spec: ShardCall, q, k, v, learned):
        out, lse = module.forward(arena, spec, q=q, k=k, v=v)
        ctx.module, ctx.arena, ctx.spec = module, arena, spec
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout, dlse):  # pyright: ignore[reportIncompatibleMethodOverride]
        with reporting(ctx.spec.layout):
            dout, dlse = resolved((dout, dlse))
            q, k, v, out, lse = ctx.saved_tensors
            saved = Saved(dout, dlse, q=q, k=k, v=v, out=out, lse=lse)
            grads = ctx.module.backward(ctx.arena, ctx.spec, saved)
        return None, None, None, *grads[: INPUTS + 1]


_apply_eagerly = eager_apply(_Attention)


def attend(
    arena: Any, spec: ShardCall, q: Tensor, k: Tensor, v: Tensor, *, method: str, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Computes `out` and, on request, `lse` of a rank's rows, by a method that was chosen."""
    if arena is None:
        return whole.alone(spec, q, k=k, v=v)
    if method == "heads":
        return heads.attend(arena, spec, q=q, k=k, v=v, return_lse=return_lse)
    module = stream if method == "stream" else ring
    if spec.prepared is not None and not spec.learns:
        return module.forward(arena, spec, q=q, k=k, v=v)
    apply = _Attention.apply if spec.prepared is None else _apply_eagerly
    return apply(module, arena, spec, q, k, v, getattr(spec.extras, LEARNED))


def backward(arena: Arena | None, spec: ShardCall, saved: Saved, *, method: str) -> Grads:
    """Computes the gradients of `attend`, of its inputs and outputs."""
    if arena is None:
        return whole.alone_backward(spec, saved)
    return METHODS[method].backward(arena, spec, saved=saved)


def choose(
    arena: Arena | None, spec: ShardCall, q: Tensor, k: Tensor, v: Tensor, *, method: str | None
) -> str:
    """Returns the method of a call, or raises NotImplementedError with those that support it."""
    if method is not None and method not in METHODS:
        raise ArgumentError(
            f"method={method!r}: it must be {' or '.join(map(repr, METHODS))}, or None to choose"
        )
    nheads, nheads_k = q.shape[2], k.shape[2]
    reasons = {name: x.supports(spec, nheads, nheads_k) for name, x in METHODS.items()}
    serves = [name for name, reason in reasons.items() if reason is None]
    if method is not None:
        if reasons[method] is not None:
            remedy = " or ".join(f'method="{name}"' for name in serves)
            raise NotImplementedError(
                f"method={method!r}: {reasons[method]}; {remedy} supports this"
            )
        return method
    serves = [name for name in serves if name not in BY_NAME]
    if len(serves) == 1:
        return serves[0]
    if arena is not None and arena.nodes is not None:
        return "stream"  # the estimates are of one node; heads would move more, and hide less
    estimate = plan(
        spec.layout,
        nheads,
        nheads_k=nheads_k,
        headdim=q.shape[3],
        headdim_v=v.shape[3],
        batch=q.shape[0],
        causal=False,  # the band says it
        window=(spec.band.left, spec.band.right),
        itemsize=q.itemsize,
        learns=spec.learns,
    )
    return estimate.method
