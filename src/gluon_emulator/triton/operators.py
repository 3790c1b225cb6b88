"""Operators on tensors that need no conversion, by numpy at once.

Triton's interpreter finds types, casts and broadcasts operands by the compiler's code, in a dozen
calls for each operator, also where both have one type. Whatever is not as simple as that goes the
usual way, errors included.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import TensorHandle

_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


class _Kind(NamedTuple):
    """What numpy calls a type, which of Python's numbers adapt to it, and the range of these."""

    numpy: Any
    numbers: tuple[type, ...] = ()
    low: int = -(2**31)
    stop: int = 2**31


# By names of Triton's types, as pointers have no hash
_KINDS = {
    "fp32": _Kind(np.float32, (int, float)),
    "int32": _Kind(np.int32, (int,)),
    "int64": _Kind(np.int64, (int,)),
    "uint32": _Kind(np.uint32, (int,), low=0, stop=2**32),
    "int1": _Kind(np.bool_),
}
_ABSENT = object()
_ALL = slice(None)


def patches() -> Iterator[tuple[Any, str, Any]]:
    """What to replace while kernels are interpreted: the owner, the name, the value."""
    for name, ufunc in {**_ARITHMETIC, **_COMPARISONS, **_BITS}.items():
        dunder = f"__{name}__"
        yield tl.tensor, dunder, _operator(name, ufunc, usual=getattr(tl.tensor, dunder))
    for name in ("add", "mul"):
        dunder = f"__r{name}__"
        usual = getattr(tl.tensor, dunder)
        yield tl.tensor, dunder, _operator(name, _ARITHMETIC[name], usual=usual)
    yield tl.tensor, "__getitem__", _indexed(tl.tensor.__getitem__)
    checking = "binary_op_type_checking_impl"
    yield TritonSemantic, checking, _unchanged(getattr(TritonSemantic, checking))


def _indexed(usual: Callable[..., Any]) -> Callable[..., Any]:
    """New dimensions of a block, as in x[:, None]."""

    def __getitem__(self: Any, slices: Any) -> Any:
        shape = _shape(self)
        if type(slices) is not tuple or shape is None:
            return usual(self, slices)
        added = slices.count(None)
        if added + slices.count(_ALL) != len(slices) or len(slices) - added > len(shape):
            return usual(self, slices)
        data = self.handle.data[slices]
        handle = _handle(data, self.handle.dtype.scalar)
        return tl.tensor(handle, tl.block_type(self.dtype, list(data.shape)))

    return __getitem__


def _unchanged(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Two operands of one type and shape, which need no conversion."""

    def binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *how: Any, **named: Any) -> Any:
        if type(lhs) is type(rhs) is tl.tensor:
            is_same = lhs.dtype is rhs.dtype and lhs.dtype.name in _KINDS
            if is_same and _shape(lhs) is _shape(rhs):
                return lhs, rhs
        return convert(self, lhs, rhs, *how, **named)

    return binary_op_type_checking_impl


def _shape(tensor: Any) -> Any:
    """One object for all equal shapes; None of a scalar."""
    return getattr(tensor.type, "shape", None)


def _operator(name: str, ufunc: Any, *, usual: Callable[..., Any]) -> Callable[..., Any]:
    is_comparison, is_sum = name in _COMPARISONS, name == "add"
    kinds = {"int32", "int64", *(("int1", "uint32") if name in _BITS else ("fp32",))}

    def operate(self: Any, other: Any) -> Any:
        kind = self.dtype
        if kind.name in kinds:
            numbers = _operand(kind, other)
        elif is_sum and kind.is_ptr():
            numbers = _bytes(self, other)
        else:
            numbers = _ABSENT
        like = self if numbers is _ABSENT else _like(self, other)
        if numbers is _ABSENT or like is _ABSENT:
            return usual(self, other)
        data = self.handle.data
        if kind is tl.int32 and name in _ARITHMETIC:
            result = _checked(ufunc, data, numbers)
            if result is None:
                return usual(self, other)
        else:
            result = ufunc(data, numbers)
        if is_comparison:
            kind = tl.int1
        handle = _handle(result, self.handle.dtype)
        if like is None:
            return tl.tensor(handle, tl.block_type(kind, list(result.shape)))
        if like.dtype is not kind:
            return tl.tensor(handle, like.type.with_element_ty(kind))
        made = object.__new__(tl.tensor)
        made.handle, made.type, made.dtype = handle, like.type, kind
        made.shape, made.numel = like.shape, like.numel
        return made

    return operate


def _operand(kind: Any, other: Any) -> Any:
    """The other operand for numpy, if it has this type or takes it."""
    about = _KINDS[kind.name]
    if type(other) is tl.tensor:
        data = other.handle.data
        if other.dtype is kind:
            return data if data.dtype == about.numpy else _ABSENT
        return data if kind is tl.int64 and other.dtype is tl.int32 else _ABSENT
    other = other.value if type(other) is tl.constexpr else other
    fits = type(other) in about.numbers and about.low <= other < about.stop
    return about.numpy(other) if fits else _ABSENT


def _bytes(pointer: Any, other: Any) -> Any:
    """The bytes that an offset of elements is."""
    if type(other) is not tl.tensor or other.dtype not in (tl.int32, tl.int64):
        return _ABSENT
    size = max(1, pointer.handle.get_element_ty().primitive_bitwidth // 8)
    return size * other.handle.data.astype(np.uint64)


def _like(self: Any, other: Any) -> Any:
    """The operand that has the result's shape; None if neither has."""
    mine = _shape(self)
    its = _shape(other) if type(other) is tl.tensor else None
    if its is None or mine is its:
        return self
    if mine is None:
        return other
    fit = len(mine) == len(its) and all(a == b or 1 in (a, b) for a, b in zip(mine, its))
    return None if fit else _ABSENT


def _checked(ufunc: Any, data: np.ndarray, numbers: Any) -> np.ndarray | None:
    """The result in int32; None if it leaves that type."""
    exact = ufunc(data, numbers, dtype=np.int64)
    result = exact.astype(np.int32)
    return None if (result != exact).any() else result


def _handle(data: np.ndarray, kind: Any) -> TensorHandle:
    """Made without a look at the size of numpy's type."""
    handle = object.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, kind, {}
    return handle
