"""Which backend serves a problem: an ordered tuple, asked one by one, each answering None or the
reason why not.

A backend is a package or module with `NAME`, `supports(problem, device) -> None | str`, and
`forward` and `backward`. One that can save work for calls of one shape has `prepare(problem,
scalars, q, k, v)` too, which returns `(q, k, v, extras) -> (out, lse)`.
Refusals are data: the error for a problem that nothing serves prints them all, and `tilewise info`
shows them.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import NamedTuple

import torch

from .errors import ArgumentError, Avoidable, Slower, warn_slow
from .problem import Problem
from .testing.switch import cpu_stand_ins

# In the order of preference. A module is imported when it is first asked, so that a machine without
# Triton never needs it.
BACKENDS = {
    "hopper": "tilewise.kernels.hopper",
    "portable": "tilewise.kernels.portable",
    "cpu": "tilewise.kernels.cpu",
}


UNALIGNED = Avoidable(
    "rows, heads and batches of q, k and v must start at multiples of 16 bytes, and none be "
    "expanded, for the copy engine: q.contiguous() does that"
)


class Refusal(NamedTuple):
    """Why one backend does not serve a problem."""

    backend: str
    reason: str


def load(name: str) -> ModuleType:
    """The backend's module; ImportError where its dependencies are missing."""
    return importlib.import_module(BACKENDS[name])


def ask(
    name: str,
    problem: Problem,
    device: torch.device,
    is_aligned: bool = True,
) -> str | None:
    """None if backend `name` serves the problem on `device`, else its reason."""
    try:
        module = load(name)
        reason = module.supports(problem, device)
        if (
            (reason is None or isinstance(reason, Slower))
            and module.NEEDS_ALIGNMENT
            and not is_aligned
        ):
            reason = UNALIGNED
        return reason
    except ImportError as error:
        return f"cannot be imported ({error}); install it with `pip install triton`"


def choose(
    problem: Problem,
    device: torch.device,
    backend: str | None = None,
    is_aligned: bool = True,
) -> ModuleType:
    """The first backend that serves `problem` on `device`, or the one forced by name.

    Raises NotImplementedError with every refusal if none serves the problem, and ArgumentError for
    an unknown name.
    """
    check_backend(backend)
    return _choose(problem, device, backend, is_aligned, cpu_stand_ins())


def check_backend(backend: str | None) -> None:
    """The name of a backend, or None."""
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ArgumentError(
            f"backend={backend!r} is unknown: use one of {', '.join(map(repr, BACKENDS))}, or None "
            "to choose"
        )


@functools.lru_cache(maxsize=4096)
def _choose(
    problem: Problem,
    device: torch.device,
    backend: str | None,
    is_aligned: bool,
    _stand_ins: tuple[bool, bool],
) -> ModuleType:
    names = list(BACKENDS) if backend is None else [backend]
    refusals = []
    for name in names:
        reason = ask(name, problem, device, is_aligned)
        if reason is None or (isinstance(reason, Slower) and name == backend):
            for refusal in refusals:
                if isinstance(refusal.reason, Avoidable):
                    warn_slow(f"the {refusal.backend} kernels do not serve this: {refusal.reason}")
            return load(name)
        refusals.append(Refusal(name, reason))
    lines = "\n".join(f"  {refusal.backend}: {refusal.reason}" for refusal in refusals)
    raise NotImplementedError(f"no backend serves this attention on {device}:\n{lines}")
