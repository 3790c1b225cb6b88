"""What reshapes a block, and what reduces one."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import triton.language as tl

from .pointers import Pointer
from .values import Value, as_tensor, common_type, data_as, fit, to_value


def expand_dims(input: Any, axis: Any) -> Any:
    axes = [int(a) for a in axis] if isinstance(axis, (tuple, list)) else [int(axis)]
    is_pointer = isinstance(input, Pointer)
    tensor = torch.as_tensor(input.offset) if is_pointer else as_tensor(input)
    for a in sorted(a if a >= 0 else a + tensor.dim() + len(axes) for a in axes):
        tensor = tensor.unsqueeze(a)
    return input.reshaped(tensor) if is_pointer else Value(tensor, input.dtype)


def broadcast_to(input: Any, *shape: Any) -> Any:
    size = _shape(shape)
    if isinstance(input, Pointer):
        return input.reshaped(torch.as_tensor(input.offset).expand(size))
    input = to_value(input)
    return Value(as_tensor(input).expand(size), input.dtype)


def broadcast(input: Any, other: Any) -> tuple[Value, Value]:
    x, y = torch.broadcast_tensors(as_tensor(input), as_tensor(other))
    return Value(x, to_value(input).dtype), Value(y, to_value(other).dtype)


def reshape(input: Any, *shape: Any, can_reorder: Any = False) -> Value:
    return Value(as_tensor(input).reshape(_shape(shape)), input.dtype)


def ravel(x: Any, can_reorder: Any = False) -> Value:
    return reshape(x, [x.numel])


def permute(input: Any, *dims: Any) -> Value:
    return Value(as_tensor(input).permute(_shape(dims)), input.dtype)


def trans(input: Any, *dims: Any) -> Value:
    return permute(input, *dims) if dims else input.T


def join(a: Any, b: Any) -> Value:
    dtype = common_type(a, b)
    return Value(torch.stack([data_as(a, dtype), data_as(b, dtype)], -1), dtype)


def split(a: Any) -> tuple[Value, Value]:
    low, high = as_tensor(a).unbind(-1)
    return Value(low, a.dtype), Value(high, a.dtype)


def _shape(given: tuple[Any, ...]) -> list[int]:
    single = len(given) == 1 and isinstance(given[0], (tuple, list))
    return [int(n) for n in (given[0] if single else given)]


# Reductions.


def sum(input: Any, axis: Any = None, keep_dims: Any = False, dtype: Any = None) -> Value:
    """Small integers are summed in 32 bits."""
    kind = dtype or input.dtype
    if dtype is None and kind.is_int() and kind.primitive_bitwidth < 32:
        kind = tl.int32 if kind.is_int_signed() else tl.uint32
    x = data_as(input, kind)
    total = x.sum(_axes(x, axis), bool(keep_dims), dtype=x.dtype)
    return Value(fit(total, kind), kind)


def cumsum(input: Any, axis: Any = 0, reverse: Any = False, dtype: Any = None) -> Value:
    """Prefix sums, summed in the type that `sum` takes."""
    kind = sum(input, axis, dtype=dtype).dtype
    x = data_as(input, kind)
    axis = int(axis)
    total = x.flip(axis).cumsum(axis).flip(axis) if reverse else x.cumsum(axis)
    return Value(fit(total, kind), kind)


def associative_scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False) -> Value:
    """What a function of the kernel's own makes of each element and all before it."""
    rows = [Value(row, input.dtype) for row in as_tensor(input).unbind(int(axis))]
    folded = list(accumulate(rows[::-1] if reverse else rows, combine_fn))
    folded = folded[::-1] if reverse else folded
    return Value(torch.stack([as_tensor(row) for row in folded], int(axis)), input.dtype)


def _extreme(best: Any, best_place: Any) -> Callable[..., Any]:
    def extreme(
        input: Any,
        axis: Any = None,
        return_indices: Any = False,
        return_indices_tie_break_left: Any = True,
        keep_dims: Any = False,
    ) -> Any:
        kind = input.dtype
        if kind.primitive_bitwidth < 32:
            kind = tl.float32 if kind.is_floating() else tl.int32
        x = data_as(input, kind)
        value = Value(best(x, _axes(x, axis), bool(keep_dims)), kind)
        if not return_indices:
            return value
        place = best_place(x, None if axis is None else int(axis), bool(keep_dims))
        return value, Value(place.int(), tl.int32)

    return extreme


def _axes(x: torch.Tensor, axis: Any) -> list[int]:
    return list(range(x.dim())) if axis is None else [int(axis)]


max = _extreme(torch.amax, torch.argmax)
min = _extreme(torch.amin, torch.argmin)


def reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False) -> Any:
    """Fold a block, or a tuple of blocks, with a function of the kernel's own."""
    several = isinstance(input, tuple)
    blocks = input if several else (input,)
    if axis is None:
        blocks, axis = [ravel(block) for block in blocks], 0
    columns = [as_tensor(block).unbind(int(axis)) for block in blocks]
    rows = [tuple(Value(t, block.dtype) for t, block in zip(row, blocks)) for row in zip(*columns)]
    folded = rows[0]
    for row in rows[1:]:
        folded = combine_fn(*folded, *row)
        folded = folded if isinstance(folded, tuple) else (folded,)
    if keep_dims:
        folded = tuple(expand_dims(value, axis) for value in folded)
    return folded if several else folded[0]
