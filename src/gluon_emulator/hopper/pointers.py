"""Global memory: pointers into the arguments, and the loads, stores and atomics through them.

An address outside the storage of the argument that a pointer came from raises IndexError, and so
does one that is not the multiple of bytes that `multiple_of` promised to the compiler: a GPU stops
there, and its context is lost. Every access is a point where another partition or CTA may go first,
which is how races show.
"""

import functools
import math
from typing import Any

import torch
import triton.language as tl

from .machine import running
from .values import TORCH, TRITON, Value, convert, data_as


class Pointer:
    """One address or a block of them: a tensor's memory, and offsets in elements."""

    __slots__ = ("dtype", "flat", "name", "offset", "promised")

    def __init__(
        self, flat: torch.Tensor, offset: Any, name: str, promised: tuple[int, int] = (1, 1)
    ) -> None:
        self.flat, self.offset, self.name = flat, offset, name
        self.promised = promised  # bytes, and of how many neighbours in a row the first
        self.dtype = _pointer_type(flat.dtype)

    @classmethod
    def to_tensor(cls, tensor: torch.Tensor, name: str) -> "Pointer":
        """A pointer to a tensor's first element, able to reach its whole storage."""
        if tensor.device.type != "cpu":
            raise ValueError(f"the emulator runs on CPU tensors, {name} is on {tensor.device}")
        tensor = tensor.detach()
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(tensor.as_strided((size,), (1,), 0), tensor.storage_offset(), name)

    def __repr__(self) -> str:
        return f"{self.name} + {self.offset}"

    @property
    def type(self) -> Any:
        return tl.block_type(self.dtype, self.shape) if self.shape else self.dtype

    @property
    def shape(self) -> list[int]:
        return list(self.offset.shape) if isinstance(self.offset, torch.Tensor) else []

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.flat, self.offset + data_as(other, tl.int64), self.name)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Pointer":
        return Pointer(self.flat, self.offset - data_as(other, tl.int64), self.name)

    def __getitem__(self, key: Any) -> "Pointer":
        return self.reshaped(torch.as_tensor(self.offset)[key])

    def reshaped(self, offset: Any) -> "Pointer":
        return Pointer(self.flat, offset, self.name)


@functools.cache
def _pointer_type(dtype: torch.dtype) -> Any:
    return tl.pointer_type(TRITON[dtype])


def multiple_of(value: Any, values: Any, **_: Any) -> Any:
    """Addresses whose multiples of bytes are promised, along the last dimension."""
    if not isinstance(value, Pointer):
        return value
    return Pointer(value.flat, value.offset, value.name, (_last(values), value.promised[1]))


def max_contiguous(value: Any, values: Any, **_: Any) -> Any:
    """Neighbours of which the promise is about the first."""
    if not isinstance(value, Pointer):
        return value
    return Pointer(value.flat, value.offset, value.name, (value.promised[0], _last(values)))


def _last(values: Any) -> int:
    return int(values[-1] if isinstance(values, (list, tuple)) else values)


def load(pointer: Any, mask: Any = None, other: Any = None, *_: Any, **hints: Any) -> Value:
    running().pause()
    offset, keep = touched("load", pointer, mask)
    dtype = pointer.dtype.element_ty
    if not isinstance(offset, torch.Tensor):
        if keep:
            return Value(convert(pointer.flat[offset], dtype), dtype)
        return Value(data_as(0 if other is None else other, dtype), dtype)
    if keep is None:
        return Value(convert(pointer.flat[offset], dtype), dtype)
    loaded = convert(pointer.flat[torch.where(keep, offset, 0)], dtype)
    if other is None:  # undefined on a GPU
        fallback: Any = math.nan if dtype.is_floating() else 0x5A
    else:
        fallback = data_as(other, dtype)
    return Value(torch.where(keep, loaded, fallback).to(loaded.dtype), dtype)


def store(pointer: Any, value: Any, mask: Any = None, *_: Any, **hints: Any) -> None:
    running().pause()
    offset, keep = touched("store", pointer, mask, value)
    value = torch.as_tensor(data_as(value, pointer.dtype.element_ty)).to(pointer.flat.dtype)
    if not isinstance(offset, torch.Tensor):
        if keep:
            pointer.flat[offset] = value
        return
    value = value.expand(offset.shape)
    pointer.flat[offset if keep is None else offset[keep]] = value if keep is None else value[keep]


