"""How much work code does, counted in calls of functions: seconds depend on the machine."""

import contextlib
import sys


class TooMuch(AssertionError):
    """More calls were made than the test allows."""


@contextlib.contextmanager
def at_most(calls: int):
    """Raises TooMuch where the code inside makes more calls, of Python's or C's functions; it ends
    work that grows exponentially. Yields a list, whose length is the number of calls afterwards.
    """
    made, before = [], sys.getprofile()

    def count(frame, event, _):
        if event in ("call", "c_call"):
            made.append(None)
            if len(made) > calls:
                raise TooMuch(f"more than {calls} calls, in {frame.f_code.co_qualname}")

    sys.setprofile(count)
    try:
        yield made
    finally:
        sys.setprofile(before)
    if len(made) > calls:  # what was raised may have been caught
        raise TooMuch(f"more than {calls} calls")
