"""Differences between Triton 3.6 and the newest release: names, and direct launches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from triton.backends.nvidia import driver
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..common import direct
from ..common.packed import map_of

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
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


class Descriptors:
    """The operands of one launch, descriptors or `Strided`, for tensors at other addresses, which
    differ in nothing else.
    """

    KEPT = 256  # of one operand: models have a cache for each of their layers

    def __init__(self, kernel: Direct, described: Sequence[Any]) -> None:
        templates = [type(x)(None, *x[1:]) for x in described]
        before = list(itertools.accumulate(map(is_described, templates), initial=0))

        def encode(which: int, address: int) -> list:
            template = templates[which]
            if not is_described(template):
                return [(address, *template[1:])]
            return kernel.encode(before[which], template._replace(base=At(address)))

        def moved(which: int, address: int) -> Any:
            first = self.at(which, address)[0]
            return address if isinstance(first, tuple) else map_of(first)

        self.count = len(templates)
        keep = functools.lru_cache(maxsize=self.KEPT * self.count)
        # All parts of an operand, and what moves of it, as `packed` takes it: None of what it
        # does not take
        self.at, self.moved = keep(encode), keep(moved)

    def opened(self, addresses: Sequence[int]) -> tuple[list, list, bool]:
        """A gap for what moves of each operand, all operands as the kernel takes them, with these
        gaps, and whether `packed` takes what moves.
        """
        gaps, operands = [object() for _ in addresses], []
        for operand, (address, gap) in enumerate(zip(addresses, gaps)):
            first, *fields = self.at(operand, address)
            operands += [(gap, *first[1:]) if isinstance(first, tuple) else gap, *fields]
        moved = [self.moved(operand, address) for operand, address in enumerate(addresses)]
        return gaps, operands, None not in moved

    def first(self, which: int, address: int) -> Any:
        """What of an operand moves, as Triton's launcher takes it."""
        first = self.at(which, address)[0]
        return address if isinstance(first, tuple) else first


def is_described(operand: Any) -> bool:
    """Whether an operand is a descriptor."""
    return hasattr(operand, "block_shape")


class At:
    """A tensor that has only an address."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        """The address."""
        return self._address


def direct_of(compiled: Any, programs: int) -> Direct | None:
    """The kernel past Triton's launcher; None where that serves every call."""
    launcher = direct.launcher_of(compiled)
    return None if launcher is None else Direct(compiled, programs, *launcher)
