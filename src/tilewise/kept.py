"""What a function was traced to, kept for as long as the function reads the same things.

Tracing takes a function apart, a hundred microseconds and more, and a model passes the same one at
every call. A function may read numbers and tensors from around it, and those may be others the next
time. So what is kept goes with all that was read, and nothing is kept of a function that could read
what cannot be seen from here, such as an attribute of some object, or that computes with a tensor,
whose values are read by kernels at every call but by torch only now.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from .symbols import symbols_in
from .traced import TracedFunction

Made = TypeVar("Made", bound=TracedFunction)

# A module that these come from holds no settings that a function would read
_LIBRARIES = ("builtins", "math", "operator", "tilewise", "torch")
_kept: weakref.WeakKeyDictionary[Callable, tuple[tuple, TracedFunction]]
_kept = weakref.WeakKeyDictionary()


def kept(function: Callable, make: Callable[[Callable], Made]) -> Made:
    """make(function), or what that was before."""
    if type(function) is not types.FunctionType or torch.compiler.is_compiling():
        return make(function)
    reads = reads_of(function)
    if reads is None:
        return make(function)
    before = _kept.get(function)
    if before is not None and before[0] == reads:
        return before[1]
    listener = _Listener()

    @functools.wraps(function)
    def heard(*symbols):
        with listener:
            return function(*symbols)

    made = make(heard)
    if not listener.computed:
        _kept[function] = reads, made
    return made


def reads_of(function: types.FunctionType) -> tuple | None:
    """All that a function reads from around it, or None where that is not to be seen.

    >>> reads_of(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    ()
    """
    code = function.__code__
    if any(isinstance(x, types.CodeType) for x in code.co_consts):
        return None
    try:
        around = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a name that has no value yet
        return None
    around += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    # The names of attributes are among these, too; one that is also a global's does no harm
    around += [function.__globals__[x] for x in code.co_names if x in function.__globals__]
    found = tuple(map(_read, around))
    return None if None in found else found


def _read(value: Any) -> tuple | None:
    """How to tell a value from another one."""
    if type(value) in (bool, int, float):
        return type(value), repr(value)  # 0.0 is not -0.0
    if isinstance(value, types.ModuleType):
        library = value.__name__
    elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        library = value.__module__ or ""
    elif type(value) in (torch.Tensor, torch.nn.Parameter):
        return _Same(value), value.dtype, value.shape
    elif isinstance(value, TracedFunction):
        return (_Same(value),)
    else:
        return None
    return (_Same(value),) if library.split(".")[0] in _LIBRARIES else None


# What torch is asked about a tensor that `_read` tells by, or that no value changes
_LOOKS = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_complex,
    torch.Tensor.__len__,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")),
}


class _Listener(TorchFunctionMode):
    """Whether a function has torch compute something else than a step of the tree."""

    computed = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _LOOKS and not symbols_in(args, kwargs):
            self.computed = True
        return func(*args, **kwargs)


class _Same:
    """Equal to another of the same object, and to none when that is gone; keeps nothing alive."""

    def __init__(self, value: Any) -> None:
        self.value = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        mine = self.value()
        return isinstance(other, _Same) and mine is not None and mine is other.value()

    __hash__ = None
