"""The way to a kernel that is compiled already: past Triton's look at every argument, which takes
longer than a short kernel runs.

So does building the arguments: kernels take tensors in groups, with numbers such as their strides.
But calls of one signature differ in the addresses of their tensors alone. So the arguments of the
first are kept as a `Pattern`, in which the addresses of the next are filled in. That keeps no
tensor alive: launchers take an address for a pointer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from triton import knobs

from ...problem import Extras, extras_of
from .direct import past_triton

Tensor = torch.Tensor
ALIGNMENT = 16  # bytes; that of an address, modulo them, decides what is compiled for it


def is_watched() -> bool:
    """Whether a profiler has hooked itself into Triton's launches, which then must see them."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if getattr(hook, "calls", hook):
            return True
    return False


def may_relaunch(device: int | None) -> bool:
    """Whether kernels of a device may be launched past Triton: it is current, and no profiler must
    see them.
    """
    return torch._C._cuda_getDevice() == device and not is_watched()


def relaunch(compiled: Any, programs: int, index: int, *args: Any) -> None:
    """Launches on the current stream of device `index`, which is current. `args` are all of the
    kernel's, constants too, alike in type and alignment to those that it was compiled for.
    """
    stream = torch._C._cuda_getCurrentRawStream(index)
    before = (stream, compiled.function, compiled.packed_metadata, None, None, None)
    compiled.run(programs, 1, 1, *before, *args)


def class_of(x: Tensor | int | None) -> Any:
    """What Triton compiles for, of an argument: all values of a class are served by one kernel."""
    if x is None:
        return None
    if isinstance(x, int):
        return 1 if x == 1 else (x % 16 == 0, -(2**31) <= x < 2**31)
    return x.dtype, x.data_ptr() % ALIGNMENT == 0


def apart(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The same memory as objects of which no two are one. A pattern tells tensors apart by who they
    are, and k may be q in one call and not in the next.
    """
    return [None if x is None else x.detach() for x in tensors]


def extras_apart(extras: Extras) -> Extras:
    """The same of a call's extras."""
    return extras_of(*apart(extras.tensors))


def addresses_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Where tensors lie; 0 for None."""
    return [0 if x is None else x.data_ptr() for x in tensors]


# arguments


class Pattern(NamedTuple):
    """Nested arguments with gaps, mostly for the addresses of tensors."""

    constants: list[Any]
    groups: list[Callable[[list], tuple]]  # each takes from values, constants and earlier groups

    def filled(self, values: Sequence[Any]) -> tuple:
        """The arguments with these values in their gaps."""
        values = [*values, *self.constants]
        for group in self.groups:
            values.append(group(values))
        return values[-1]


def pattern_of(args: tuple, row: Sequence[Any]) -> Pattern | None:
    """The pattern of nested arguments, with a gap for each that is in the row, which are objects of
    which no two are one. None where a tensor is not among them, such as a contiguous copy.
    """
    places = {id(x): place for place, x in enumerate(row) if x is not None}
    constants: list[Any] = []
    groups: list[list[tuple[str, int]]] = []
    try:
        _collect(args, places, constants, groups)
    except KeyError:
        return None
    starts = {"value": 0, "constant": len(row), "group": len(row) + len(constants)}
    taken = [[starts[kind] + n for kind, n in group] for group in groups]
    return Pattern(constants, [_taking(places) for places in taken])


def _collect(args: tuple, places: dict[int, int], constants: list, groups: list) -> None:
    """Where the items of a tuple come from; those of the tuples in it are groups before its own."""
    found = []
    for item in args:
        if id(item) in places or isinstance(item, torch.Tensor):
            found.append(("value", places[id(item)]))
        elif isinstance(item, tuple) and has_tensors(item):
            _collect(item, places, constants, groups)
            found.append(("group", len(groups) - 1))
        else:
            found.append(("constant", len(constants)))
            constants.append(item)
    groups.append(found)


def has_tensors(args: tuple) -> bool:
    """Whether tensors are among nested arguments."""
    return any(
        has_tensors(x) if isinstance(x, tuple) else isinstance(x, torch.Tensor) for x in args
    )


def _taking(places: list[int]) -> Callable[[list], tuple]:
    """What takes these of its argument: of several items, at the speed of C."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple([values[place] for place in places])


class Again(NamedTuple):
    """A kernel without descriptors, to be launched for other tensors of the same signature."""

    kernel: Callable[..., None]
    args: Pattern  # constants too

    def launch(self, stream: int, values: Sequence[Any]) -> None:
        """On a stream of the current device, with these values in the gaps of its arguments."""
        self.kernel(stream, *self.args.filled(values))


class Launched(NamedTuple):
    """A launch as it went through Triton's launcher; a grid of no programs has no kernel."""

    compiled: Any
    programs: int
    args: tuple  # constants too


def again_of(launches: Sequence[Launched], row: Sequence[Any]) -> list[Again] | None:
    """The launches again, of tensors in the order of the row; None where one may not be: on AMD,
    with a tensor that is not in the row, or without a compiled kernel.
    """
    patterns = [pattern_of(x.args, row) for x in launches]
    if torch.version.hip is not None or None in patterns:
        return None
    if any(x.compiled is None for x in launches):
        return None
    kernels = [past_triton(x.compiled, x.programs) for x in launches]
    return [Again(kernel, args) for kernel, args in zip(kernels, patterns) if args is not None]
