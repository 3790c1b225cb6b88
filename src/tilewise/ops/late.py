"""Registrations with torch that wait until the module that needs them is loaded."""

from __future__ import annotations

import sys

import torch

from ..mods.compilers import gives_constant


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


_late = {"flops": False, "dtensor": False}
