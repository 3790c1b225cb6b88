"""What `attention` uses and most calls do not need: registrations with torch that wait until the
module that needs them is loaded, and `captured_grads.gradients`, which `ops/__init__` puts here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch._C._functorch import TransformType, get_interpreter_stack

from ..mods.compilers import gives_constant
from ..problem import Call, Extras, Saved

Tensor = torch.Tensor
captured_gradients: Callable[[Call, Sequence[bool], Saved, Extras], tuple[Tensor | None, ...]]


@gives_constant  # Dynamo, which cannot trace a registration, runs it while it traces
def register_late() -> None:
    """The FLOP formulas and the DTensor rules, once their modules are loaded: importing those costs
    more than all of tilewise.
    """
    if not _late["flops"] and "torch.utils.flop_counter" in sys.modules:
        _late["flops"] = True
        from . import flops

        flops.register(torch.ops.tilewise)
    if not _late["dtensor"] and "torch.distributed.tensor" in sys.modules:
        _late["dtensor"] = True
        from . import sharding

        sharding.register()


@gives_constant
def wants_gradient() -> bool:
    """Inside functorch's grad, vjp or jacrev, which operators of torch.library do not support."""
    return any(x.key() == TransformType.Grad for x in get_interpreter_stack() or ())


_late = {"flops": False, "dtensor": False}
