"""Which cases run in `make test`, and which only in `make test-all`."""

import itertools
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


def pairwise(*axes: Iterable) -> list:
    """The product of `axes`, of which rows are fast that together have each value of an axis beside
    each of every other: few, and a fault that two values make shows in one of them.
    """
    axes = [list(axis) for axis in axes]
    rows = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing, fast = set().union(*pairs.values()), set()
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        fast.add(best)
        missing -= pairs[best]
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(axes, row)),
            marks=() if row in fast else pytest.mark.slow,
        )
        for row in rows
    ]
