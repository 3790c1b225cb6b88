"""Signatures as torch compares them for its compiler: in one call, in C.

A guard passes for tensors that are of the same types, sizes, strides, dtypes, device and dispatch
keys, and that require a gradient, or not, as those did for which it was made. Dispatch keys are
those of the thread, too: under autocast, inference mode, a dispatch mode or a functorch transform
they differ. What a guard does not see is in the key of a call, or asked before. What is found so
need not be looked up by its whole signature, which takes four times as long.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..kernels.common.alignment import ALIGNMENT

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a torch whose guards are others: calls are found by their signatures
    TensorGuards = None

Tensor = torch.Tensor
MAX_GUARDS = 4096


class Guard(NamedTuple):
    """What the tensors of an entry look like."""

    present: Callable[..., tuple]  # those that are not None
    check: Callable[..., bool]
    entry: Callable[[], Any]  # a weak reference: a table drops what was not used for long

    def recall(self, tensors: Sequence[Any]) -> tuple[Any, list[int]] | None:
        """The entry, and the addresses of the tensors that are not None, if these look so."""
        present, check, entry = self
        tensors = present(tensors)
        if not check(*tensors):
            return None
        addresses = list(map(Tensor.data_ptr, tensors))
        if functools.reduce(operator.or_, addresses) % ALIGNMENT or (alive := entry()) is None:
            return None
        return alive, addresses


# By what is quickly read of a call; the newest of a key
known_guards: dict[tuple, Guard] = {}


def remember(key: tuple, tensors: Sequence[Tensor | None], entry: Any) -> None:
    """An entry for tensors that are like these, where they are aligned."""
    places = [n for n, x in enumerate(tensors) if x is not None]
    present = [x for x in tensors if x is not None]
    if TensorGuards is None or any(x.data_ptr() % ALIGNMENT for x in present):
        return
    if len(known_guards) >= MAX_GUARDS:
        known_guards.clear()
    check = TensorGuards(*present, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    known_guards[key] = Guard(operator.itemgetter(*places), check, weakref.ref(entry))