def atomic(name: str) -> Any:
    """An atomic read-modify-write, which returns what was there before."""
    combine = _COMBINE[name]

    def atomic_operation(
        pointer: Any, value: Any, mask: Any = None, sem: Any = None, scope: Any = None
    ) -> Value:
        running().pause()
        offset, keep = touched(f"atomic {name}", pointer, mask, value)
        dtype = pointer.dtype.element_ty
        new = torch.as_tensor(data_as(value, dtype)).to(TORCH[dtype])
        running().log(f"atomic {name}", lambda: f"{pointer.name} {new.tolist()}")
        index = torch.as_tensor(offset)
        keep = torch.as_tensor(True if keep is None else keep).expand(index.shape)
        old = convert(pointer.flat[torch.where(keep, index, 0)].clone(), dtype)
        new = new.expand(index.shape)[keep].to(pointer.flat.dtype)
        combine(pointer.flat, index[keep], new)
        return Value(old, dtype)

    atomic_operation.__name__ = f"atomic_{name}"
    return atomic_operation


def atomic_cas(pointer: Any, cmp: Any, val: Any, sem: Any = None, scope: Any = None) -> Value:
    running().pause()
    offset, _ = touched("atomic cas", pointer, None)
    dtype = pointer.dtype.element_ty
    old = convert(pointer.flat[offset].clone(), dtype)
    new = torch.where(old == data_as(cmp, dtype), data_as(val, dtype), old)
    pointer.flat[offset] = new.to(pointer.flat.dtype)
    return Value(old, dtype)


def _scatter(how: str) -> Any:
    return lambda flat, index, new: flat.scatter_reduce_(0, index, new, how)


_COMBINE = {
    "add": lambda flat, index, new: flat.index_add_(0, index, new),
    "max": _scatter("amax"),
    "min": _scatter("amin"),
    "xchg": lambda flat, index, new: flat.index_copy_(0, index, new),
}


def touched(kind: str, pointer: Any, mask: Any, value: Any = None) -> tuple[Any, Any]:
    """Offsets and mask broadcast together, after a check of every address that is touched."""
    if not isinstance(pointer, Pointer):
        raise TypeError(f"{kind} through {pointer!r}, which is no pointer")
    offset = pointer.offset
    keep = None if mask is None else data_as(mask, tl.int1)
    if not any(isinstance(x, torch.Tensor) for x in (offset, keep)):
        keep = True if keep is None else keep
        if keep and not 0 <= offset < pointer.flat.numel():
            raise _outside(kind, pointer, offset, 1, 1)
        return offset, keep
    if keep is not None:
        offset, keep = torch.broadcast_tensors(torch.as_tensor(offset), torch.as_tensor(keep))
    touched = offset if keep is None else offset[keep]
    if touched.numel():
        low, high = (bound.item() for bound in touched.aminmax())
        if low < 0 or high >= pointer.flat.numel():
            outside = touched[(touched < 0) | (touched >= pointer.flat.numel())]
            raise _outside(kind, pointer, int(outside[0]), outside.numel(), touched.numel())
    _check_promise(kind, pointer, offset, keep)
    return offset, keep


def _check_promise(kind: str, pointer: Pointer, offset: torch.Tensor, keep: Any) -> None:
    unit, run = pointer.promised
    if unit == 1:
        return
    first = offset[..., ::run]
    first = first if keep is None else first[keep[..., ::run]]
    addresses = pointer.flat.data_ptr() + first * pointer.flat.itemsize
    if (addresses % unit).any():
        raise IndexError(
            f"{kind} by {running()}: an address in {pointer.name} is no multiple of {unit} bytes,"
            " as was promised"
        )


def _outside(kind: str, pointer: Pointer, first: int, count: int, total: int) -> IndexError:
    return IndexError(
        f"{kind} by {running()}: {count} of {total} addresses lie outside {pointer.name},"
        f" which has {pointer.flat.numel()} elements; the first is element {first}"
    )
