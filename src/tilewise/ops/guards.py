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
from typing import Any

import torch

from ..kernels.common.alignment import ALIGNMENT

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # a torch whose guards are others: calls are found by their signatures
    TensorGuards = None

Tensor = torch.Tensor
MAX_GUARDS = 4096
IS_NESTED = Tensor.is_nested.__get__  # pyright: ignore


# Returns the entry and the addresses of the tensors that are not None, if these look so
Recall = Callable[[Sequence[Any]], tuple[Any, list[int]] | None]
known_guards: dict[tuple, Recall] = {}  # by what is quickly read of a call; the newest of a key


def remember(key: tuple, tensors: Sequence[Tensor | None], entry: Any) -> None:
    """An entry for tensors that are like these, where they are aligned."""
    recall = guard_of(tensors, entry)
    if recall is None:
        return
    if len(known_guards) >= MAX_GUARDS:
        known_guards.clear()
    known_guards[key] = recall


def guard_of(tensors: Sequence[Tensor | None], entry: Any) -> Recall | None:
    """The guard of an entry, for tensors of which as many are None."""
    places = [n for n, x in enumerate(tensors) if x is not None]
    present = [x for x in tensors if x is not None]
    if TensorGuards is None or any(x.data_ptr() % ALIGNMENT for x in present):
        return None
    # torch's guards refuse a tensor that comes twice, as cu_seqlens of queries and keys may
    first = {id(x): n for n, x in reversed([*enumerate(present)])}
    repeats = [(first[id(x)], n) for n, x in enumerate(present) if first[id(x)] != n]
    once = [n for n, x in enumerate(present) if first[id(x)] == n]
    unique = [present[n] for n in once]
    check = TensorGuards(*unique, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    select = operator.itemgetter(*places)
    reference = weakref.ref(entry)  # a table drops what was not used for long

    def recall(tensors: Sequence[Any]) -> tuple[Any, list[int]] | None:
        selected = select(tensors)
        distinct = selected
        if repeats:
            if any([selected[m] is not selected[n] for m, n in repeats]):
                return None
            distinct = [selected[n] for n in once]
        if any(map(IS_NESTED, distinct)) or not check(*distinct):  # which would end the process
            return None
        addresses = list(map(Tensor.data_ptr, selected))
        if functools.reduce(operator.or_, addresses) % ALIGNMENT or (alive := reference()) is None:
            return None
        return alive, addresses

    return recall
