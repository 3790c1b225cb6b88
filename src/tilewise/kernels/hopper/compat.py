"""What differs between Triton 3.6 and the newest release: names, and the way past its launcher."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from triton.backends.nvidia import driver
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


class Direct:
    """A compiled kernel, called past Triton's launcher, which encodes every tensor descriptor anew
    at every call: some 10 us for four.
    """

    __slots__ = ("_before", "_blocks", "_launcher", "_packs", "_programs")

    def __init__(self, compiled: Any, programs: int, launcher: Any, packs: bool) -> None:
        run = compiled.run
        hooks = (None, None, None)  # the launch's metadata, and who is called before and after
        scratch = (None, None)
        before = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
        if packs:
            known = (run.arg_annotations, run.kernel_signature)
            self._before = (*before, compiled.packed_metadata, *hooks, *scratch, *known)
        else:
            self._before = (*before, *scratch, compiled.packed_metadata, *hooks)
        self._launcher, self._programs, self._packs = launcher, programs, packs
        self._blocks = compiled.metadata.tensordesc_meta

    def encode(self, which: int, described: Any) -> list:
        """A descriptor as the kernel takes it; valid for every tensor at that address."""
        more = (None,) if self._packs else ()
        return driver.make_tensordesc_arg(described, self._blocks[which], *more)

    def __call__(self, stream: int, *args: Any) -> None:
        if self._packs:
            args = (args,)
        self._launcher(self._programs, 1, 1, stream, *self._before, *args)


class Descriptors:
    """The descriptors of one launch's operands for tensors at other addresses, which differ in
    nothing else.
    """

    KEPT = 64  # of one operand

    def __init__(self, kernel: Direct, described: Sequence[Any]) -> None:
        templates = [x._replace(base=None) for x in described]

        def encode(which: int, address: int) -> list:
            return kernel.encode(which, templates[which]._replace(base=At(address)))

        self.count = len(templates)
        self.at = functools.lru_cache(maxsize=self.KEPT * self.count)(encode)


class At:
    """A tensor of which nothing is known but its address."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        """The address."""
        return self._address


def direct(compiled: Any, programs: int) -> Direct | None:
    """None where this Triton's launcher is like neither that of 3.6 nor that of 3.8, which takes a
    kernel's arguments as one tuple: it then serves every call itself.
    """
    run = compiled.run
    packs = hasattr(run, "kernel_signature")
    if not packs and getattr(driver, "_BASE_ARGS_FORMAT_LEN", None) != 13:
        return None
    if not inspect.isfunction(run.launch) or getattr(run, "gsan_enabled", False):
        return None
    launcher = inspect.getclosurevars(run.launch).nonlocals.get("launcher")
    if launcher is None or run.global_scratch_size or run.profile_scratch_size:
        return None
    return Direct(compiled, programs, launcher, packs)
