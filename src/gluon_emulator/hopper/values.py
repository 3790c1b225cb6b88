"""Numbers and blocks of numbers with Triton's types, computed by Python and torch.

A `Value` holds a Python number (a scalar of the kernel) or a torch tensor (a block). Types are
Triton's own objects, so `x.dtype == gl.float32` and `.to(gl.bfloat16)` mean what they say, and its
own rule decides which type a mixed expression has. Integer division truncates as on a GPU, floats
of a kernel are float32, and an integer that leaves its type raises OverflowError.
"""

import ctypes
import functools
import math
import operator
from typing import Any

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.language.semantic import TritonSemantic

TORCH = {
    tl.int1: torch.bool,
    tl.int8: torch.int8,
    tl.uint8: torch.uint8,
    tl.int16: torch.int16,
    tl.uint16: torch.uint16,
    tl.int32: torch.int32,
    tl.int64: torch.int64,
    tl.uint32: torch.int64,  # torch has no arithmetic of its own for it
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
TRITON = {TORCH[kind]: kind for kind in TORCH if kind != tl.uint32} | {torch.uint32: tl.uint32}

_semantic = TritonSemantic.__new__(TritonSemantic)  # its rules need no builder
_COMPARISONS = {name: getattr(operator, name) for name in "lt le gt ge eq ne".split()}
_EXACT = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


def _method(name: str) -> Any:
    """An operator, without a search for types where both operands have one or adapt to it."""
    operation = _COMPARISONS.get(name) or _EXACT.get(name)
    if operation is None:
        return lambda self, other: binary(name, self, other)
    is_comparison = name in _COMPARISONS

    def method(self: Any, other: Any) -> Any:
        dtype = self.dtype
        if type(other) is Value and other.dtype is dtype:
            number = other.data
        elif type(other) is int and dtype is tl.int32 and -(2**31) <= other < 2**31:
            number = other
        else:
            return binary(name, self, other)
        if is_comparison:
            return Value(operation(self.data, number), tl.int1)
        return Value(_exact(operation, self.data, number, dtype), dtype)

    return method


def _reflected(name: str) -> Any:
    return lambda self, other: binary(name, other, self)


class Value:
    """A scalar or a block in registers; never changed once made."""

    __slots__ = ("data", "dtype")

    def __init__(self, data: Any, dtype: Any) -> None:
        if isinstance(data, torch.Tensor) and not data.dim():
            data = data.item()
        self.data, self.dtype = data, dtype

    def __repr__(self) -> str:
        return f"{self.dtype}({self.data})"

    @property
    def is_block(self) -> bool:
        return isinstance(self.data, torch.Tensor)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape) if self.is_block else []

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def type(self) -> Any:
        """The type of a block, with a layout: to pass on, not to look into."""
        return _block_type(self.dtype, self.data.shape) if self.is_block else self.dtype

    @property
    def T(self) -> "Value":
        return Value(self.data.mT, self.dtype)

    def to(self, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> "Value":
        dtype = getattr(dtype, "value", dtype)
        if bitcast:
            return Value(_reinterpret(as_tensor(self), self.dtype, dtype), dtype)
        is_same = dtype is self.dtype or dtype == self.dtype
        return self if is_same else Value(convert(self.data, dtype), dtype)

    cast = to

    def __getitem__(self, key: Any) -> "Value":
        return Value(as_tensor(self)[key], self.dtype)

    def __bool__(self) -> bool:
        if self.is_block:
            raise TypeError("a block is no condition: write `&`, `|`, `~` for `and`, `or`, `not`")
        return bool(self.data)

    def __index__(self) -> int:
        return operator.index(self.data)

    def __int__(self) -> int:
        return int(self.data)

    def __float__(self) -> float:
        return float(self.data)

    def __neg__(self) -> "Value":
        return Value(fit(-self.data, self.dtype), self.dtype)

    def __invert__(self) -> "Value":
        if self.dtype == tl.int1:
            return Value(~self.data if self.is_block else not self.data, tl.int1)
        return Value(fit(~self.data, self.dtype), self.dtype)

    for _name in "add sub mul truediv floordiv mod and or xor lshift rshift".split():
        locals()[f"__{_name}__"] = _method(_name)
        locals()[f"__r{_name}__"] = _reflected(_name)
    for _name in "lt le gt ge eq ne".split():
        locals()[f"__{_name}__"] = _method(_name)
    __hash__ = None  # type: ignore[assignment]


@functools.cache
def _block_type(dtype: Any, shape: torch.Size) -> Any:
    return gl.distributed_type(dtype, list(shape), gl.AutoLayout())


def to_value(value: Any) -> Any:
    """Numbers become scalars of the kernel, in tuples as well; the rest stays as it is."""
    kind = type(value)
    if kind is Value:
        return value
    if kind is int and -(2**31) <= value < 2**31:  # most
        return Value(value, tl.int32)
    if kind is int or kind is float or kind is bool:
        return Value(fit(value, number_type(value)), number_type(value))
    if isinstance(value, tuple):
        return map_tuple(to_value, value)
    return value


def map_tuple(function: Any, value: tuple[Any, ...]) -> Any:
    """Apply `function` to the items of a tuple, keeping a NamedTuple what it is."""
    items = list(map(function, value))
    if all(map(operator.is_, items, value)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def number_type(number: Any) -> Any:
    """The type that Triton gives a Python number."""
    if isinstance(number, bool):
        return tl.int1
    if isinstance(number, float):
        return tl.float32
    if -(2**31) <= number < 2**31:
        return tl.int32
    return tl.uint32 if 0 <= number < 2**32 else tl.int64


def as_tensor(value: Any) -> torch.Tensor:
    """A block's tensor; a scalar becomes one without dimensions."""
    if not isinstance(value, Value):
        value = to_value(value)
    return value.data if value.is_block else torch.tensor(value.data, dtype=TORCH[value.dtype])


def data_as(value: Any, dtype: Any) -> Any:
    """The number or tensor of an operand, in the given type."""
    if isinstance(value, Value):
        return value.data if value.dtype is dtype else convert(value.data, dtype)
    return fit(value, dtype)


def convert(data: Any, dtype: Any) -> Any:
    """A cast: floats round to nearest or truncate to integers, fp8 saturates."""
    if not isinstance(data, torch.Tensor):
        if dtype is tl.int1:
            return bool(data)
        return fit(float(data), dtype) if dtype.is_floating() else _wrap(int(data), dtype)
    if dtype is tl.int1:
        return data != 0
    if dtype.is_fp8() and data.dtype.is_floating_point:
        limit = torch.finfo(TORCH[dtype]).max
        data = data.float().clamp(-limit, limit)
    data = data.to(TORCH[dtype])
    return data & 0xFFFFFFFF if dtype is tl.uint32 else data


def fit(data: Any, dtype: Any) -> Any:
    """A result of arithmetic in its type: floats rounded, integers checked, unsigned wrapped."""
    if isinstance(data, torch.Tensor):
        if dtype is tl.float32:  # most
            return data.float()
        if dtype is tl.uint32:
            return data & 0xFFFFFFFF
        return data if data.dtype == TORCH[dtype] else data.to(TORCH[dtype])
    if dtype is tl.float32:
        return ctypes.c_float(data).value
    if dtype is tl.int32:
        if not -(2**31) <= data < 2**31:
            raise OverflowError(f"{data} leaves int32: cast to int64 before it")
        return int(data)
    if dtype.is_floating():
        return torch.tensor(data, dtype=torch.float64).to(TORCH[dtype]).item()
    if dtype is tl.int1:
        return bool(data)
    return _wrap(data, dtype)


def _reinterpret(tensor: torch.Tensor, before: Any, after: Any) -> torch.Tensor:
    """Reads the bits as another type; uint32 lies in int64."""
    bits = tensor.int() if before == tl.uint32 else tensor
    return (
        bits.view(torch.int32).long() & 0xFFFFFFFF
        if after == tl.uint32
        else bits.view(TORCH[after])
    )


def _wrap(number: int, dtype: Any) -> int:
    bits = dtype.primitive_bitwidth
    number &= (1 << bits) - 1
    return number - (1 << bits) if dtype.is_int_signed() and number >> (bits - 1) else number


@functools.cache
def _common_type(a: Any, a_is_number: bool, b: Any, b_is_number: bool, divides: bool) -> Any:
    return _semantic.computation_type_impl(a, a_is_number, b, b_is_number, divides)


def common_type(a: Any, b: Any, divides: bool = False) -> Any:
    """The type in which two operands meet; plain numbers adapt to the other one."""
    if type(a) is type(b) is Value and a.dtype is b.dtype and not divides:
        return a.dtype
    a_is_number, b_is_number = not isinstance(a, Value), not isinstance(b, Value)
    a_type = number_type(a) if a_is_number else a.dtype
    b_type = number_type(b) if b_is_number else b.dtype
    if a_type is b_type and not divides:
        return a_type
    return _common_type(a_type, a_is_number, b_type, b_is_number, divides)


_BITWISE = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
}
_DIVISIONS = {"truediv", "floordiv", "mod"}
_OPERANDS = Value, int, float


def binary(name: str, a: Any, b: Any) -> Any:
    """One of Python's operators on values and numbers."""
    if not (isinstance(a, _OPERANDS) and isinstance(b, _OPERANDS)):
        return NotImplemented
    dtype = common_type(a, b, name in _DIVISIONS)
    if name == "truediv" and not dtype.is_floating():
        dtype = tl.float32
    x, y = data_as(a, dtype), data_as(b, dtype)
    if name in _COMPARISONS:
        return Value(_COMPARISONS[name](x, y), tl.int1)
    if name in _EXACT:
        return Value(_exact(_EXACT[name], x, y, dtype), dtype)
    if name in _BITWISE:
        if dtype.is_floating():
            raise TypeError(f"{name} of {dtype}")
        result = _BITWISE[name](x, y)
        if name == "lshift" and not isinstance(result, torch.Tensor):
            return Value(_wrap(result, dtype), dtype)
        return Value(fit(result, dtype), dtype)
    return Value(fit(_divide(name, x, y, dtype), dtype), dtype)


def _exact(operation: Any, x: Any, y: Any, dtype: Any) -> Any:
    if dtype is not tl.int32 or not (isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor)):
        return fit(operation(x, y), dtype)
    # Blocks of int32 are indices: small, and worth a check. One operand makes the result wide
    wide = operation(x.long(), y) if isinstance(x, torch.Tensor) else operation(x, y.long())
    low, high = (bound.item() for bound in wide.aminmax())
    if low < -(2**31) or high >= 2**31:
        raise OverflowError(f"int32 values reach {low} to {high}: cast to int64 before it")
    return wide.int()


def _divide(name: str, x: Any, y: Any, dtype: Any) -> Any:
    if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
        if name == "truediv":
            return x / y
        x, y = (v if isinstance(v, torch.Tensor) else torch.tensor(v) for v in (x, y))
        if name == "mod":
            return torch.fmod(x, y)
        return torch.div(x, y, rounding_mode="trunc")
    if dtype.is_floating():
        if name == "floordiv":
            raise TypeError(f"floor division of {dtype}")
        if not y:
            return math.nan if name == "mod" or not x or x != x else math.copysign(math.inf, x)
        return math.fmod(x, y) if name == "mod" else x / y
    quotient = abs(x) // abs(y)  # truncates towards zero
    quotient = quotient if (x < 0) == (y < 0) else -quotient
    return quotient if name == "floordiv" else x - quotient * y
