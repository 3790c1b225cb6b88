"""What the functions of `triton.language` and of Gluon's `gl` mean on values.

Layouts distribute a block over threads; here a block is one tensor, so layout arguments are
accepted and ignored. Maximum and minimum pass NaN on, so that poison stays visible.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl

from . import barriers, memory
from .machine import Partition, running
from .pointers import Pointer
from .values import TORCH, Value, as_tensor, common_type, data_as, fit, to_value


def program_id(axis: Any) -> Value:
    return Value(running().cta.program[int(axis)], tl.int32)


def num_programs(axis: Any) -> Value:
    return Value(running().machine.grid[int(axis)], tl.int32)


def num_warps() -> int:
    return running().num_warps


# Blocks out of nothing.


def arange(start: Any, end: Any, layout: Any = None) -> Value:
    return Value(_arange(int(start), int(end)), tl.int32)


@functools.lru_cache(maxsize=256)
def _arange(start: int, end: int) -> torch.Tensor:
    with torch.inference_mode(False):  # for launches of either mode
        return torch.arange(start, end, dtype=torch.int32)


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Value:
    shape = [int(n) for n in shape]
    fill = data_as(value, dtype)
    if TORCH[dtype].itemsize == 1 and dtype.is_floating():
        return Value(torch.full(shape, float(fill)).to(TORCH[dtype]), dtype)
    return Value(torch.full(shape, fill, dtype=TORCH[dtype]), dtype)


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Value:
    return full(shape, 0, dtype)


def full_like(
    input: Any, value: Any, shape: Any = None, dtype: Any = None, layout: Any = None
) -> Value:
    return full(shape or input.shape, value, dtype or input.dtype)


def zeros_like(input: Any, shape: Any = None, dtype: Any = None, layout: Any = None) -> Value:
    return full_like(input, 0, shape, dtype)


# Elementwise.


def where(condition: Any, x: Any, y: Any) -> Any:
    condition = to_value(condition)
    if isinstance(x, Pointer) and isinstance(y, Pointer):
        offset = torch.where(as_tensor(condition), *map(torch.as_tensor, (x.offset, y.offset)))
        return x.reshaped(offset)
    dtype = common_type(x, y)
    a, b = data_as(x, dtype), data_as(y, dtype)
    if not any(isinstance(v, torch.Tensor) for v in (condition.data, a, b)):
        return Value(a if condition else b, dtype)
    return Value(fit(torch.where(as_tensor(condition.to(tl.int1)), a, b), dtype), dtype)


def _extremum(of_numbers: Any, of_tensors: Any) -> Callable[..., Any]:
    def extremum(x: Any, y: Any, propagate_nan: Any = None) -> Any:
        if not isinstance(x, Value) and not isinstance(y, Value):
            return of_numbers(x, y)
        if _NUMBERS_ARE_TENSORS:
            x, y = _as_float32(to_value(x)), _as_float32(to_value(y))
        dtype = common_type(x, y)
        a, b = Value(data_as(x, dtype), dtype), Value(data_as(y, dtype), dtype)
        if a.is_block or b.is_block:
            return Value(of_tensors(as_tensor(a), as_tensor(b)), dtype)
        return a if a.data != a.data else b if b.data != b.data else of_numbers(a, b)

    return extremum


# To maximum and minimum, before Triton 3.9; so max(float16, 0.5) was float32.
_NUMBERS_ARE_TENSORS = hasattr(tl.core, "_promote_bfloat16_to_float32")


def _as_float32(x: Value) -> Value:
    return x.to(tl.float32) if x.dtype == tl.bfloat16 else x


maximum = _extremum(max, torch.maximum)
minimum = _extremum(min, torch.minimum)


def clamp(x: Any, min: Any, max: Any, propagate_nan: Any = None) -> Any:
    return minimum(maximum(x, min), max)


def elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    """A function of floats, from torch's. Triton has them for float32 and float64."""

    def on_values(x: Any, *_: Any, **hints: Any) -> Value:
        x = to_value(x)
        if x.dtype not in (tl.float32, tl.float64) and function is not torch.abs:
            raise TypeError(f"{function.__name__} of {x.dtype}: cast to float32 before it")
        if x.dtype == tl.float32 and function is torch.exp2:
            # By way of doubles: torch's result for a number depends on its place and on the CPU
            return Value(function(as_tensor(x).double()).float(), x.dtype)
        if x.dtype == tl.float32 and function is torch.log2:
            # As Triton's interpreter: on some CPUs torch has other bits
            with np.errstate(divide="ignore", invalid="ignore"):
                return Value(torch.as_tensor(np.log2(as_tensor(x).numpy())), x.dtype)
        return Value(function(as_tensor(x)), x.dtype)

    return on_values


