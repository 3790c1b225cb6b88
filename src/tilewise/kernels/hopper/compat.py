"""Differences between Triton 3.6 and the newest release: names, and direct launches."""

from __future__ import annotations

from typing import Any

from triton.backends.nvidia import driver
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..common import direct

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_IS_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def reinterpret(smem, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Views shared memory with another type, shape and layout."""
    if _IS_PUBLIC:
        return smem.reinterpret(dtype, shape, layout)
    else:
        return smem._reinterpret(dtype, shape, layout)


class Direct(direct.Direct):
    """A kernel with descriptors, which Triton encodes at every call: some 10 us for four."""

    __slots__ = ("_blocks",)

    def __init__(self, compiled: Any, programs: int, launcher: Any, packs: bool) -> None:
        super().__init__(compiled, programs, launcher, packs)
        self._blocks = compiled.metadata.tensordesc_meta

    def encode(self, which: int, described: Any) -> list:
        """A descriptor as the kernel takes it; valid for every tensor at that address."""
        prefix = (None,) if self._packs else ()
        return driver.make_tensordesc_arg(described, self._blocks[which], *prefix)


class At:
    """A tensor that has only an address."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        """The address."""
        return self._address
