"""Tools for tests of attention: kernels without a GPU, inputs, error budgets.

Example::

    from tilewise.testing import interpret
    interpret(my_kernel)[grid](*cpu_tensors, BLOCK=64)     # maths, masks, addresses

    from tilewise.testing import build, stats
    stats(build(my_kernel, *cpu_tensors, on="sm90", BLOCK=64))     # registers, spills, memory

Names are imported on first use: the modules behind them need numpy or Triton.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gluon_emulator.hopper import emulate
    from gluon_emulator.triton.interpreter import interpret, interpreting
    from gluon_emulator.triton.repair import repair

    from ..emulation import emulator_seed, interpreter_is_on, use_emulator, use_interpreter
    from .offline import SMEM_LIMIT, TARGETS, build, stats

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

_MODULES = {
    "tilewise.testing.offline": ("SMEM_LIMIT", "TARGETS", "build", "stats"),
    "tilewise.emulation": ("emulator_seed", "interpreter_is_on", "use_emulator", "use_interpreter"),
    "gluon_emulator.hopper": ("emulate",),
    "gluon_emulator.triton.interpreter": ("interpret", "interpreting"),
    "gluon_emulator.triton.repair": ("repair",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
