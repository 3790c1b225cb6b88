"""Hints to torch.compile about functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def gives_constant(function: Function) -> Function:
    """A compiler takes what the function gives, and traces none of it."""
    # As torch.compiler.assume_constant_result does, whose import is that of torch._dynamo
    vars(function)["_dynamo_marked_constant"] = True
    return function
