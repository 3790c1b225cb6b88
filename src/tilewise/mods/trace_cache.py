"""A cache of traces, valid as long as a function reads the same globals and free variables.

Tracing takes 100 us and more, and a model passes the same function at every call. A function may
read numbers and tensors from its environment, which may change between calls. So a trace is stored
with all that the function read. It is not cached unless the function's bytecode proves that it
reads nothing else (`tilewise.mods.bytecode`), nor if the function computes with a tensor: kernels
read tensors at every call, and torch only during the trace.
"""

from __future__ import annotations

import functools
import math
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from .bytecode import PURE, Paths, reads_in
from .function import TracedFunction
from .functions import METHODS, TAKEN
from .symbols import BINARY, COMPARED, UNARY, symbols_in
from .trace import maximum, minimum, where

Made = TypeVar("Made", bound=TracedFunction)


class CachedTrace(NamedTuple):
    """A function's trace, with the code, the tracer and all that the function read then."""

    code: types.CodeType
    proven: Paths | None
    make: Callable | None = None
    reads: tuple | None = None
    trace: Any = None  # what `make` returned


_traces: weakref.WeakKeyDictionary[Callable, CachedTrace] = weakref.WeakKeyDictionary()
# By code too: a function that is created at every call has the same code
_proven: weakref.WeakKeyDictionary[types.CodeType, Paths | None] = weakref.WeakKeyDictionary()


def trace_once(function: Callable, make: Callable[[Callable], Made]) -> Made:
    """make(function), or the cached result."""
    if type(function) is not types.FunctionType or torch.compiler.is_compiling():
        return make(function)
    reads = reads_of(function)
    if reads is None:
        return make(function)
    before = _traces[function]
    if before.make is make and before.reads == reads:
        return before.trace
    recorder = _TorchRecorder()

    @functools.wraps(function)
    def recorded(*symbols):
        with recorder:
            return function(*symbols)

    traced = make(recorded)
    if not recorder.computed:
        _traces[function] = before._replace(make=make, reads=reads, trace=traced)
    return traced


def reads_of(function: types.FunctionType, readers: tuple = ()) -> tuple | None:
    """All that a function reads from around it, or None where that is not proven. `readers` are the
    functions that call it.

    >>> reads_of(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)[1:]
    ()
    """
    code, proven = function.__code__, _proof(function)
    if proven is None or function in readers:
        return None
    variables, cells = function.__globals__, function.__closure__ or ()
    facts: list[object] = [code]
    readers = *readers, function
    for name, *attributes in proven:
        if name in code.co_freevars:
            try:
                value = cells[code.co_freevars.index(name)].cell_contents
            except ValueError:  # a name that has no value yet
                return None
            fact = _read(value, attributes, readers=readers)
        elif name in variables:
            fact = _read(variables[name], attributes, readers=readers)
        elif name in PURE and not attributes and function.__builtins__.get(name) is PURE[name]:
            fact = name
        else:
            return None
        if fact is None:
            return None
        facts.append(fact)
    if function.__defaults__:
        facts += [_read(value, (), readers=readers) for value in function.__defaults__]
    if function.__kwdefaults__:
        for name, value in function.__kwdefaults__.items():
            facts += name, _read(value, (), readers=readers)
    return None if None in facts else tuple(facts)


def _proof(function: types.FunctionType) -> Paths | None:
    """What the function's code is proven to read; a function may get another code."""
    code, cached = function.__code__, _traces.get(function)
    if cached is not None and cached.code is code:
        return cached.proven
    if code not in _proven:
        _proven[code] = reads_in(code, _SYMBOLS)
    _traces[function] = CachedTrace(code, _proven[code])
    return _proven[code]


def _read(value: Any, attributes: list[str] | tuple[str, ...], readers: tuple) -> tuple | None:
    """How to tell a value, or what its attributes lead to, from another one."""
    for name in attributes:
        if type(value) in _TENSORS and len(attributes) == 1:
            if name in _SEEN or (name in _METHODS and name not in vars(value)):
                break  # it follows from what the tensor is told by
        if type(value) is not types.ModuleType or name not in vars(value):
            return None
        value = vars(value)[name]
    kind = type(value)
    if kind in (bool, int, float):
        return kind, repr(value)  # 0.0 is not -0.0
    if kind in (str, types.NoneType, torch.dtype):
        return kind, value
    if kind in _TENSORS:
        return Same(value), value.dtype, value.shape, value.device
    if isinstance(value, TracedFunction) or (kind in _FUNCTIONS and value in _KNOWN):
        return (Same(value),)
    return reads_of(value, readers) if kind is types.FunctionType else None


_TENSORS = torch.Tensor, torch.nn.Parameter
_FUNCTIONS = types.FunctionType, types.BuiltinFunctionType
_SEEN = {"shape", "ndim", "dtype", "device"}  # no tensor can have another of its own
_METHODS = {"size", "dim", "numel"}
_ROOMS = torch, torch.nn.functional
# Functions that depend on their arguments alone
_KNOWN = {
    *(x for x in vars(math).values() if isinstance(x, types.BuiltinFunctionType)),
    *(getattr(operator, f"__{name}__") for name in (*BINARY, *COMPARED, *UNARY, "getitem")),
    *(getattr(room, name) for room in _ROOMS for name in TAKEN if hasattr(room, name)),
    *(where, minimum, maximum),
    *(PURE[name] for name in PURE if isinstance(PURE[name], types.BuiltinFunctionType)),
}


# Methods of symbols, which torch's tensors have too: of these a call is recorded
_SYMBOLS = frozenset({*TAKEN, *METHODS, "dtype"})


# What torch is asked about a tensor that `_read` tells by, or that no value changes
_LOOKS = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_complex,
    torch.Tensor.__len__,
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device")),
}


class _TorchRecorder(TorchFunctionMode):
    """Whether a function has torch compute something else than a step of the tree."""

    computed = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _LOOKS and not symbols_in(args, kwargs):
            self.computed = True
        return func(*args, **kwargs)


class Same:
    """Equal to another of the same object, and to none when that is gone; keeps nothing alive."""

    def __init__(self, value: Any) -> None:
        self.value = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        mine = self.value()
        return isinstance(other, Same) and mine is not None and mine is other.value()
