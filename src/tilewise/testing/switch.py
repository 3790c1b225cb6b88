"""The one flag that sends portable kernels to the interpreter; reading it imports nothing.

Library code asks `interpreter_is_on()` at the launch and where it would refuse a CPU tensor.
"""

import contextlib
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_depth = 0


def interpreter_is_on() -> bool:
    """Whether portable kernels run in the interpreter and so accept CPU tensors.

    >>> interpreter_is_on()
    False
    """
    return _depth > 0


@contextlib.contextmanager
def use_interpreter() -> Iterator[None]:
    """Run portable kernels on CPU tensors, in the interpreter, within this block.

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
