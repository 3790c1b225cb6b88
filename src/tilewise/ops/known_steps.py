"""Steps of decoding that are known. A step looks like the one before, and is over so soon that its
checks and its arguments take longer than its kernels: so what a call launched is kept under its
look. That is all that the door, the backend and the compiler see of a call without reading its
tensors' values: shapes, strides, dtypes, devices and alignment, and numbers by type and value. A
step keeps no tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .attention import is_watched, needs_grad
from .context_parallel import refuse_shards

Tensor = torch.Tensor
ALIGNMENT = 16  # bytes; that of an address, modulo them, decides what is compiled for it
KEPT_STEPS = 1024
PLAIN = {bool, int, float, str, type(None)}


class Look(NamedTuple):
    """A call without a mask function, as it looks from outside."""

    key: tuple
    addresses: list[int]


def look_of(tensors: tuple[Tensor | None, ...], numbers: tuple) -> Look | None:
    """Of a call's tensors, q first and `out` last; None where its values or its gradient matter, or
    who watches it. `numbers` are all else that it was given.
    """
    if is_watched(*tensors) or tensors[0] is None or not has_kernels(tensors[0]):
        return None
    if any([type(x) not in PLAIN for x in numbers]):
        return None
    if needs_grad(*tensors) or os.environ.get("TILEWISE_CHECK") == "1":
        return None
    try:
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        looks = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
    except RuntimeError:  # of nested tensors, and of torch's transforms
        return None
    aligned = [address % ALIGNMENT for address in addresses]
    return Look((*looks, *aligned, *numbers, *map(type, numbers)), addresses)


def has_kernels(q: Tensor) -> bool:
    """Whether a call runs in kernels that are compiled for it."""
    return q.is_cuda


def again(look: Look | None, q: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """`out` and `lse` of a known step; None of one that is not known, or may not be launched."""
    step = None if look is None else _steps.get(look.key)
    if step is None:
        return None
    refuse_shards()
    return step(q, out, look.addresses)


def keep(look: Look | None, step: Callable | None) -> None:
    """Keeps a step: what is called as `step(q, out, addresses)` for others of its look."""
    if look is None or step is None:
        return
    if len(_steps) >= KEPT_STEPS:
        _steps.clear()
    _steps[look.key] = step


_steps: dict[tuple, Any] = {}
