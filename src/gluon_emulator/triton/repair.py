"""bfloat16 and fp8 in Triton's interpreter, made to round as a GPU does.

The interpreter keeps these types as integers of the same width. As shipped, arithmetic then works
on those integers, float32 to bfloat16 truncates, and fp8 loses subnormals. Fixed here: bfloat16
arithmetic is float32 arithmetic rounded to nearest even, casts are torch's, and a cast to fp8
saturates, as PTX's satfinite does. Products of matrices are summed in float64 and rounded once: in
float32, numpy's BLAS sums a row in an order that depends on the row's place, where a tensor core's
does not.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from .reduce import generic_reduce

_TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_TORCH_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Elementwise operations whose name does not begin with create_f.
_FLOAT_OPS = (
    "ceil clampf cos erf exp exp2 log log2 maximumf maxnumf minimumf minnumf precise_divf"
    " precise_sqrt rsqrt sin sqrt"
).split()
_CASTS = ("create_fp_ext", "create_fp_to_fp", "create_fp_to_si", "create_fp_to_ui",
          "create_fp_trunc")  # fmt: skip

_repaired = False


def repair() -> None:
    """Fixes bfloat16 and fp8 in Triton's interpreter for this process, once; `interpret` calls it.

    Example:
        >>> repair()
    """
    global _repaired
    if _repaired:
        return
    _repaired = True
    builder = InterpreterBuilder
    for name in dir(builder):
        elementwise = name.startswith("create_f") and name not in _CASTS
        if elementwise or name.removeprefix("create_") in _FLOAT_OPS:
            setattr(builder, name, _in_float32(getattr(builder, name)))
    builder.create_exp2 = _rounded_once(builder.create_exp2)
    # A GPU's max and min drop NaN; so do these from Triton 3.8 on.
    builder.create_maxnumf = _in_float32(lambda self, a, b: self.binary_op(a, b, np.fmax))
    builder.create_minnumf = _in_float32(lambda self, a, b: self.binary_op(a, b, np.fmin))
    builder.create_clampf = _in_float32(_clamp)
    builder.create_dot = _dot(builder.create_dot)
    builder.cast_impl = _cast(builder.cast_impl)
    builder.get_bf16 = lambda self, value: TensorHandle(
        _to_bfloat16(np.array([value], np.float32)), tl.bfloat16
    )
    triton_interpreter._convert_float = _convert(triton_interpreter._convert_float)
    triton_interpreter.ReduceOps.generic_reduce = generic_reduce


def _is_bfloat16(x: Any) -> bool:
    is_value = isinstance(x, TensorHandle) and not isinstance(x.dtype, tl.pointer_type)
    return is_value and x.dtype.scalar == tl.bfloat16


def _widen(x: Any) -> Any:
    if not _is_bfloat16(x):
        return x
    return TensorHandle((x.data.astype(np.uint32) << np.uint32(16)).view(np.float32), tl.float32)


def _to_bfloat16(data: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16's bits, to nearest even."""
    bits = np.ascontiguousarray(data, np.float32).view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + half) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)


def _in_float32(op: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(map(_is_bfloat16, args)):
            return op(self, *args, **kwargs)
        result = op(self, *map(_widen, args), **kwargs)
        if result.data.dtype != np.float32:  # a comparison
            return result
        return TensorHandle(_to_bfloat16(result.data), tl.bfloat16)

    return wrapped


def _rounded_once(op: Callable[..., Any]) -> Callable[..., Any]:
    """By way of doubles, as the emulator: in fp32 NumPy has other bits than torch, by the CPU."""

    def wrapped(self: Any, x: Any) -> Any:
        if x.dtype.scalar != tl.float32:
            return op(self, x)
        result = op(self, TensorHandle(x.data.astype(np.float64), tl.float64)).data
        with np.errstate(over="ignore"):
            return TensorHandle(result.astype(np.float32), tl.float32)

    return wrapped


def _clamp(self: Any, x: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
    if propagate_nan == triton_interpreter._ir.PROPAGATE_NAN.NONE:
        return self.binary_op(self.binary_op(x, low, np.fmax), high, np.fmin)
    return self.ternary_op(x, low, high, np.clip)


def _dot(op: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        a, b, acc = map(_widen, (a, b, d))
        if acc.dtype.scalar == tl.float32:
            zeros = TensorHandle(np.zeros(acc.data.shape), tl.float64)
            product = op(self, a, b, zeros, *options).data.astype(np.float32)
            result = TensorHandle(product + acc.data, tl.float32)
        else:
            result = op(self, a, b, acc, *options)
        if _is_bfloat16(d):
            return TensorHandle(_to_bfloat16(result.data), tl.bfloat16)
        return result

    return create_dot


def _cast(op: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar == tl.bfloat16 and not _is_bfloat16(src):
            return TensorHandle(_to_bfloat16(src.data.astype(np.float32)), tl.bfloat16)
        return op(self, _widen(src), dst_type)

    return cast_impl


def _convert(op: Callable[..., Any]) -> Callable[..., Any]:
    def convert_float(data: np.ndarray, src: Any, dst: Any, rounding: Any) -> np.ndarray:
        """Bits in, bits out."""
        src, dst = src.scalar, dst.scalar
        toward_zero = triton_interpreter._ir.ROUNDING_MODE.RTZ
        if src not in _TORCH or dst not in _TORCH or rounding == toward_zero:
            return op(data, src, dst, rounding)
        size_in, size_out = src.primitive_bitwidth // 8, dst.primitive_bitwidth // 8
        bits = np.array(data, order="C").view(_SIGNED[size_in])
        value = torch.from_numpy(bits).view(_TORCH[src])
        if size_out == 1 and size_in > 1:
            limit = torch.finfo(_TORCH[dst]).max
            value = value.to(torch.float32).clamp(-limit, limit)
        value = value.to(_TORCH[dst]).view(_TORCH_INT[size_out])
        return value.numpy().view(_UNSIGNED[size_out])

    return convert_float
