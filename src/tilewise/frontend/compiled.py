"""Calls under torch.compile, as one node of Dynamo's graph.

Dynamo traces what a function calls, and a compiled graph guards at every run all that the trace
read: 230 to 290 guards for a plain call. A node is opaque to Dynamo, which guards the arguments
alone; AOTAutograd traces through it, to the operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..errors import ArgumentError
from ..ops.calls import PLAIN_TENSORS
from ..ops.schema import mark_cacheable
from ..tile.quantize import is_one_byte

Function = TypeVar("Function", bound=Callable[..., Any])
nodes: dict[str, Callable[..., Any]] = {}  # by their functions; `in_graph` tells Dynamo of them


def has_node(function: Function) -> Function:
    """Decorates a function that calls `traced`, and gives its module the node."""
    name, first = f"{function.__name__}_node", next(iter(inspect.signature(function).parameters))

    def node(**arguments: Any) -> Any:
        if type(arguments[first]) in PLAIN_TENSORS:  # Dynamo left the call, and would come back
            eager: Any = torch.compiler.disable(function)
            return eager(**arguments)
        mark_cacheable(f"{function.__module__}.{name}")
        try:
            return function(**arguments)
        except ArgumentError as error:
            # Dynamo leaves this call to eager mode, which raises the ArgumentError itself
            raise NotImplementedError(str(error)) from error

    node.__module__, node.__name__, node.__qualname__ = function.__module__, name, name  # to pickle
    function.__globals__[name] = nodes[function.__name__] = node
    return function


def fits_node(inputs: tuple[Any, Any, Any], window: Any = None) -> bool:
    """Whether a call of these q, k and v may be a node: of tensors of 16 bits or more, and numbers.
    One that writes, has a cache or draws numbers may not.
    """
    for x in inputs:
        if not isinstance(x, torch.Tensor) or is_one_byte(x):
            return False
    return not isinstance(window, torch.Tensor)
