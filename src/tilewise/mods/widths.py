"""Which integers of a function kernels compute in 64 bits: those that are not proven to fit in 32.

Every integer step has a range that holds its values (Moore 1966), found from the ranges of its
operands: indices are below MAX_SIZES, constants are themselves, a load is as wide as its dtype.
q_idx may be negative: with a cache that has fewer keys than there are queries, the first of these
stand before key 0. Past 64 bits a value wraps, and may be any.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from .expressions import INT, MAX_SIZES, TABLE_SIZE, Node, nodes_of
from .integers import LAST_BIT

End = TypeVar("End")


class Interval(NamedTuple, Generic[End]):
    """The ends, which belong to it: float64 or bool tensors, or integers."""

    lo: End
    hi: End

    def fits(self: Interval[int], other: Interval[int]) -> bool:
        """Whether it lies in another."""
        return other.lo <= self.lo and self.hi <= other.hi

    def has(self: Interval[int], value: int) -> bool:
        """Whether a value is in it."""
        return self.lo <= value <= self.hi


def least(x: Any, y: Any) -> Any:
    """The smaller of two ends."""
    return min(x, y) if isinstance(x, int) else torch.minimum(x, y)


def most(x: Any, y: Any) -> Any:
    """The larger of two ends."""
    return max(x, y) if isinstance(x, int) else torch.maximum(x, y)


def hull(values: Iterable[Any]) -> Interval:
    """The interval of a box's corners, for what is monotone in each operand."""
    corners = list(values)
    return Interval(functools.reduce(least, corners), functools.reduce(most, corners))


# Of single integers, and of tensors (`mods.intervals`)
EXACTLY: dict[str, Callable[..., Interval]] = {
    "+": lambda x, y: Interval(x.lo + y.lo, x.hi + y.hi),
    "-": lambda x, y: Interval(x.lo - y.hi, x.hi - y.lo),
    "*": lambda x, y: hull(a * b for a in x for b in y),
    "~": lambda x: Interval(-x.hi - 1, -x.lo - 1),
    "neg": lambda x: Interval(-x.hi, -x.lo),
    "minimum": lambda x, y: Interval(least(x.lo, y.lo), least(x.hi, y.hi)),
    "maximum": lambda x, y: Interval(most(x.lo, y.lo), most(x.hi, y.hi)),
}
Range = Interval[int]
BITS_32, BITS_64 = Range(-(2**31), 2**31 - 1), Range(-(2**63), 2**63 - 1)


@functools.lru_cache(maxsize=TABLE_SIZE)
def wraps(load: Node) -> tuple[bool, ...]:
    """Which indices of a load count from the end where they are negative, as in torch. The others
    are negative only where q_idx is, and are held at 0 there.
    """
    ranges = ranges_of(nodes_of(load), first_q=0)
    return tuple(ranges[index].lo < 0 for index in load.inputs)


def ranges_of(nodes: list[Node], first_q: int = -MAX_SIZES["q_idx"]) -> dict[Node, Range]:
    """The range of each node that is an integer, of nodes with all their inputs before them."""
    ranges: dict[Node, Range] = {}
    for node in nodes:
        if node.kind == INT:
            ranges[node] = _range(node, [ranges[x] for x in node.inputs if x in ranges], first_q)
    return ranges


def _range(node: Node, operands: list[Range], first_q: int) -> Range:
    if node.op in MAX_SIZES:
        return Range(first_q if node.op == "q_idx" else 0, MAX_SIZES[node.op] - 1)
    if node.op == INT:
        return Range(node.value, node.value)
    if node.op == "load":
        limits = torch.iinfo(node.value[1])
        return Range(limits.min, limits.max)
    if node.op not in RULES:  # of floats
        return BITS_64
    result = RULES[node.op](*operands)
    return result if result.fits(BITS_64) else BITS_64


def _corners(compute: Callable[[int, int], int], x: Range, y: Range) -> Range:
    """Where the extremes lie at ends of both."""
    return hull(compute(a, b) for a in x for b in y)


def _quotient(x: Range, d: Range) -> Range:
    if d.lo > 0:
        return _corners(lambda a, b: a // b, x, y=d)
    largest = max(abs(x.lo), abs(x.hi))
    return Range(-largest, largest)


def _remainder(x: Range, d: Range) -> Range:
    if d.lo > 0:
        return Range(0, min(x.hi, d.hi - 1) if x.lo >= 0 else d.hi - 1)
    below = Range(min(0, d.lo + 1), max(0, d.hi - 1))
    return hull((*below, *x)) if d.has(0) else below


def _left(x: Range, y: Range) -> Range:
    if y.fits(Range(0, LAST_BIT)):
        return _corners(lambda a, b: a << b, x, y=y)
    return hull((0, *_corners(lambda a, b: a << b, x, y=Range(0, LAST_BIT))))


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
    ends = hull(map(abs, x))
    return Range(0, ends.hi) if x.has(0) else ends


RULES: dict[str, Callable[..., Range]] = {
    **EXACTLY,
    "//": _quotient,
    "%": _remainder,
    "<<": _left,
    ">>": _right,
    "&": _and,
    "|": _or,
    "^": _or,
    "abs": _magnitude,
    "where": lambda x, y: hull((*x, *y)),
}


def long_nodes(nodes: list[Node], ranges: dict[Node, Range]) -> set[Node]:
    """What is computed in 64 bits: it, or what it is made of, needs more than 32."""
    long: set[Node] = set()
    for node in nodes:
        of_long = node.op != "load" and any(x in long for x in node.inputs)
        if node in ranges and (of_long or not ranges[node].fits(BITS_32)):
            long.add(node)
    return long
