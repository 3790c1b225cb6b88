"""A kernel taken apart and put together again as plain Python, and its launch.

Every global that a kernel or a function it calls can reach is replaced by what it means here: see
`vocabulary`. JIT functions are rebuilt from their own code with such globals; classes, layouts,
types and constants stay what they are. Files and lines stay too, so a debugger steps through the
kernel's source.
"""

import builtins
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from ..source import as_compiled
from . import language, tma
from .arrivals import Arrivals
from .machine import Cta, Machine, Partition
from .pointers import Pointer
from .values import Value, map_tuple, to_value
from .vocabulary import is_builtin, meanings, unknown

_ABSENT = object()
_MOST = 2000  # functions that are kept between launches

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]


class emulate:
    """Launches a `@gluon.jit` kernel on CPU tensors: `emulate(kernel)[grid](*args, **meta)`.

    Arguments are those of a launch on a GPU: CPU tensors, host TensorDescriptors over them,
    numbers, None, tuples and NamedTuples of these. Of options num_warps is used; others that the
    kernel has no parameter for are ignored. See `gluon_emulator.hopper` for an example.

    Args:
        kernel: a `@gluon.jit` kernel.
        seed: selects one order of events of the many that a GPU may show: try twenty.
        resident: how many CTAs run at a time.
        asm: functions of tensors by inline assembly text; `machine.running()` is their partition.
        trace: a function or a list that receives (cta, partition, event, detail) of every event.
        arrivals: memory that is filled piece by piece while the kernel runs.

    Raises:
        Deadlock: every partition waits and nothing is in flight.
        HopperError: the kernel does what the hardware forbids or leaves undefined.
    """

    def __init__(
        self,
        kernel: Any,
        seed: int = 0,
        *,
        resident: int = 8,
        asm: Mapping[str, Callable[..., Any]] | None = None,
        trace: Any = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        if not isinstance(kernel, JITFunction):
            raise TypeError(f"expected a @gluon.jit kernel, got {type(kernel).__name__}")
        self.kernel, self.seed, self.resident = kernel, seed, resident
        self.asm = {" ".join(text.split()): function for text, function in (asm or {}).items()}
        self.trace, self.arrivals = _tracer(trace), arrivals

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return lambda *args, **meta: self._launch(grid, args, meta)

    def _launch(self, grid: Grid, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        kernel = self.kernel
        names = {parameter.name for parameter in kernel.params}
        arguments = {name: value for name, value in meta.items() if name in names}
        arguments = inspect.getcallargs(kernel.fn, *args, **arguments)
        size = grid(arguments) if callable(grid) else grid
        nx, ny, nz = (*size, 1, 1)[:3]
        constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
        rebinder = Rebinder.shared()
        arguments = {
            name: rebinder.value(value) if name in constants else _argument(value, name)
            for name, value in arguments.items()
        }
        if meta.get("num_ctas", 1) != 1:
            raise NotImplementedError("the emulator has no clusters: num_ctas must be 1")
        body = rebinder.function(kernel)
        warps = int(arguments.get("num_warps", meta.get("num_warps", 4)))
        machine = Machine(self.seed, max(1, min(self.resident, nx * ny * nz)), self.trace)
        machine.grid, machine.asm = (nx, ny, nz), self.asm
        if self.arrivals is not None:
            self.arrivals.begin(machine)

        def start(cta: Cta) -> None:
            machine.start(Partition(cta, kernel.fn.__name__, warps, lambda: program(cta)))

        def program(cta: Cta) -> None:
            body(**arguments)
            tma.check_end(cta)
            for allocation in cta.allocations:
                for barrier in getattr(allocation, "barriers", ()):
                    barrier.check_end()
            machine.end_cta()

        # The first axis runs fastest, as on a GPU.
        order = itertools.product(range(nz), range(ny), range(nx))
        try:
            machine.run(((x, y, z) for z, y, x in order), start)
        except Exception as error:
            error.add_note(f"in the emulation of {kernel.fn.__name__} with seed {self.seed}")
            raise


class Rebinder:
    """Turns what a kernel can reach into what it means in the emulator.

    Launches share one, until a global or a captured variable that it read has another value.
    """

    _shared: "Rebinder | None" = None

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}  # id -> (what it was, what it became)
        # By id of a module's globals: these, and what names in them meant when they were read
        self._read: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._captured: list[tuple[types.CellType, Any]] = []

    @classmethod
    def shared(cls) -> "Rebinder":
        shared = cls._shared
        if shared is None or len(shared._done) > _MOST or not shared._is_current():
            shared = cls._shared = cls()
        return shared

    def _is_current(self) -> bool:
        return all(
            scope.get(name, _ABSENT) is value
            for scope, read in self._read.values()
            for name, value in read.items()
        ) and all(_content(cell) is value for cell, value in self._captured)

    def read(self, scope: dict[str, Any], name: str) -> Any:
        """The value of a global, _ABSENT if there is none."""
        value = scope.get(name, _ABSENT)
        self._read.setdefault(id(scope), (scope, {}))[1][name] = value
        return value

    def value(self, value: Any) -> Any:
        """The meaning of one global, captured variable or attribute of a module."""
        if id(value) in meanings():
            return meanings()[id(value)][1]
        if isinstance(value, JITFunction):
            return self.function(value)
        if isinstance(value, types.ModuleType):
            return _Module(self, value)
        if isinstance(value, tl.constexpr):
            return self.value(value.value)
        if is_builtin(value):
            return unknown(value)
        if isinstance(value, tuple):
            return map_tuple(self.value, value)
        return value

    def function(self, jitted: Any) -> Any:
        """A JIT function as a Python function with rebound globals and captured variables."""
        if id(jitted) in self._done:
            return self._done[id(jitted)][1]
        fn, code = jitted.fn, jitted.fn.__code__
        captured: dict[str, types.CellType] = dict(zip(code.co_freevars, fn.__closure__ or ()))
        if fn.__name__ in fn.__globals__ and fn.__name__ not in captured:
            # If it calls itself, the rewritten source finds it among the captured variables.
            captured[fn.__name__] = types.CellType(self.read(fn.__globals__, fn.__name__))
            code = code.replace(co_freevars=tuple(captured))
        cells = tuple(types.CellType() for _ in captured)
        scope: dict[str, Any] = {"__builtins__": builtins, "__name__": fn.__module__}
        scope |= {"min": language.minimum, "max": language.maximum}
        plain = types.FunctionType(code, scope, fn.__name__, closure=cells)
        plain.__kwdefaults__, plain.__module__ = fn.__kwdefaults__, fn.__module__
        rebuilt = as_compiled(plain, to_value, language.loop_range)
        self._done[id(jitted)] = jitted, rebuilt  # before what it calls, which may call it
        rebuilt.__defaults__ = None if fn.__defaults__ is None else self.value(fn.__defaults__)
        for cell, original in zip(cells, captured.values()):
            content = _content(original)
            self._captured.append((original, content))
            if content is not _ABSENT:  # not assigned yet: a NameError if it is used
                cell.cell_contents = self.value(content)
        for name in _names(fn.__code__):
            content = self.read(fn.__globals__, name)
            if content is not _ABSENT:
                scope[name] = self.value(content)
        return rebuilt


class _Module:
    """A module whose attributes have their meaning in the emulator."""

    def __init__(self, rebinder: Rebinder, module: types.ModuleType) -> None:
        self._rebinder, self._module = rebinder, module

    def __getattr__(self, name: str) -> Any:
        self._rebinder.read(vars(self._module), name)
        value = self._rebinder.value(getattr(self._module, name))
        setattr(self, name, value)
        return value


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _argument(value: Any, name: str) -> Any:
    """What a launch makes of an argument that is not a constant."""
    if isinstance(value, torch.Tensor):
        return Pointer.to_tensor(value, name)
    if hasattr(value, "block_shape"):
        return tma.Descriptor.from_host(value)
    if isinstance(value, tuple):
        fields = iter(getattr(value, "_fields", range(len(value))))
        return map_tuple(lambda item: _argument(item, f"{name}.{next(fields)}"), value)
    if isinstance(value, int) and not -(2**31) <= value < 2**31:
        return Value(value, tl.int64)
    return to_value(value)


def _tracer(trace: Any) -> Any:
    if trace is None or not hasattr(trace, "append"):
        return trace
    return lambda *event: trace.append(event)
