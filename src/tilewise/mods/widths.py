"""Which integers of a function kernels compute in 64 bits: those that are not proven to fit in 32.

Every integer step has a range that holds its values (Moore 1966), found from the ranges of its
operands: indices are below MAX_SIZES, constants are themselves, a load is as wide as its dtype.
q_idx may be negative: with a cache that has fewer keys than there are queries, the first of these
stand before key 0. Past 64 bits a value wraps, and may be any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .expressions import INT, MAX_SIZES, TreeStep
from .integers import LAST_BIT


class Range(NamedTuple):
    """The ends, which belong to it."""

    lo: int
    hi: int

    def fits(self, other: Range) -> bool:
        """Whether it lies in another."""
        return other.lo <= self.lo and self.hi <= other.hi

    def has(self, value: int) -> bool:
        """Whether a value is in it."""
        return self.lo <= value <= self.hi


BITS_32, BITS_64 = Range(-(2**31), 2**31 - 1), Range(-(2**63), 2**63 - 1)


def ranges_of(plan: list[TreeStep]) -> list[Range | None]:
    """The range of each step that is an integer."""
    ranges: list[Range | None] = []
    for step in plan:
        ranges.append(_range(step, [ranges[i] for i in step.inputs]) if step.kind == INT else None)
    return ranges


def _range(step: TreeStep, operands: list) -> Range:
    if step.op in MAX_SIZES:
        most = MAX_SIZES[step.op]
        return Range(-most if step.op == "q_idx" else 0, most - 1)
    if step.op == INT:
        return Range(step.value, step.value)
    if step.op == "load":
        limits = torch.iinfo(step.value[1])
        return Range(limits.min, limits.max)
    if step.op == "where":
        operands = operands[1:]
    if step.op not in RULES:  # of floats
        return BITS_64
    result = RULES[step.op](*operands)
    return result if result.fits(BITS_64) else BITS_64


def _hull(*values: int) -> Range:
    return Range(min(values), max(values))


def _corners(compute: Callable[[int, int], int], x: Range, y: Range) -> Range:
    """Where the extremes lie at ends of both."""
    return _hull(*(compute(a, b) for a in x for b in y))


def _quotient(x: Range, d: Range) -> Range:
    if d.lo > 0:
        return _corners(lambda a, b: a // b, x, y=d)
    largest = max(abs(x.lo), abs(x.hi))
    return Range(-largest, largest)


def _remainder(x: Range, d: Range) -> Range:
    if d.lo > 0:
        return Range(0, min(x.hi, d.hi - 1) if x.lo >= 0 else d.hi - 1)
    below = Range(min(0, d.lo + 1), max(0, d.hi - 1))
    return _hull(*below, *x) if d.has(0) else below


def _left(x: Range, y: Range) -> Range:
    if y.fits(Range(0, LAST_BIT)):
        return _corners(lambda a, b: a << b, x, y=y)
    return _hull(0, *_corners(lambda a, b: a << b, x, y=Range(0, LAST_BIT)))


def _right(x: Range, y: Range) -> Range:
    shifts = y if y.fits(Range(0, LAST_BIT)) else Range(0, LAST_BIT)
    return _corners(lambda a, b: a >> b, x, y=shifts)


def _and(x: Range, y: Range) -> Range:
    ends = [operand.hi for operand in (x, y) if operand.lo >= 0]
    return Range(0, min(ends)) if ends else _or(x, y)


def _or(x: Range, y: Range) -> Range:
    """The range of | and ^: as many bits as the longer of both."""
    bits = max((value if value >= 0 else ~value).bit_length() for value in (*x, *y))
    return Range(0 if x.lo >= 0 and y.lo >= 0 else -(1 << bits), (1 << bits) - 1)


def _magnitude(x: Range) -> Range:
    ends = _hull(abs(x.lo), abs(x.hi))
    return Range(0, ends.hi) if x.has(0) else ends


RULES: dict[str, Callable[..., Range]] = {
    "+": lambda x, y: Range(x.lo + y.lo, x.hi + y.hi),
    "-": lambda x, y: Range(x.lo - y.hi, x.hi - y.lo),
    "*": lambda x, y: _corners(lambda a, b: a * b, x, y=y),
    "//": _quotient,
    "%": _remainder,
    "<<": _left,
    ">>": _right,
    "&": _and,
    "|": _or,
    "^": _or,
    "~": lambda x: Range(~x.hi, ~x.lo),
    "neg": lambda x: Range(-x.hi, -x.lo),
    "abs": _magnitude,
    "minimum": lambda x, y: Range(min(x.lo, y.lo), min(x.hi, y.hi)),
    "maximum": lambda x, y: Range(max(x.lo, y.lo), max(x.hi, y.hi)),
    "where": lambda x, y: _hull(*x, *y),
}


def are_long(plan: list[TreeStep], ranges: list[Range | None]) -> list[bool]:
    """Whether each step is computed in 64 bits: it, or what it is made of, needs more than 32."""
    is_long: list[bool] = []
    for step, range_ in zip(plan, ranges):
        of_long = step.op != "load" and any(is_long[i] for i in step.inputs)
        is_long.append(range_ is not None and (of_long or not range_.fits(BITS_32)))
    return is_long
