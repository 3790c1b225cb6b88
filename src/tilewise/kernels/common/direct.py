"""Launches through a compiled kernel's C launcher, without Triton's Python, which inspects every
argument and takes longer than a short kernel runs: whether that may be, and what the launcher takes
before a kernel's arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton import knobs

from .operand import Encoded, Gap, gaps_in
from .packed import packed

Relaunch = Callable[[int, Sequence[Any]], None]  # a launch on a stream, of what is in a row


def may_relaunch(device: int | None) -> bool:
    """Whether kernels may be launched without Triton's front end: the device is current, and no
    profiler has set launch hooks, which must then be called.
    """
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if getattr(hook, "calls", hook):
            return False
    return torch._C._cuda_getDevice() == device


class Direct:
    """What launches a compiled kernel on a grid of so many programs, and what it takes before the
    kernel's arguments, constants too, which must have the types and alignment that it was compiled
    for. A tensor's address stands for the tensor, and the parts of a descriptor for a descriptor.
    """

    __slots__ = ("_before", "_packs", "compiled", "launcher", "programs")

    def __init__(
        self, compiled: Any, programs: int, launcher: Callable | None, packs: bool = False
    ) -> None:
        """Without a launcher in C it is Triton's own launch function."""
        run, metadata = compiled.run, compiled.packed_metadata
        hooks = (None, None, None)  # the launch's metadata and its hooks
        scratch = (None, None)
        if launcher is None:
            self._before = (compiled.function, metadata, *hooks)
        else:
            before = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
            self._before = (*before, *scratch, metadata, *hooks)
            if packs:
                signature = (run.arg_annotations, run.kernel_signature)
                self._before = (*before, metadata, *hooks, *scratch, *signature)
        self.compiled, self.programs = compiled, programs
        self.launcher, self._packs = launcher or run, packs  # what takes `arguments`

    def arguments(self, stream: Any, args: tuple) -> tuple:
        """All that the launcher takes."""
        if self._packs:
            args = (args,)
        return self.programs, 1, 1, stream, *self._before, *args


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


def past_triton(compiled: Any, programs: int) -> Direct:
    """The launch of a kernel without descriptors; where there is no way past all of Triton's
    Python, past its look at every argument.
    """
    launcher, packs = launcher_of(compiled) or (None, False)
    return Direct(compiled, programs, launcher=launcher, packs=packs)


def relaunch_of(
    kernel: Direct, args: tuple, names: Sequence[str], may_pack: bool = True
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
