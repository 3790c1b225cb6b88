"""Types of Triton's interpreter, made once each and compared by identity where that is enough.

Each operation creates a tensor and its type: as shipped, a quarter of a kernel's time goes into
their shapes, names and numpy's dtypes, which are those of the operation before, and as much into
finding that two operands have one type and shape.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from triton.language.semantic import TritonSemantic

# What loses nothing or rounds to nearest, by names of Triton's types
_CONVERSIONS = {
    ("int32", "int64"): np.int64,
    ("int32", "fp32"): np.float32,
    ("fp16", "fp32"): np.float32,
}
_UNWRAPPED = frozenset({tl.tensor, int, float, bool, str, slice, type(None)})


def patches() -> Iterator[tuple[Any, str, Any]]:
    """What to replace while kernels are interpreted: the owner, the name, the value."""
    yield triton_interpreter, "_get_np_dtype", _dtypes(triton_interpreter._get_np_dtype)
    yield tl.block_type, "__init__", _blocks(tl.block_type.__init__)
    yield tl.tensor, "__init__", _tensors(tl.tensor.__init__)
    yield tl.dtype, "__eq__", _equal(tl.dtype.__eq__)
    yield tl.core, "_unwrap_if_constexpr", _unwrap(tl.core._unwrap_if_constexpr)
    semantic = TritonSemantic
    yield semantic, "broadcast_impl_value", _broadcast(semantic.broadcast_impl_value)
    yield semantic, "cast", _cast(semantic.cast)
    yield semantic, "computation_type_impl", _common_type(semantic.computation_type_impl)


def _dtypes(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    made_by_name: dict[str, Any] = {}

    def dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in made_by_name:
            made_by_name[name] = make(kind)
        return made_by_name[name]

    return dtype_of


def _blocks(make: Callable[..., None]) -> Callable[..., None]:
    attributes: dict[tuple, dict[str, Any]] = {}
    shapes: dict[tuple, Any] = {}  # one for all element types, which `_broadcast` compares

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(x, "value", x) for x in shape)
        if key in attributes:
            self.__dict__.update(attributes[key])
            self.element_ty = element_ty
        else:
            make(self, element_ty, shape)
            self.shape = shapes.setdefault(key[1:], self.shape)
            attributes[key] = dict(self.__dict__)

    return __init__


def _tensors(make: Callable[..., None]) -> Callable[..., None]:
    shapes: dict[str, tuple] = {}

    def __init__(self: Any, handle: Any, type: Any) -> None:
        if type.name in shapes:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = shapes[type.name]
        else:
            make(self, handle, type)
            shapes[type.name] = self.shape, self.numel

    return __init__


def _unwrap(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind is tl.constexpr:
            return value.value
        return value if kind in _UNWRAPPED else make(value)

    return unwrap


def _equal(compare: Callable[..., bool]) -> Callable[..., bool]:
    def __eq__(self: Any, other: Any) -> bool:
        return self.name == other.name if type(other) is tl.dtype else compare(self, other)

    return __eq__


def _broadcast(make: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        shape = getattr(lhs.type, "shape", None)  # None of a scalar
        same = shape is getattr(rhs.type, "shape", None)
        return (lhs, rhs) if same else make(self, lhs, rhs)

    return broadcast_impl_value


def _cast(make: Callable[..., Any]) -> Callable[..., Any]:
    def cast(self: Any, input: Any, dst_ty: Any, *rounding: Any, **named: Any) -> Any:
        kind = input.type
        if kind.scalar is dst_ty:
            return input
        numpy = _CONVERSIONS.get((kind.scalar.name, dst_ty.scalar.name))
        if numpy is None or any(rounding) or named:
            return make(self, input, dst_ty, *rounding, **named)
        to = dst_ty.scalar
        handle = triton_interpreter.TensorHandle(input.handle.data.astype(numpy), to)
        return tl.tensor(handle, kind.with_element_ty(to) if kind.is_block() else to)

    return cast


def _common_type(find: Callable[..., Any]) -> Callable[..., Any]:
    def computation_type_impl(self: Any, a: Any, a_is_scalar: Any, b: Any, *rest: Any) -> Any:
        divides = rest[-1]
        return a if a is b and not divides else find(self, a, a_is_scalar, b, *rest)

    return computation_type_impl
