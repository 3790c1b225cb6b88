"""Which method serves a call, and the call itself, forward and backward."""

from __future__ import annotations

import torch

from ...errors import ArgumentError
from ...problem import Grads, Saved
from ..layouts.layout import Layout
from ..methods import heads, ring, stream, whole
from ..methods.call_spec import CallSpec
from ..transport.arena import Arena, arena_of
from .plan import plan

Tensor = torch.Tensor
METHODS = {"heads": heads, "stream": stream, "ring": ring}
ASKED_FOR = ("ring",)  # by name, and never chosen


def arena_for(layout: Layout, device: torch.device) -> Arena | None:
    """What the ranks of a layout exchange tensors through; None where there is one rank."""
    return None if layout.ranks == 1 else arena_of(layout.group, device)


def attend(
    arena: Arena | None,
    spec: CallSpec,
    method: str | None,
    inputs: tuple[Tensor, Tensor, Tensor],
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`out` and, where it is asked for, `lse` of a rank's rows, differentiable."""
    return attend_by(choose(spec, method, *inputs), arena, spec, inputs, return_lse)


def attend_by(
    chosen: str,
    arena: Arena | None,
    spec: CallSpec,
    inputs: tuple[Tensor, Tensor, Tensor],
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attends by a method that was chosen."""
    if arena is None:
        return whole.alone(spec, *inputs)
    if chosen == "heads":
        return heads.attend(arena, spec, *inputs, return_lse)
    return METHODS[chosen].attend(arena, spec, *inputs)


def backward(arena: Arena | None, spec: CallSpec, method: str | None, saved: Saved) -> Grads:
    """The gradients of `attend`, of its inputs and outputs."""
    chosen = choose(spec, method, saved.q, saved.k, saved.v)
    if arena is None:
        return whole.alone_backward(spec, saved)
    return METHODS[chosen].backward(arena, spec, saved)


def choose(spec: CallSpec, method: str | None, q: Tensor, k: Tensor, v: Tensor) -> str:
    """The method of a call; NotImplementedError with what can where `method` cannot."""
    if method is not None and method not in METHODS:
        raise ArgumentError(
            f"method={method!r}: it must be {' or '.join(map(repr, METHODS))}, or None to choose"
        )
    nheads, nheads_k = q.shape[2], k.shape[2]
    reasons = {name: x.supports(spec, nheads, nheads_k) for name, x in METHODS.items()}
    serves = [name for name, reason in reasons.items() if reason is None]
    if method is not None:
        if reasons[method] is not None:
            others = " or ".join(f'method="{name}"' for name in serves)
            raise NotImplementedError(
                f"method={method!r}: {reasons[method]}; {others} supports this"
            )
        return method
    serves = [name for name in serves if name not in ASKED_FOR]
    if len(serves) == 1:
        return serves[0]
    found = plan(
        *(spec.layout, nheads, nheads_k, q.shape[3], v.shape[3]),
        batch=q.shape[0],
        causal=spec.causal is not False,
        window=spec.sides,
        itemsize=q.itemsize,
        learns=spec.learns,
    )
    return found.method
