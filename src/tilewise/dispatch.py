"""Which backend serves a problem: an ordered tuple, asked one by one, each answering None or the
reason why not.

A backend is a package or module with `NAME`, `supports(problem, device) -> None | str`, `forward`
and `backward`. Refusals are data: the error for a problem that nothing serves prints them all, and
`tilewise info` shows them.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import NamedTuple

import torch

from .errors import ArgumentError
from .problem import Problem
from .testing.switch import interpreter_is_on

# In the order of preference. A module is imported when it is first asked, so that a machine without
# Triton never needs it.
BACKENDS = {
    "portable": "tilewise.kernels.portable",
    "cpu": "tilewise.kernels.cpu",
}


class Refusal(NamedTuple):
    """Why one backend does not serve a problem."""

    backend: str
    reason: str


def load(name: str) -> ModuleType:
    """The backend's module; ImportError where its dependencies are missing."""
    return importlib.import_module(BACKENDS[name])


def ask(name: str, problem: Problem, device: torch.device) -> str | None:
    """None if backend `name` serves the problem on `device`, else its reason."""
    try:
        return load(name).supports(problem, device)
    except ImportError as error:
        return f"cannot be imported ({error}); install it with `pip install triton`"


def choose(problem: Problem, device: torch.device, backend: str | None = None) -> ModuleType:
    """The first backend that serves `problem` on `device`, or the one forced by name.

    Raises NotImplementedError with every refusal if none does, and ArgumentError for an unknown
    name.
    """
    if backend is not None and backend not in BACKENDS:
        raise ArgumentError(
            f"backend={backend!r} is unknown: use one of {', '.join(map(repr, BACKENDS))}, or None "
            "to choose"
        )
    return _choose(problem, device, backend, interpreter_is_on())


@functools.lru_cache(maxsize=4096)
def _choose(
    problem: Problem, device: torch.device, backend: str | None, _interpreted: bool
) -> ModuleType:
    refusals = []
    for name in BACKENDS if backend is None else [backend]:
        reason = ask(name, problem, device)
        if reason is None:
            return load(name)
        refusals.append(Refusal(name, reason))
    lines = "\n".join(f"  {refusal.backend}: {refusal.reason}" for refusal in refusals)
    raise NotImplementedError(f"no backend serves this attention on {device}:\n{lines}")
