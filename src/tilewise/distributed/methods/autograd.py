"""The autograd function of methods whose backward takes what the forward was given."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...ops.calls import eager_apply, resolved
from ...problem import Saved
from ..transport.arena import Arena, reporting
from .call_spec import CallSpec

Tensor = torch.Tensor


class Attention(torch.autograd.Function):
    """Attention of a rank's rows by functions of a method."""

    @staticmethod
    def forward(ctx: Any, forward, backward, arena, spec, q, k, v, sinks):
        out, lse = forward(arena, spec, q, k, v)
        ctx.backward_of_method, ctx.arena, ctx.spec = backward, arena, spec
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout, dlse):  # pyright: ignore[reportIncompatibleMethodOverride]
        with reporting(ctx.spec.layout):
            saved = Saved(*resolved((dout, dlse)), *ctx.saved_tensors)
            grads = ctx.backward_of_method(ctx.arena, ctx.spec, saved)
        return None, None, None, None, grads.dq, grads.dk, grads.dv, grads.dsinks


_apply_eagerly = eager_apply(Attention)


def attend(
    forward, backward, arena: Arena, spec: CallSpec, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` by a method's `forward`, differentiable by its `backward`."""
    apply = Attention.apply if spec.prepared is None else _apply_eagerly
    return apply(forward, backward, arena, spec, q, k, v, spec.extras.sinks)
