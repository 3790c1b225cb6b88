"""What backwards read and return, as plans have it, and where callers launch in between."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ...problem import Extras, Grads, Problem, Saved
from .operand import operand_of
from .outputs import empty_grads
from .program import Mark

Tensor = torch.Tensor
BACKWARD = (*Saved._fields, *Extras._fields)  # what a call passes, in this order

# Of a caller's `Between`
BEFORE_KEYS = Mark(lambda between, _: between.before_keys())
AFTER_KEYS = Mark(lambda between, grads: between.after_keys(Grads._make(grads)))


def records_of(operands: dict[str, Any]) -> tuple[Any, Extras]:
    """The operands of a backward as `Saved` and `Extras`."""
    saved = Saved(**{name: operands[name] for name in Saved._fields})
    return saved, Extras(**{name: operands[name] for name in Extras._fields})


def grads_of(problem: Problem, saved: Saved, extras: Any, cleared: Collection[str] = ()) -> Any:
    """The gradients, as operands; some are `cleared`, by name."""
    operands = saved.q, saved.k, saved.v, extras.sinks, extras.bias
    q, k, v, sinks, bias = (x and x.new("meta") for x in operands)
    grads = empty_grads(problem, q, k, v, Extras(sinks=sinks, bias=bias))
    named, device = zip(Grads._fields, grads), saved.q.device
    return Grads._make(operand_of(name, x, device, name in cleared) for name, x in named)


def sum_sinks(dsinks: Tensor, parts: Tensor) -> None:
    """The gradient of the sinks, of which each block of queries has a part."""
    dsinks.copy_(parts.sum((0, 2)))
