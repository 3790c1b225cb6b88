"""How long tests wait, and code that may not wait for a GPU.

No test asserts how long something takes, which a busy machine decides: it counts steps
(`helpers/work.py`), or waits for what must come, and DEADLINE ends a wait for what never does.
"""

import contextlib
import time
import warnings

import torch

DEADLINE = 300.0  # seconds, many times what any wait takes on a busy machine
SHORT = 2.0  # seconds of a time-out that a test lets run out


def until(done, what: str, pause: float = 0.01):
    """The value of `done()` as soon as it is true; AssertionError after DEADLINE."""
    end = time.monotonic() + DEADLINE
    while not (value := done()):
        assert time.monotonic() < end, f"not within {DEADLINE:g} s: {what}"
        time.sleep(pause)
    return value


@contextlib.contextmanager
def nothing_waits():
    """Raises where the host waits for the device."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's: that the mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
