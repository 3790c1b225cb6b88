"""At which multiples of bytes kernels need tensors to lie: one table. Backends refuse or copy what
does not lie so, and calls that share a compiled kernel agree in what it depends on.

TMA, cp.async and vectors of a size that is promised to the compiler need what the table says. All
other tensors are read and written as Triton compiles it for the address and the strides of the
first launch, by whether they are multiples of ALIGNMENT. So a compiled kernel serves tensors of the
same strides whose addresses are the same modulo ALIGNMENT, and no kernel needs more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from ...emulation import emulator_seed, interpreter_is_on
from ...errors import ArgumentError

Tensor = torch.Tensor
ALIGNMENT = 16  # bytes


class Access(NamedTuple):
    """What a kernel needs of a tensor's address, and of its strides but that of the last dimension,
    which is contiguous.
    """

    bytes: int  # of which they are multiples
    may_repeat: bool = True  # whether a stride may be 0


VECTORS = Access(ALIGNMENT)
TMA = Access(ALIGNMENT, may_repeat=False)

# By backend and tensor. A backward copies a gradient that comes in otherwise, and a bias is read
# otherwise (hopper/padded.py, hopper/bias_memory.py).
DENSE = {"hopper": {"q": TMA, "k": TMA, "v": TMA}}
CACHE = {"hopper": {"q": VECTORS, "k": TMA, "v": TMA}}


def fits(x: Tensor, access: Access) -> bool:
    """Whether a tensor lies as a kernel needs it. Along a dimension of one element none steps."""
    unit = access.bytes // x.itemsize
    for size, stride in zip(x.shape[:-1], x.stride()):
        if size > 1 and (stride % unit or (stride <= 0 and not access.may_repeat)):
            return False
    return x.data_ptr() % access.bytes == 0


def misplaced(needs: dict[str, Access], **tensors: Tensor) -> str | None:
    """Why kernels with these needs do not serve tensors of these names, or None."""
    for name, x in tensors.items():
        access = needs.get(name)
        if access is not None and not fits(x, access):
            repeated = "" if access.may_repeat else ", and none be expanded"
            return (
                f"{name} must begin at a multiple of {access.bytes} bytes, and so must its rows, "
                f"heads and batches or pages{repeated}: {name}.clone() does that, if there is "
                "memory for it"
            )
    return None


def check_elements(named: Iterable[tuple[str, Tensor | None]]) -> None:
    """Refuses tensors whose elements do not lie at multiples of their size, as tensors over foreign
    memory may: no instruction of a GPU reads such an element.
    """
    for name, x in named:
        if x is None or x.data_ptr() % x.itemsize == 0:
            continue
        if not x.is_cpu or interpreter_is_on() or emulator_seed() is not None:
            raise ArgumentError(
                f"{name} begins at address {x.data_ptr():#x}, which is not a multiple of its "
                f"element size, {x.itemsize} bytes: clone() it"
            )
