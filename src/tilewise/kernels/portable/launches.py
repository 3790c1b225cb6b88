"""Programs of one small kernel, of which numbers, too, differ from call to call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..common.operand import Gap, gaps_in
from ..common.program import Launch, Program
from ..common.workspace import Workspace


class OfMapped(Launch):
    """A launch that reads memory at addresses that it is passed as numbers, such as that of other
    processes.
    """

    __slots__ = ()
    is_guarded = False


def programs_of(kernel: Any, tuples: Mapping[str, Any], **constants: Any) -> Callable[..., Program]:
    """What makes programs of a kernel, each to be run for all arguments but the constants, and is
    asked once for each of its own arguments. `tuples` has, for each of the kernel's that is one,
    its type, or the constant that says how many numbers it has.
    """

    @functools.lru_cache(maxsize=256)
    def program_of(
        device: torch.device, programs: int, compiled_for: tuple[Any, ...] = (), **more: Any
    ) -> Program:
        """Programs differ in what the kernel is `compiled_for`, too."""
        names, numbers = kernel.arg_names, constants | more
        args: dict[str, Any] = {x: Gap(x) for x in names if x not in numbers}
        for name, kind in tuples.items():
            fields = range(numbers[kind]) if isinstance(kind, str) else kind._fields
            args[name] = getattr(kind, "_make", tuple)(Gap(f"{name}.{x}") for x in fields)
        fixed = {x: numbers[x] for x in names if x in numbers}
        launch = OfMapped(kernel, programs, args, fixed, dict(num_warps=1 if programs == 1 else 4))
        return Program([x.name for x in gaps_in(tuple(args.values()))], [launch], Workspace(device))

    return program_of
