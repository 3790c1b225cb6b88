"""What tests of attention need, ours and yours: kernels without a GPU, inputs, error budgets.

    from tilewise.testing import interpret
    interpret(my_kernel)[grid](*cpu_tensors, BLOCK=64)     # maths, masks, addresses

    from tilewise.testing import build, stats
    stats(build(my_kernel, *cpu_tensors, on="sm90", BLOCK=64))     # registers, spills, memory

Names are imported when first used: the modules behind them want numpy or Triton.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hopper import emulate
    from .interpreter import interpret, interpreting
    from .interpreter_repair import repair
    from .offline import SMEM_LIMIT, TARGETS, build, stats
    from .switch import emulator_seed, interpreter_is_on, use_emulator, use_interpreter

__all__ = [
    "SMEM_LIMIT",
    "TARGETS",
    "build",
    "emulate",
    "emulator_seed",
    "interpret",
    "interpreter_is_on",
    "interpreting",
    "repair",
    "stats",
    "use_emulator",
    "use_interpreter",
]

_HOME = {
    "SMEM_LIMIT": "offline",
    "TARGETS": "offline",
    "build": "offline",
    "emulate": "hopper",
    "emulator_seed": "switch",
    "interpret": "interpreter",
    "interpreter_is_on": "switch",
    "interpreting": "interpreter",
    "repair": "interpreter_repair",
    "stats": "offline",
    "use_emulator": "switch",
    "use_interpreter": "switch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
