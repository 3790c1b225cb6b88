"""Calls under torch.compile, as one node of Dynamo's graph.

Dynamo traces what a function calls, and a compiled graph guards at every run all that the trace
read: 246 guards for a plain call, a fifth of its time on a CPU. A node is opaque to Dynamo, which
guards the caller's arguments alone, 71 guards; AOTAutograd traces through it, to the operator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError

nodes: dict[str, Callable[..., Any]] = {}  # by name; `in_graph` tells Dynamo of them


def one_node(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function of q, k, v and options as a node, which has this name in the function's module.
    The options are tensors, numbers, flags and texts.
    """

    def node(q: Any, k: Any, v: Any, **options: Any) -> Any:
        mark_cacheable(f"{function.__module__}.{name}")
        try:
            return function(q, k, v, **options)
        except ArgumentError as error:
            # Dynamo leaves this call to eager mode, which raises the ArgumentError itself
            raise NotImplementedError(str(error)) from error

    node.__module__, node.__name__, node.__qualname__ = function.__module__, name, name  # to pickle
    nodes[name] = node
    return node


def mark_cacheable(name: str) -> None:
    """Tells AOTAutograd that a graph with this function may be cached on disk: what it computes is
    said by its arguments.
    """
    version = sys.modules[name.partition(".")[0]].__version__
    try:
        from torch._inductor import config

        config.unsafe_marked_cacheable_functions.setdefault(name, version)
    except (ImportError, AttributeError):  # private names may move; then each process compiles
        return
