"""What differs between Triton 3.6 and the newest release: names, and the way past its launcher."""

from __future__ import annotations

import inspect
from typing import Any

from triton.backends.nvidia import driver
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


class Direct:
    """A compiled kernel, called past Triton's launcher, which encodes every tensor descriptor anew
    at every call: 8 of a launch's 15 us.
    """

    __slots__ = ("_before", "_blocks", "_launcher", "_programs")

    def __init__(self, compiled: Any, programs: int, launcher: Any) -> None:
        run = compiled.run
        hooks = (None, None, None)  # the launch's metadata, and who is called before and after
        scratch = (None, None)
        flags = (run.launch_cooperative_grid, run.launch_pdl)
        self._launcher, self._programs = launcher, programs
        self._before = (compiled.function, *flags, *scratch, compiled.packed_metadata, *hooks)
        self._blocks = compiled.metadata.tensordesc_meta

    def encode(self, which: int, described: Any) -> list:
        """A descriptor as the kernel takes it; valid for every tensor at that address."""
        return driver.make_tensordesc_arg(described, self._blocks[which])

    def __call__(self, stream: int, *args: Any) -> None:
        self._launcher(self._programs, 1, 1, stream, *self._before, *args)


def direct(compiled: Any, programs: int) -> Direct | None:
    """None where this Triton's launcher is not the one of 3.6: it then serves every call itself."""
    run = compiled.run
    if getattr(driver, "_BASE_ARGS_FORMAT_LEN", None) != 13 or not inspect.isfunction(run.launch):
        return None
    launcher = inspect.getclosurevars(run.launch).nonlocals.get("launcher")
    if launcher is None or run.global_scratch_size or run.profile_scratch_size:
        return None
    return Direct(compiled, programs, launcher)
