"""Operators without a gradient skip torch's autograd kernel, which calls the dispatcher again with
all arguments and takes as long as the call itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from .calls import PLAIN_TENSORS, has_lazy, needs_grad
from .schema import LIBRARY, flat


def straight(
    name: str,
    before: int,
    kernel: Callable,
    backward: Callable,
    setup_context: Callable | None = None,
) -> None:
    """Registers an operator's kernel for autograd, too, where plain tensors require no gradient;
    others use the registered formula. `before` counts the tensors before the extras.
    """
    try:
        from torch._library.autograd import Info, make_autograd_impl
    except ImportError:  # private names may move; then torch's kernel serves all
        return
    operator = getattr(torch.ops.tilewise, name).default
    differentiable = make_autograd_impl(operator, Info(backward, setup_context))

    def call(keyset: Any, *args: Any) -> Any:
        if is_plain(flat(args, before)[0]):
            return kernel(args)
        return differentiable(keyset, *args)

    for key in ("AutogradCPU", "AutogradCUDA"):
        LIBRARY.impl(name, call, key, with_keyset=True)


def is_plain(tensors: tuple) -> bool:
    """Whether the operator may skip the dispatcher: no gradient, mode, transform, subclass
    or lazily negated tensor.
    """
    if torch._C._len_torch_dispatch_stack() or forward_ad._current_level >= 0:
        return False
    if peek_interpreter_stack() is not None or not PLAIN_TENSORS.issuperset(map(type, tensors)):
        return False
    return not (needs_grad(tensors) or has_lazy(tensors))
