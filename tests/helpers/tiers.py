"""Which cases run in `make test`, and which only in `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def sample(cases: Iterable, *fast: Any) -> list:
    """Parameters: the cases named in `fast` as they are, all others marked slow."""
    cases = list(cases)
    assert all(x in cases for x in fast), f"{fast} are not all among the cases"
    return [pytest.param(x, marks=() if x in fast else pytest.mark.slow) for x in cases]


def sample_rows(rows: Iterable[tuple], *fast: tuple) -> list:
    """The same of rows, a value for each of several arguments."""
    rows = list(rows)
    assert all(x in rows for x in fast), f"{fast} are not all among the rows"
    return [pytest.param(*x, marks=() if x in fast else pytest.mark.slow) for x in rows]


def every(n: int, cases: Iterable) -> list:
    """Cases of which one in `n` is fast, the first among them."""
    cases = list(cases)
    return [pytest.param(x, marks=pytest.mark.slow if i % n else ()) for i, x in enumerate(cases)]
