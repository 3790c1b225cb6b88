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
    """`program_of` a kernel with these constants, which is asked once for each of its arguments."""
    plan = functools.partial(program_of, kernel, tuples, **constants)
    return functools.lru_cache(maxsize=256)(plan)


def program_of(
    kernel: Any,
    tuples: Mapping[str, Any],
    device: torch.device,
    programs: int,
    compiled_for: tuple[Any, ...] = (),
    **constants: Any,
) -> Program:
    """A program to be run for all arguments of a kernel but the constants. `tuples` has, for each
    argument that is one, its type, or the constant that says how many numbers it has. Programs
    differ in what the kernel is `compiled_for`, too.
    """
    names = kernel.arg_names
    args: dict[str, Any] = {x: Gap(x) for x in names if x not in constants}
    for name, kind in tuples.items():
        fields = range(constants[kind]) if isinstance(kind, str) else kind._fields
        args[name] = getattr(kind, "_make", tuple)(Gap(f"{name}.{x}") for x in fields)
    constants = {x: constants[x] for x in names if x in constants}
    launch = OfMapped(kernel, programs, args, constants, dict(num_warps=1 if programs == 1 else 4))
    return Program([x.name for x in gaps_in(tuple(args.values()))], [launch], Workspace(device))
