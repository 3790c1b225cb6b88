"""Has the Python that Inductor generates call an operator's kernel and not the operator: there is
nothing left to dispatch, and torch converts 26 arguments in as much time as a launch takes.

Imported only where Inductor is, by the first operator that it traces.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._inductor import ir, lowering
from torch._inductor.virtualized import V
from torch._library.utils import get_layout_constraint_tag
from torch.utils import _pytree as pytree


class DirectCall(ir.FallbackKernel):
    """An operator's call, which the generated Python makes by another name."""

    def set_python_kernel_name(self, python_kernel_name: str | None) -> None:
        if not V.graph.cpp_wrapper:  # C++ knows operators alone
            name = str(self.op_overload).split(".")[1]
            python_kernel_name = f"torch.ops.tilewise.direct.{name}"
        super().set_python_kernel_name(python_kernel_name)


@functools.cache
def lower(name: str) -> None:
    """Registers with Inductor what it does by itself, but for the class of the call."""
    operator = getattr(torch.ops.tilewise, name).default
    constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(operator))
    lowering.make_fallback(operator, layout_constraint=constraint, warn=False)

    def lowered(*args: Any, **named: Any) -> Any:
        outputs = DirectCall.create(operator, *args, **named)
        return pytree.tree_map_only(ir.IRNode, ir.TensorBox.create, outputs)

    lowering.register_lowering(operator, type_promotion_kind=None)(lowered)
