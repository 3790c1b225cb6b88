"""Exercises: empty stubs, checks that say what is wrong, and which ones are done.

python tour                                    # which exercises are done
TOUR_ANSWERS=1 python tour/01_vector_add.py    # checks the answers instead
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable
from typing import Any

import torch

Check = Callable[..., Any]
RIGHT, WRONG, EMPTY = "right", "not yet", "empty"


class NotYet(Exception):
    """What a stub raises until its answer is written."""


class Exercises:
    """The exercises of one lesson, and whether each is right, not yet, or empty."""

    def __init__(self, lesson: str, what: str = "exercise") -> None:
        self.lesson, self.what = lesson, what
        self.states: dict[int, str] = {}

    def check(self, number: int, answer: Any) -> Callable[[Check], Check]:
        """Makes a check of an exercise: `check(written)` says if it is right.

        The decorated function raises AssertionError with what is wrong, or returns
        what was checked. What raises anything else is not right either. With
        TOUR_ANSWERS=1 `answer` is checked in place of what was written.
        """
        self.states[number] = EMPTY

        def decorate(check: Check) -> Check:
            @functools.wraps(check)
            def run(written: Any, *more: Any) -> bool:
                if os.environ.get("TOUR_ANSWERS") == "1":
                    written = answer
                self.states[number], said = outcome(check, written, *more)
                print(f"{self.what} {number}: {self.states[number]}. {said}")
                return self.states[number] == RIGHT

            return run

        return decorate

    def show(self) -> None:
        """Prints which exercises are done."""
        name = f"{self.what}s of lesson {self.lesson}"
        print(f"{name}: {self}. All lessons: python tour")

    def __str__(self) -> str:
        said = []
        for state in (RIGHT, WRONG, EMPTY):
            numbers = [str(n) for n, found in self.states.items() if found == state]
            if numbers:
                said.append(f"{state} {' '.join(numbers)}")
        return ", ".join(said)


def outcome(check: Check, written: Any, *more: Any) -> tuple[str, str]:
    """The state of an exercise, and what there is to say about it."""
    if is_empty(written):
        return EMPTY, "Write your lines in place of `raise NotYet`."
    try:
        return RIGHT, check(written, *more)
    except AssertionError as error:
        return WRONG, str(error)
    except IndexError as error:
        return WRONG, f"Out of bounds: {error}"
    except Exception as error:
        return WRONG, f"{type(error).__name__}: {error}"


def is_empty(written: Any) -> bool:
    """Whether the source of a function or kernel still raises NotYet.

    It is read, not run: no kernel with a `raise` compiles for a GPU.
    """
    try:
        source = inspect.getsource(getattr(written, "fn", written))
    except (OSError, TypeError):
        return False
    return re.search(r"^\s+raise NotYet\b", source, re.MULTILINE) is not None


def expect(got: Any, expected: Any, where: str, atol: float = 0.0) -> None:
    """AssertionError with both values if they differ by more than `atol`.

    Of a tensor, with its first wrong element.
    """
    if not isinstance(expected, torch.Tensor):
        assert got == expected, f"{where}: {got}, expected {expected}"
        return
    shapes = f"{where}: {got.shape}, expected {expected.shape}"
    assert got.shape == expected.shape, shapes
    got, expected = got.double().cpu(), expected.double().cpu()
    wrong = (got != expected) & ~((got - expected).abs() <= atol)
    if not wrong.any():
        return
    first = wrong.nonzero()[0].tolist()
    value, exact = (x[tuple(first)].item() for x in (got, expected))
    said = f"element {first} is {value:.6g}, expected {exact:.6g}"
    if atol:
        said += f", off by {abs(value - exact):.2g} where {atol:.2g} is allowed"
    count = f"{int(wrong.sum())} of {wrong.numel()} are wrong"
    raise AssertionError(f"{where}: {said}; {count}")
