"""Launches of compiled kernels without Triton's front end, which inspects every argument and takes
longer than a short kernel runs.

So does building the arguments: kernels take tensors in groups, with numbers such as their strides.
But calls of one signature differ in the addresses of their tensors alone. So the arguments of the
first call are stored as a `Pattern`, into which the addresses of later calls are filled. That keeps
no tensor alive: launchers take an address for a pointer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from triton import knobs

from ...problem import Extras, extras_of
from .cached import Cached
from .direct import past_triton

Tensor = torch.Tensor
ALIGNMENT = 16  # bytes; that of an address, modulo them, decides what is compiled for it


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
    return extras_of(*distinct_views(extras.tensors))


def distinct_cached(cached: Cached) -> Cached:
    """The same memory as tensors of which no two are one object."""
    q, k, v, table = distinct_views(cached[:4])
    extras = distinct_extras(cached.extras)
    k_descale, v_descale = distinct_views((cached.k_descale, cached.v_descale))
    read = dict(q=q, k=k, v=v, page_table=table, k_descale=k_descale, v_descale=v_descale)
    return cached._replace(extras=extras, **read)


def addresses_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """The addresses of tensors; 0 for None."""
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
    """The pattern of nested arguments, with a gap for each that is in `row`, whose objects are
    distinct. None where a tensor is not in `row`, such as a contiguous copy.
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
    """Records where the items of a tuple come from; nested tuples become earlier groups."""
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
    """A function that takes these items of its argument; in C where there are several."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple([values[place] for place in places])


class Relaunch(NamedTuple):
    """A kernel without descriptors and its arguments, for other tensors of the same signature."""

    kernel: Callable[..., None]
    args: Pattern  # constants too

    def launch(self, stream: int, values: Sequence[Any]) -> None:
        """Launches on a stream of the current device, with these values in the gaps."""
        self.kernel(stream, *self.args.filled(values))


class Launched(NamedTuple):
    """A launch through Triton's launcher; an empty grid has no kernel."""

    compiled: Any
    programs: int
    args: tuple  # constants too


def relaunches_of(launches: Sequence[Launched], row: Sequence[Any]) -> list[Relaunch] | None:
    """Relaunches for tensors in the order of `row`; None on AMD, with a tensor that is not in
    `row`, or without a compiled kernel.
    """
    patterns = [pattern_of(x.args, row) for x in launches]
    if torch.version.hip is not None or None in patterns:
        return None
    if any(x.compiled is None for x in launches):
        return None
    kernels = [past_triton(x.compiled, x.programs) for x in launches]
    return [Relaunch(kernel, args) for kernel, args in zip(kernels, patterns) if args is not None]


class Launches:
    """The launches of calls of one signature: the first as Triton launches them, later ones
    straight to their kernels. Holds no tensor.
    """

    def __init__(self) -> None:
        self.device: int | None = None
        self.relaunches: list[Relaunch] | None = None

    def again(self, row: Sequence[Tensor | None]) -> bool:
        """Launches them for other tensors; whether that could be done."""
        if self.relaunches is None or not may_relaunch(self.device):
            return False
        stream, values = torch._C._cuda_getCurrentRawStream(self.device), addresses_of(row)
        for launch in self.relaunches:
            launch.launch(stream, values)
        return True

    def record(self, launched: Sequence[Launched], row: Sequence[Any], x: Tensor) -> None:
        """Keeps the first launches, for tensors in the order of `row`, on the device of x."""
        self.device, self.relaunches = x.device.index, relaunches_of(launched, row)
