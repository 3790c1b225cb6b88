"""Launches through a compiled kernel's C launcher, without Triton's Python, with what the launcher
takes before a kernel's arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from .operand import Encoded, Gap, gaps_in
from .packed import packed

Relaunch = Callable[[int, Sequence[Any]], None]  # a launch on a stream, of what is in a row


class Direct:
    """A compiled kernel on a grid of so many programs: called with a stream and all arguments,
    constants too, of the types and alignment that it was compiled for. A tensor's address stands
    for the tensor, and the parts of a descriptor for a descriptor.
    """

    __slots__ = ("_before", "_packs", "compiled", "launcher", "programs")

    def __init__(self, compiled: Any, programs: int, launcher: Callable, packs: bool) -> None:
        run = compiled.run
        hooks = (None, None, None)  # the launch's metadata and its hooks
        scratch = (None, None)
        before = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
        if packs:
            signature = (run.arg_annotations, run.kernel_signature)
            self._before = (*before, compiled.packed_metadata, *hooks, *scratch, *signature)
        else:
            self._before = (*before, *scratch, compiled.packed_metadata, *hooks)
        self.compiled, self.programs = compiled, programs
        self.launcher, self._packs = launcher, packs  # what takes `arguments`

    def __call__(self, stream: int, *args: Any) -> None:
        self.launcher(*self.arguments(stream, args))

    def arguments(self, stream: Any, args: tuple) -> tuple:
        """All that the launcher takes."""
        if self._packs:
            args = (args,)
        return self.programs, 1, 1, stream, *self._before, *args


class Through:
    """A kernel that is launched through Triton's own launch function."""

    def __init__(self, compiled: Any, programs: int) -> None:
        self.compiled, self.programs, self.launcher = compiled, programs, compiled.run
        self._before = compiled.function, compiled.packed_metadata

    def __call__(self, stream: int, *args: Any) -> None:
        self.launcher(*self.arguments(stream, args))

    def arguments(self, stream: Any, args: tuple) -> tuple:
        """All that the launcher takes."""
        return self.programs, 1, 1, stream, *self._before, None, None, None, *args


def launcher_of(compiled: Any) -> tuple[Callable, bool] | None:
    """A kernel's launcher in C, and whether it takes the arguments as one tuple. None where this
    Triton's is like neither that of 3.6 nor that of 3.8, or needs scratch memory.
    """
    run = compiled.run
    packs = hasattr(run, "kernel_signature")
    if not hasattr(run, "launch") or getattr(run, "gsan_enabled", False):
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    if not packs:
        from triton.backends.nvidia import driver

        if getattr(driver, "_BASE_ARGS_FORMAT_LEN", None) != 13:
            return None
    launch = run.launch
    if inspect.isfunction(launch):  # which takes descriptors apart
        launch = inspect.getclosurevars(launch).nonlocals.get("launcher")
    return None if launch is None else (launch, packs)


def past_triton(compiled: Any, programs: int) -> Direct | Through:
    """A kernel without descriptors, to be called as `Direct`; where there is no way past all of
    Triton's Python, past its look at every argument.
    """
    launch = launcher_of(compiled)
    if launch is None:
        return Through(compiled, programs)
    launcher, packs = launch
    return Direct(compiled, programs, launcher=launcher, packs=packs)


def relaunch_of(
    kernel: Direct | Through, args: tuple, names: Sequence[str], may_pack: bool = True
) -> Relaunch:
    """A launch of a kernel as a function of the stream and of a row of addresses in the order of
    `names`, which are those of the gaps among its arguments.
    """
    stream = Gap("stream")
    fill, launcher = filler(kernel.arguments(stream, args), (stream.name, *names)), kernel.launcher

    def launch(stream: int, row: Sequence[Any]) -> None:
        launcher(*fill(stream, *row))

    if not may_pack:
        return launch
    return packed(kernel.compiled, kernel.programs, args, names, launch) or launch


def filler(args: tuple, names: Sequence[str]) -> Callable[..., tuple]:
    """A function of what is in the gaps, in the order of `names`, that makes the arguments. It is
    compiled from an expression: looking up what belongs where takes four times as long.
    """
    parameters = {name: f"gap{place}" for place, name in enumerate(names)}
    constants: dict[str, Any] = {}

    def text_of(item: Any) -> str:
        if isinstance(item, Encoded) and item.name not in parameters:
            constants[name := f"constant{len(constants)}"] = item.encode
            return f"{name}({parameters[item.base]})"
        if isinstance(item, Gap):
            return parameters[item.name]
        if isinstance(item, tuple) and any(gaps_in(item)):
            return "(" + "".join(text_of(x) + ", " for x in item) + ")"
        constants[name := f"constant{len(constants)}"] = item
        return name

    text = text_of(args)
    return eval(f"lambda {', '.join(parameters.values())}: {text}", constants)
