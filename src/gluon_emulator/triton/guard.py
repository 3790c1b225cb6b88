"""Mistakes that a GPU answers with garbage raise here: wild addresses and int32 overflow.

Every load, store and atomic is checked lane by lane, masked lanes excepted, before it is carried
out: its address must lie in the storage of an argument. The check uses storages, not views: a read
that leaves a slice of a larger tensor stays within its storage and passes. Integer sums,
differences and products must fit their type, in masked lanes as well.
"""

import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


def guarded(memory: Any, arguments: Any, program: Any) -> types.SimpleNamespace:
    """Return `memory`, the interpreter's load and store functions, with every address checked.

    `arguments` is searched for tensors through dicts, tuples and descriptors, and `program()`
    names the running program. A bad address raises IndexError.
    """
    ranges = sorted(_storages(arguments))
    low = np.array([r[0] for r in ranges], np.uint64)
    high = np.array([r[1] for r in ranges], np.uint64)

    def check(kind: str, address: Any, mask: Any, size: int) -> None:
        mask = np.asarray(mask, bool)
        touched = np.broadcast_to(address, np.broadcast_shapes(np.shape(address), mask.shape))
        touched = touched[np.broadcast_to(mask, touched.shape)]
        index = np.searchsorted(low, touched, "right") - 1
        outside = index < 0
        if ranges:
            outside |= touched + np.uint64(size) > high[np.maximum(index, 0)]
        if outside.any():
            first = int(touched[outside][0])
            raise IndexError(
                f"{kind} in program {program()}: {outside.sum()} of {outside.size} addresses lie"
                f" outside the arguments, {_nearest(first, ranges)}"
            )

    def load(address: Any, mask: Any, other: Any, dtype: Any) -> Any:
        check("load", address, mask, np.dtype(dtype).itemsize)
        return memory.load(address, mask, other, dtype)

    def store(address: Any, value: Any, mask: Any) -> Any:
        check("store", address, mask, value.dtype.itemsize)
        return memory.store(address, value, mask)

    def atomic_rmw(operation: Any, address: Any, value: Any, mask: Any, order: Any) -> Any:
        check("atomic", address, mask, value.dtype.itemsize)
        return memory.atomic_rmw(operation, address, value, mask, order)

    def atomic_cas(address: Any, expected: Any, value: Any, order: Any) -> Any:
        check("atomic", address, True, value.dtype.itemsize)
        return memory.atomic_cas(address, expected, value, order)

    checked = {"load": load, "store": store, "atomic_rmw": atomic_rmw, "atomic_cas": atomic_cas}
    functions = {name: getattr(memory, name) for name in dir(memory) if not name.startswith("__")}
    return types.SimpleNamespace(**functions | checked)


_EXACT = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


def checked_integers(program: Any) -> Callable[..., None]:
    """Return what Triton calls before an integer operation; an overflow raises OverflowError."""

    def check(semantic: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        kind, name = lhs.type.scalar, operation.__name__
        if kind.int_bitwidth >= 64:
            return
        exact = _EXACT[name](*(np.asarray(x.handle.data, np.int64) for x in (lhs, rhs)))
        if exact.max() > kind.get_int_max_value() or exact.min() < kind.get_int_min_value():
            raise OverflowError(
                f"{name} of {kind} values in program {program()} leaves the type, reaching"
                f" {exact.min()} to {exact.max()}: cast to int64 before it"
            )

    return check


def unchecked_integers(semantic: Any, lhs: Any, rhs: Any, operation: Any) -> None:
    """Nothing is checked: Triton would compute the exact result and drop it."""


def _storages(argument: Any, name: str = "") -> Iterator[tuple[int, int, str]]:
    if isinstance(argument, dict):
        for key, value in argument.items():
            yield from _storages(value, str(key))
    elif isinstance(argument, (tuple, list)):
        fields = getattr(argument, "_fields", range(len(argument)))
        for field, value in zip(fields, argument):
            yield from _storages(value, f"{name}.{field}" if name else str(field))
    elif hasattr(argument, "block_shape"):
        yield from _storages(argument.base, name)
    elif hasattr(argument, "untyped_storage"):
        storage = argument.untyped_storage()
        yield storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name


def _nearest(address: int, ranges: list[tuple[int, int, str]]) -> str:
    if not ranges:
        return "which hold no tensor"
    gaps = [
        (low - address if address < low else address - high, address < low, name)
        for low, high, name in ranges
    ]
    gap, before, name = min(gaps)
    if before:
        return f"the first {gap} bytes before the storage of {name}"
    return f"the first {max(gap, 0)} bytes past the end of the storage of {name}"
