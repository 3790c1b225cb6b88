"""What is registered with torch once somebody has loaded the module that needs it."""

from __future__ import annotations

import sys

import torch


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


# What torch.compiler.assume_constant_result sets, but its import is torch._dynamo's. Dynamo, which
# cannot trace a registration, then runs it while it traces.
register_late._dynamo_marked_constant = True
_late = {"flops": False, "dtensor": False}
