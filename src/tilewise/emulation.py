"""Kernels on CPU tensors: the flags that send portable ones to Triton's interpreter and Hopper ones
to the emulator, and their launches. `gluon_emulator` is imported when a kernel runs in it.

The library calls `interpreter_is_on()` and `emulator_seed()` at the launch and before it refuses a
CPU tensor.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_lock = threading.Lock()
_depth = 0
_seeds: list[int] = []


def interpreter_is_on() -> bool:
    """Whether portable kernels run in the interpreter and so accept CPU tensors.

    Example:
        >>> interpreter_is_on()
        False
    """
    return _depth > 0


@contextlib.contextmanager
def use_interpreter() -> Iterator[None]:
    """Runs portable kernels on CPU tensors, in the interpreter, within this block.

    Example:
        >>> with use_interpreter():
        ...     interpreter_is_on()
        True

    The flag is the process's, not the thread's: autograd may run a backward in a thread of its own.
    Blocks nest.
    """
    global _depth
    with _lock:
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1


def emulator_seed() -> int | None:
    """The seed by which Hopper kernels are emulated, or None: they need a Hopper GPU."""
    return _seeds[-1] if _seeds else None


@contextlib.contextmanager
def use_emulator(seed: int = 0) -> Iterator[None]:
    """Runs Hopper kernels on CPU tensors, in the emulator, within this block.

    Example:
        >>> with use_emulator(seed=3):
        ...     emulator_seed()
        3

    Args:
        seed: selects which partition runs when. Blocks nest.
    """
    with _lock:
        _seeds.append(seed)
    try:
        yield
    finally:
        with _lock:
            _seeds.pop()


def cpu_modes() -> tuple[bool, bool]:
    """Whether the interpreter and the emulator are on, on which the choice of a backend depends."""
    return _depth > 0, bool(_seeds)


def interpret(kernel: Any, check: bool = True) -> Any:
    """Launches a Triton kernel on CPU tensors: `interpret(kernel)[grid](*args)`."""
    from gluon_emulator.triton import interpreter

    return interpreter.interpret(kernel, check=check)


def emulate(kernel: Any, asm: Mapping[str, Callable[..., Any]], **options: Any) -> Any:
    """Launches a Gluon kernel on CPU tensors, by the seed of `use_emulator`. `asm` has a function
    for each text of inline assembly.
    """
    from gluon_emulator import hopper

    return hopper.emulate(kernel, emulator_seed() or 0, asm=asm, **options)