def fma(x: Any, y: Any, z: Any) -> Value:
    """Rounded once, as the instruction does."""
    dtype = common_type(to_value(x), to_value(y))
    x, y, z = (as_tensor(Value(data_as(v, dtype), dtype)) for v in (x, y, z))
    return Value((x.double() * y.double() + z.double()).to(TORCH[dtype]), dtype)


def fdiv(x: Any, y: Any, ieee_rounding: Any = False) -> Value:
    return to_value(x) / y


def cdiv(x: Any, div: Any) -> Any:
    return (x + (div - 1)) // div


def cast(input: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False) -> Value:
    return to_value(input).to(dtype, bitcast=bool(bitcast))


def to_tensor(value: Any) -> Any:
    return to_value(value)


def inline_asm_elementwise(
    asm: str, constraints: Any, args: Any, dtype: Any, is_pure: Any, pack: Any
) -> Any:
    """Looked up among the functions that the user gave for assembly, of tensors and pointers."""
    functions = running().machine.asm
    key = " ".join(str(asm).split())
    if key not in functions:
        raise NotImplementedError(f"inline assembly {key!r}: pass emulate(kernel, asm={{...: fn}})")
    results = functions[key](*(x if isinstance(x, Pointer) else as_tensor(x) for x in args))
    if isinstance(dtype, (tuple, list)):
        return tuple(Value(fit(r, kind), kind) for r, kind in zip(results, dtype))
    return Value(fit(results, dtype), dtype)


# Loops, layouts, promises, checks.


def loop_range(first: Any, stop: Any = None, step: Any = 1, **hints: Any) -> Iterator[Value]:
    """A loop of the kernel: its counter is a scalar of the kernel."""
    bounds = (0, first) if stop is None else (first, stop)
    values = [to_value(bound) for bound in (*bounds, step)]
    wide = [v for v in values if v.dtype == tl.int64]
    for i in range(*map(int, values)):
        yield Value(i, tl.int64 if wide else tl.int32)


def static_range(first: Any, stop: Any = None, step: Any = 1, **hints: Any) -> range:
    return range(int(first)) if stop is None else range(int(first), int(stop), int(step))


def same(value: Any, *_: Any, **hints: Any) -> Any:
    return value


def nothing(*_: Any, **hints: Any) -> None:
    pass


def static_assert(cond: Any, msg: Any = "") -> None:
    if not cond:
        raise AssertionError(f"static_assert: {msg}")


def static_print(*values: Any, **hints: Any) -> None:
    print(*values)


def device_print(prefix: Any, *values: Any, **hints: Any) -> None:
    print(running(), prefix, *values)


def device_assert(cond: Any, msg: Any = "", mask: Any = None) -> None:
    holds = as_tensor(cond)
    if mask is not None:
        holds = holds | ~as_tensor(mask)
    if not bool(holds.all()):
        raise AssertionError(f"device_assert in {running()}: {msg}")


# Shared memory and partitions.


def allocate_shared_memory(dtype: Any, shape: Any, layout: Any, value: Any = None) -> Any:
    if type(layout).__name__ == "MBarrierLayout":
        return barriers.allocate_barriers(dtype, shape, layout)
    return memory.allocate(dtype, shape, layout, value)


def barrier(*_: Any, **hints: Any) -> None:
    """The warps of a partition meet: they are one thread here."""
    running().pause()


def warp_specialize(
    functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any = None
) -> Any:
    """Start a partition for every function but the first, run that one here, and join them."""
    root = running()
    (default, arguments), *workers_and_args = functions_and_args
    warps = [int(n) for n in worker_num_warps]
    if len(warps) != len(workers_and_args):
        raise ValueError(
            f"{len(workers_and_args)} worker partitions and {len(warps)} counts of warps"
        )
    names = _names([function for function, _ in functions_and_args])
    workers = []
    for name, (function, args), count in zip(names[1:], workers_and_args, warps):
        worker = Partition(root.cta, name, count, _call(function, args))
        root.machine.start(worker)
        workers.append(worker)
    outer, root.name = root.name, names[0]
    result = default(*arguments)
    root.name = outer
    root.wait(lambda: all(w.is_done for w in workers), lambda: "waits for its workers to end")
    return result


def _call(function: Any, args: Any) -> Callable[[], Any]:
    return lambda: function(*args)


def _names(functions: list[Any]) -> list[str]:
    """Function names, numbered where one function is several partitions."""
    names = [function.__name__ for function in functions]
    return [
        name if names.count(name) == 1 else f"{name}[{names[:i].count(name)}]"
        for i, name in enumerate(names)
    ]
