"""Run a Triton kernel on CPU tensors, program by program, in Python.

Triton's own interpreter is chosen once per process, by an environment variable read before its
import, and then nothing compiles. This one is chosen per launch: an ordinary `@triton.jit` kernel
runs here and compiles for a GPU in the same process. It reuses Triton's tensor operations with
fixes (bfloat16 and fp8 are wrong as shipped, see `repair`), and it is stricter: addresses must lie
in the arguments, int32 must not overflow, and a block has no truth value.

One program costs a few milliseconds a tile, whatever the tile's size. Not run here: inline
assembly, libdevice, bfloat16 atomics, Gluon. Needs numpy.
"""

import contextlib
import functools
import inspect
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import triton
import triton.experimental.gluon.language  # it takes over names that are patched below
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from triton.language.semantic import TritonSemantic
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction

from ..source import as_compiled
from . import known_types, operators
from .guard import checked_integers, guarded, unchecked_integers
from .repair import repair

_one_at_a_time = threading.RLock()
_builder = triton_interpreter.interpreter_builder
_semantic = triton_interpreter.interpreter_semantic
_ABSENT = object()
_OPERATORS = "add sub mul truediv floordiv mod and or xor lshift rshift lt le gt ge eq ne".split()
_OVERFLOW_CHECK = "binary_op_sanitize_overflow_impl"
_COMPILER = ("triton.language.core", "triton.language.semantic")
_helpers: weakref.WeakKeyDictionary[Callable, Callable] = weakref.WeakKeyDictionary()  # rewritten


class interpret:
    """Launches a `@triton.jit` kernel on CPU tensors: `interpret(kernel)[grid](*args, **meta)`.

    Example:
        >>> @triton.jit
        ... def double_kernel(x, n, BLOCK: tl.constexpr):
        ...     offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        ...     keep = offs < n
        ...     tl.store(x + offs, 2 * tl.load(x + offs, mask=keep), mask=keep)
        >>> x = torch.ones(5, dtype=torch.bfloat16)
        >>> interpret(double_kernel)[(2,)](x, 5, BLOCK=4)
        >>> x.tolist()
        [2.0, 2.0, 2.0, 2.0, 2.0]

    Arguments are those of a launch on a GPU: CPU tensors, host descriptors, numbers, None, tuples
    and NamedTuples of them, nested as you like. Launch options such as num_warps are ignored, of an
    autotuned kernel the first configuration runs, and the grid may be a tuple or a function.

    Args:
        kernel: a `@triton.jit` kernel.
        check: whether to check addresses and int32 overflow.

    Raises:
        IndexError: an access outside the storage of every argument.
        OverflowError: an int32 operation overflows.
        AssertionError: a `tl.device_assert` fails.
        TypeError: a block is used as a condition.
        ValueError: a tensor is on a device.
    """

    def __init__(self, kernel: Any, check: bool = True) -> None:
        self.kernel, self.check = kernel, check

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **meta: self._run(grid, args, meta)

    def _run(self, grid: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        kernel, meta = _resolve(self.kernel, args, meta)
        names = [param.name for param in kernel.params]
        arguments = {name: value for name, value in meta.items() if name in names}
        arguments = inspect.getcallargs(kernel.fn, *args, **arguments)
        size = grid(arguments) if callable(grid) else grid
        nx, ny, nz = (*size, 1, 1)[:3]
        with interpreting(arguments, self.check):
            constants = {param.name for param in kernel.params if param.is_constexpr}
            arguments = {
                name: _unwrap(value) if name in constants else _as_argument(value)
                for name, value in arguments.items()
            }
            fn = as_compiled(kernel.fn, _to_tensor, _loop_range)
            _builder.set_grid_dim(nx, ny, nz)
            # The first axis runs fastest, as on a GPU.
            for z, y, x in np.ndindex(nz, ny, nx):
                _builder.set_grid_idx(x, y, z)
                fn(**arguments)


@contextlib.contextmanager
def interpreting(args: Any, check: bool = True) -> Iterator[None]:
    """Gives `triton.language` its meaning on numpy arrays within this block, for calling jitted
    functions by hand.

    Triton is patched for the whole process, under a lock: do not compile in another thread
    meanwhile.

    Args:
        args: the tensors that `check` lets kernels address.
        check: whether to check addresses and int32 overflow.
    """
    repair()
    knobs = triton.knobs
    with contextlib.ExitStack() as stack:
        stack.enter_context(_one_at_a_time)
        stack.enter_context(knobs.runtime.scope())
        stack.enter_context(knobs.compilation.scope())
        stack.enter_context(np.errstate(all="ignore"))  # masked lanes compute too
        knobs.runtime.interpret = True  # constants stay plain Python values
        stack.enter_context(_attributes((*_language(), *_checks(args, check))))
        yield


@functools.cache
def _language() -> list[tuple[Any, str, Any]]:
    """What to replace in Triton: its own interpreter's patches, and those in addition to them."""
    names = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    patched = triton_interpreter._patch_lang(names)
    places = {(id(owner), name): owner for owner, name, _ in patched._changes}
    shipped = [(owner, name, vars(owner)[name]) for (_, name), owner in places.items()]
    patched.restore()
    own = [(owner, name, _with_semantic(value)) for owner, name, value in shipped]
    with _attributes(own):
        return [*own, *_in_addition()]


def _with_semantic(patch: Any) -> Any:
    """As shipped, a builtin's patch copies its keywords, and the builtin looks for one of them."""
    builtin = (getattr(patch, "__kwdefaults__", None) or {}).get("member")
    if builtin is None:
        return patch
    function = getattr(builtin, "__wrapped__", builtin)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = _semantic
        return function(*args, **kwargs)

    return call


def _in_addition() -> Iterator[tuple[Any, str, Any]]:
    # Those are in place for the whole launch: a call of a helper need not put them in again.
    inert = types.SimpleNamespace(restore=lambda: None)
    yield triton_interpreter, "_patch_lang", lambda fn: inert
    for kind in (JITFunction, triton_interpreter.InterpretedFunction):
        yield kind, "__call__", _call_helper
        yield kind, "__get__", _bind_method  # x.sum(1)
    yield from known_types.patches()
    yield from operators.patches()
    yield tl.tensor, "__bool__", _truth
    yield tl.tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0])
    for module in (tl, tl.core):
        yield module, "range", _loop_range
    for name in _OPERATORS:
        dunder = f"__{name}__"
        yield tl.constexpr, dunder, _defer_to_tensor(getattr(tl.constexpr, dunder))


