"""What forwards and backwards read and return, as plans have it, and where callers launch in
between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from ...problem import Between, Extras, Grads, Problem, Saved
from ...tuning.select import overrides
from .operand import names_of, operand_of
from .outputs import empty_grads, empty_out
from .program import Mark, Planned, Program
from .quantized import Quantized

Tensor = torch.Tensor
# What a call passes, in this order
FORWARD = ("q", "k", "v", *Extras._fields)
BACKWARD = (*Saved._fields, *Extras._fields)
FP8_FORWARD = ("q", "k", "v_t", "q_scale", "k_scale", "v_scale", "v_mean", "v_drift")
FP8_FORWARD += Extras._fields

# Of a caller's `Between`
BEFORE_KEYS = Mark(lambda between, _: between.before_keys())
AFTER_KEYS = Mark(lambda between, grads: between.after_keys(Grads._make(grads)))


def forward_of(plan: Callable[..., Program]) -> Callable[..., tuple[Any, ...]]:
    """The forward of all calls of one signature, `(q, k, v, extras) -> (out, lse)`."""
    run = Planned(FORWARD, plan)

    def forward(q: Any, k: Any, v: Any, extras: Extras) -> tuple[Any, ...]:
        tensors = q, k, v, *extras[:-1], *extras[-1]
        program = run.program  # of a warm call, which asks `Planned` for nothing else
        return run(tensors) if program is None or overrides else program(tensors)

    return forward


def fp8_forward_of(plan: Callable[..., Program]) -> Callable[..., tuple[Any, ...]]:
    """The forward in FP8 of all calls of one signature, `(quantized, extras) -> (out, lse)`."""
    run = Planned(FP8_FORWARD, plan)

    def forward(x: Quantized, extras: Extras) -> tuple[Any, ...]:
        return run((x.q, x.k, x.v_t, *x.scales, x.v_mean, x.v_drift, *extras.tensors))

    return forward


def backward_of(plan: Callable[..., Program]) -> Callable[..., Grads]:
    """The backward of one signature, `(saved, extras, between=None) -> Grads`."""
    run = Planned(BACKWARD, plan)

    def gradients(saved: Saved, extras: Extras, between: Between | None = None) -> Grads:
        tensors = *saved, *extras[:-1], *extras[-1]
        program = None if overrides else run.program  # as of a forward
        return Grads._make((program or run)(tensors, between))

    return gradients


def outputs_of(problem: Problem, q: Any, dtype: torch.dtype | None = None) -> list[Any]:
    """`out`, in the dtype of q or in `dtype`, and `lse`, as operands."""
    named = zip(("out", "lse"), empty_out(q.new("meta"), problem.headdim_v, dtype))
    return [operand_of(name, x, q.device) for name, x in named]


def names_with(fields: tuple[str, ...], extras: Extras) -> tuple[str, ...]:
    """The names of a call's tensors, of which some of the extras may be several."""
    return names_of(fields, len(fields) - len(Extras._fields) + len(extras.tensors))


def records_of(operands: dict[str, Any]) -> tuple[Any, Extras]:
    """The operands of a backward as `Saved` and `Extras`."""
    saved = Saved(**{name: operands[name] for name in Saved._fields})
    return saved, Extras(**{name: operands[name] for name in Extras._fields})


def grads_of(problem: Problem, saved: Saved, extras: Any, cleared: Collection[str] = ()) -> Any:
    """The gradients, as operands; some are `cleared`, by name."""
    operands = saved.q, saved.k, saved.v, extras.sinks, extras.bias
    q, k, v, sinks, bias = (x and x.new("meta") for x in operands)
    grads = empty_grads(problem, q, k, v, Extras(sinks=sinks, bias=bias))
    named, device = grads._asdict().items(), saved.q.device
    return Grads(**{name: operand_of(name, x, device, name in cleared) for name, x in named})


def sum_sinks(dsinks: Tensor, parts: Tensor) -> None:
    """The gradient of the sinks, of which each block of queries has a part."""
    dsinks.copy_(parts.sum((0, 2)))
