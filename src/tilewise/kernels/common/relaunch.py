"""Launches of compiled kernels without Triton's front end, which inspects every argument and takes
longer than a short kernel runs.

So does building the arguments: kernels take tensors in groups, with numbers such as their strides.
But calls of one signature differ in the addresses of their tensors alone. So the arguments of the
first call are stored as a `Pattern`, into which the addresses of later calls are filled. That keeps
no tensor alive: launchers take an address for a pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from triton import knobs

from ...problem import Extras, extras_of
from . import direct
from .alignment import ALIGNMENT
from .operand import Gap

Tensor = torch.Tensor


def has_launch_hooks() -> bool:
    """Whether a profiler has set Triton's launch hooks, which must then be called."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if getattr(hook, "calls", hook):
            return True
    return False


def may_relaunch(device: int | None) -> bool:
    """Whether kernels may be launched without Triton's front end: the device is current, and no
    profiler has set launch hooks.
    """
    return torch._C._cuda_getDevice() == device and not has_launch_hooks()


def relaunch(compiled: Any, programs: int, index: int, *args: Any) -> None:
    """Launches on the current stream of device `index`, which is current. `args` are all of the
    kernel's, constants too, with the types and alignment that it was compiled for.
    """
    stream = torch._C._cuda_getCurrentRawStream(index)
    before = (stream, compiled.function, compiled.packed_metadata, None, None, None)
    compiled.run(programs, 1, 1, *before, *args)


def class_of(x: Tensor | int | None) -> Any:
    """The specialization class of an argument: one compiled kernel serves all its values."""
    if x is None:
        return None
    if isinstance(x, int):
        return 1 if x == 1 else (x % 16 == 0, -(2**31) <= x < 2**31)
    return x.dtype, x.data_ptr() % ALIGNMENT == 0


def distinct_views(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Distinct tensor objects over the same memory. A pattern identifies tensors by `id`, and q and
    k may be one object in one call and two in the next.
    """
    return [None if x is None else x.detach() for x in tensors]


def distinct_extras(extras: Extras) -> Extras:
    """`distinct_views` of a call's extras."""
    return extras_of(distinct_views(extras.tensors))


def addresses_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """The addresses of tensors; 0 for None."""
    return [0 if x is None else x.data_ptr() for x in tensors]


# arguments


Pattern = Callable[[Sequence[Any]], tuple]  # makes arguments of a row, mostly of addresses


def pattern_of(args: tuple, row: Sequence[Any]) -> Pattern | None:
    """The pattern of nested arguments, with a gap for each that is in `row`, whose objects are
    distinct. None where a tensor is not in `row`, such as a contiguous copy.

    It is compiled, as an expression that makes the tuples: looking up what belongs where would take
    four times as long.
    """
    gaps = {id(x): f"row[{place}]" for place, x in enumerate(row) if x is not None}
    constants: dict[str, Any] = {}
    try:
        text = _expression(args, gaps, constants)
    except KeyError:
        return None
    return eval(f"lambda row: {text}", constants)


def _expression(item: Any, gaps: dict[int, str], constants: dict[str, Any]) -> str:
    """An argument in Python, of gaps and constants."""
    if id(item) in gaps or isinstance(item, torch.Tensor):
        return gaps[id(item)]
    if isinstance(item, tuple) and has_gaps(item, gaps):
        return "(" + "".join(_expression(x, gaps, constants) + ", " for x in item) + ")"
    name = f"constant{len(constants)}"
    constants[name] = item
    return name


def has_gaps(args: tuple, gaps: dict[int, Any]) -> bool:
    """Whether tensors or other gaps are among nested arguments."""
    return any(
        has_gaps(x, gaps) if isinstance(x, tuple) and id(x) not in gaps
        else isinstance(x, torch.Tensor) or id(x) in gaps
        for x in args
    )  # fmt: skip


def relaunch_of(
    kernel: Any, args: tuple, row: Sequence[Any], may_pack: bool = True
) -> direct.Relaunch | None:
    """`direct.relaunch_of` for arguments with objects that are in `row`; None where a tensor is
    not in `row`.
    """
    gaps = {id(x): Gap(f"gap{place}") for place, x in enumerate(row) if x is not None}
    try:
        args = _with_gaps(args, gaps)
    except KeyError:
        return None
    return direct.relaunch_of(kernel, args, [f"gap{n}" for n in range(len(row))], may_pack)


def _with_gaps(item: Any, gaps: dict[int, Gap]) -> Any:
    """Nested arguments with gaps in the place of objects."""
    if id(item) in gaps or isinstance(item, torch.Tensor):
        return gaps[id(item)]
    if isinstance(item, tuple) and has_gaps(item, gaps):
        return tuple([_with_gaps(x, gaps) for x in item])
    return item


class Launched(NamedTuple):
    """A launch through Triton's launcher; an empty grid has no kernel."""

    compiled: Any
    programs: int
    args: tuple  # constants too


def relaunches_of(launches: Sequence[Launched], row: Sequence[Any]) -> list[direct.Relaunch] | None:
    """Relaunches for tensors in the order of `row`; None on AMD, with a tensor that is not in
    `row`, or without a compiled kernel.
    """
    if torch.version.hip is not None or any(x.compiled is None for x in launches):
        return None
    kernels = [direct.past_triton(x.compiled, x.programs) for x in launches]
    calls = [relaunch_of(kernel, x.args, row) for kernel, x in zip(kernels, launches)]
    return None if None in calls else [call for call in calls if call is not None]