def _checks(args: Any, check: bool) -> Iterator[tuple[Any, str, Any]]:
    def program() -> Any:
        return _builder.grid_idx

    if not check:
        yield TritonSemantic, _OVERFLOW_CHECK, unchecked_integers
        return
    yield TritonSemantic, _OVERFLOW_CHECK, checked_integers(program)
    memory = guarded(triton_interpreter._interpreter, args, program)
    yield triton_interpreter, "_interpreter", memory
    # tl.device_assert is silent without.
    yield _builder, "options", triton_interpreter.InterpreterOptions(debug=True)


@contextlib.contextmanager
def _attributes(patches: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replaces attributes, the last value of each counts, within this block."""
    before = []
    try:
        for owner, name, value in patches:
            before.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _call_helper(self: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("_semantic", None)
    fn = _helpers.get(self.fn)
    if fn is None:
        fn = _helpers[self.fn] = as_compiled(self.fn, _to_tensor, _loop_range)
    return fn(*args, **kwargs)


def _bind_method(self: Any, instance: Any, owner: Any = None) -> Any:
    return self if instance is None else types.MethodType(self, instance)


def _truth(self: tl.tensor) -> bool:
    # Compiled tensors have no truth value: Triton's own `if other` asks whether there is one.
    if sys._getframe(1).f_globals.get("__name__") in _COMPILER:
        return True
    if self.handle.data.size != 1:
        raise TypeError(
            "a block is no condition: write `&`, `|`, `~` for `and`, `or`, `not`,"
            " and `(a <= x) & (x < b)` for `a <= x < b`"
        )
    return bool(self.handle.data.reshape(-1)[0])


def _defer_to_tensor(method: Callable[..., Any]) -> Callable[..., Any]:
    """In a kernel a constexpr and a tensor make a tensor; plain Python would wrap it again."""

    def operator(self: tl.constexpr, other: Any) -> Any:
        return NotImplemented if isinstance(other, tl.tensor) else method(self, other)

    return operator


def _loop_range(first: Any, stop: Any = None, step: Any = None, **hints: Any) -> Iterator[Any]:
    start, stop = (0, first) if stop is None else (first, stop)
    step = 1 if step is None else step
    bounds = [b for b in (start, stop, step) if isinstance(b, tl.tensor)]
    wide = any(bound.dtype.primitive_bitwidth == 64 for bound in bounds)
    for i in range(_index(start), _index(stop), _index(step)):
        yield _semantic.scalar_constant(i, tl.int64) if wide else _semantic.to_tensor(i)


def _index(value: Any) -> int:
    return int(_unwrap(value).__index__())


def _unwrap(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def _map_tuple(function: Callable[[Any], Any], value: tuple[Any, ...]) -> Any:
    items = [function(item) for item in value]
    if all(map(operator.is_, items, value)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def _to_tensor(value: Any) -> Any:
    """What an assignment makes of a value: numbers become tensors, in tuples as well."""
    if type(value) is tl.tensor:
        return value
    if isinstance(value, tuple):
        return _map_tuple(_to_tensor, value)
    return _semantic.to_tensor(value, check_type=False)


def _as_argument(value: Any) -> Any:
    """What a launch makes of an argument that is not a constant."""
    if isinstance(value, tuple):
        return _map_tuple(_as_argument, value)
    if isinstance(value, (bool, float)):
        return _semantic.to_tensor(value)
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        raise ValueError(f"the interpreter runs on CPU tensors, got one on {value.device}")
    return triton_interpreter._implicit_cvt(value)


def _resolve(
    kernel: Any, args: tuple[Any, ...], meta: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Take autotuning and heuristics off a kernel, and put what they add into `meta`."""
    while isinstance(kernel, (Autotuner, Heuristics)):
        if isinstance(kernel, Autotuner):
            meta = {**kernel.configs[0].kwargs, **meta}
        else:
            positional = dict(zip(kernel.arg_names, args))
            for name, rule in kernel.values.items():
                meta = {**meta, name: rule({**positional, **meta})}
        kernel = kernel.fn
    if isinstance(kernel, triton_interpreter.InterpretedFunction):
        kernel = JITFunction(kernel.fn)
    if type(kernel) is not JITFunction:
        raise TypeError(f"expected a @triton.jit kernel, got {type(kernel).__name__}")
    return kernel, meta
