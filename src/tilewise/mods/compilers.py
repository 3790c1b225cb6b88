"""Hints to torch.compile about functions, and about sizes that it does not know: torch's unbacked
ones, which depend on data or were named by `mark_unbacked`, and may decide nothing in a trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Tensor = torch.Tensor
Function = TypeVar("Function", bound=Callable[..., object])


def gives_constant(function: Function) -> Function:
    """A compiler takes what the function gives, and traces none of it."""
    # As torch.compiler.assume_constant_result does, whose import is that of torch._dynamo
    vars(function)["_dynamo_marked_constant"] = True
    return function


def share_batch(*tensors: Tensor | None) -> None:
    """Has a compiler take first dimensions that it does not know for one, which the program then
    checks when it runs; all others are compared where they are checked.
    """
    if not torch.compiler.is_compiling():
        return
    from torch.fx.experimental.symbolic_shapes import guard_or_true, statically_known_true

    check = torch._check  # pyright: ignore
    sizes = [x.shape[0] for x in tensors if isinstance(x, Tensor) and x.dim()]
    for size in sizes[1:]:
        is_one = statically_known_true(size == 1) or statically_known_true(sizes[0] == 1)
        if not is_one and guard_or_true(size == sizes[0]):
            check(size == sizes[0])


def holds(condition: Any, otherwise: bool) -> bool:
    """Whether a comparison holds; `otherwise` where a compiler does not know."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    return (guard_or_true if otherwise else guard_or_false)(condition)
