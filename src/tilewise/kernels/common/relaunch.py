"""The way to a kernel that is compiled already: past Triton's look at every argument, which takes
longer than a short kernel runs.

So does building the arguments: kernels take tensors in groups, with numbers such as their strides.
But calls of one shape differ in the addresses of their tensors, and at times in their strides. So
what a launch needs is kept under the `look` of the tensors, with its arguments as a `Pattern` in
which the addresses of the next tensors are filled in. That keeps no tensor alive: launchers take an
address for a pointer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton import knobs

from ...problem import Extras, extras_of

Tensor = torch.Tensor
ALIGNMENT = 16  # bytes; that of an address, modulo them, decides what is compiled for it


def is_watched() -> bool:
    """Whether a profiler has hooked itself into Triton's launches, which then must see them."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return any(getattr(hook, "calls", hook) for hook in hooks)


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


# what tensors look like


def look_of(tensors: tuple[Tensor | None, ...]) -> tuple[list[int], tuple]:
    """Where tensors lie, and all else that may differ between tensors of one shape, dtype and
    device: strides and alignment.

    >>> x = torch.zeros(4, 4)
    >>> look_of((x, None))[1] == look_of((x.clone(), None))[1] != look_of((x.T, None))[1]
    True
    """
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    strides = [None if x is None else x.stride() for x in tensors]
    return addresses, (*strides, *[address % ALIGNMENT for address in addresses])


def full_look_of(tensors: tuple[Tensor | None, ...]) -> tuple[list[int], tuple]:
    """The same of tensors of any shapes, dtypes and devices."""
    addresses, look = look_of(tensors)
    kinds = [None if x is None else (x.shape, x.dtype, x.device) for x in tensors]
    return addresses, (*kinds, *look)


def apart(tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The same memory as objects of which no two are one. A pattern tells tensors apart by who they
    are, and k may be q in one call and not in the next.
    """
    return [None if x is None else x.detach() for x in tensors]


def extras_apart(extras: Extras) -> Extras:
    """The same of a call's extras."""
    return extras_of(*apart(extras.tensors))


# arguments


class Pattern:
    """Nested arguments with gaps, mostly for the addresses of tensors."""

    __slots__ = ("_group", "_last")

    def __init__(self, group: tuple) -> None:
        self._group = group
        self._last: tuple[list, tuple] | None = None

    def filled(self, values: list) -> tuple:
        """The arguments with these values in their gaps."""
        last = self._last  # read once: other threads may write it
        if last is not None and last[0] == values:
            return last[1]
        args = _filled(self._group, values)
        self._last = values, args
        return args


def pattern_of(args: tuple, row: tuple) -> Pattern | None:
    """The pattern of nested arguments, with a gap for each that is in the row, which are objects of
    which no two are one. None where a tensor is not among them, such as a contiguous copy.
    """
    places = {id(x): place for place, x in enumerate(row) if x is not None}
    try:
        return Pattern(_group_of(args, places))
    except KeyError:
        return None


def _group_of(args: tuple, places: dict[int, int]) -> tuple:
    """The arguments with gaps, then which of the row fills which, then which group does."""
    items, gaps, groups = list(args), [], []
    for i, item in enumerate(args):
        if id(item) in places or isinstance(item, torch.Tensor):
            gaps.append((i, places[id(item)]))
            items[i] = None
        elif isinstance(item, tuple):
            group = _group_of(item, places)
            if group[1] or group[2]:
                groups.append((i, group))
                items[i] = None
    return items, gaps, groups


def _filled(group: tuple, values: list) -> tuple:
    items, gaps, groups = group
    items = items.copy()
    for i, place in gaps:
        items[i] = values[place]
    for i, inner in groups:
        items[i] = _filled(inner, values)
    return tuple(items)


class Again(NamedTuple):
    """A kernel without descriptors, to be launched for other tensors of the same look."""

    compiled: Any
    programs: int
    args: Pattern  # constants too

    def launch(self, index: int, values: list) -> None:
        """As `relaunch`, with these values in the gaps of its arguments."""
        relaunch(self.compiled, self.programs, index, *self.args.filled(values))
