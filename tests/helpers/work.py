"""How much work code does, counted in calls of functions: seconds depend on the machine."""

import contextlib
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import tilewise

ROOT = str(Path(tilewise.__file__).parent)


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


def entered(call: Callable, closed: Collection[str] = ()) -> list[str]:
    """The library's own functions that a call enters, as `file:name`, without comprehensions.

    A function whose file starts with one of `closed`, or whose name is one, is left out with all
    that it enters.
    """
    functions, outer = [], None

    def profile(frame, event, _):
        nonlocal outer
        code = frame.f_code
        if event == "return" and frame is outer:
            outer = None
        if event != "call" or outer or not code.co_filename.startswith(ROOT):
            return
        file = code.co_filename[len(ROOT) + 1 :].replace("\\", "/")
        if code.co_name in closed or file.startswith(tuple(closed)):
            outer = frame
        elif not code.co_name.startswith("<"):
            functions.append(f"{file}:{code.co_name}")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return functions
