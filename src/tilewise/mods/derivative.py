"""The derivative of a score function by its score, or by what it reads of a captured tensor, as
another tree over the same inputs.

One rule for each operator (`OPERATORS`), the chain rule, and so much tidying that `score +
bias[...]` gives 1.0. Conditions and integers are steps of the score: between the steps they do not
change. Where two sides tie the rules are torch's: half of each at minimum(x, x), 0 at abs(0).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from ..errors import ArgumentError
from .expressions import (
    BOOL,
    FLOAT,
    INT,
    LARGEST,
    NUMERIC,
    OPERATORS,
    SCORE,
    Node,
    compute,
    describe,
    loads_of,
    lookup,
    nodes_of,
)

ZERO, ONE = Node(FLOAT, (), 0.0), Node(FLOAT, (), 1.0)
OF_SCORE = Node(SCORE)
MINUS_INFINITY = Node(FLOAT, (), -math.inf)


def derivative(expr: Node, by: Node = OF_SCORE) -> Node:
    """d expr / d by, where expr gives a float; `by` is the score or a load of floats.

    >>> describe(derivative(Node("tanh", (Node("score"),))))
    '(1.0 - (tanh(score) * tanh(score)))'
    """
    slope = compute(expr, lambda node, slopes: ONE if node == by else _slope(node, slopes))
    return _guarded(expr, slope)


@functools.lru_cache(maxsize=1024)
def by_loads(name: str) -> tuple[tuple[Node, Node], ...]:
    """Each load of floats in the score function of a name, and the function's derivative by it."""
    expr = lookup(name)
    loads = [x for x in loads_of(expr) if x.kind == FLOAT]
    slopes = [(load, derivative(expr, load)) for load in loads]
    return tuple((load, slope) for load, slope in slopes if slope != ZERO)


def _slope(node: Node, slopes: list[Node]) -> Node:
    """The derivative of a node from those of its inputs."""
    if node.kind in (BOOL, INT) or all(slope == ZERO for slope in slopes):
        return ZERO
    rule = OPERATORS[node.op].slope
    if rule is None:
        raise ArgumentError(
            f"{describe(node)} has no known derivative with respect to score: pass that of the "
            "whole function, score(f, derivative=g)"
        )
    x, d = ([Term(part) for part in parts] for parts in (node.inputs, slopes))
    return _node_of(rule(Term(node), x, d))


def _guarded(expr: Node, slope: Node) -> Node:
    """With 0 where the score became -inf, if infinities of the function reach its derivative:
    0 * inf is NaN, and a pair that is not seen moves nothing.
    """
    constants = (node.value for node in nodes_of(slope) if node.op == FLOAT)
    if not any(map(math.isinf, constants)):
        return slope
    return _where(Node("==", (expr, MINUS_INFINITY)), ZERO, y=slope)


def _constant(value: float) -> Node:
    return Node(FLOAT, (), value + 0.0)  # a slope of -0.0 is ZERO too


def _folded(op: str, x: Node, y: Node) -> Node:
    """An operator, done here if both sides are constants and so is what they give."""
    if x.op in NUMERIC and y.op in NUMERIC:
        value = float(OPERATORS[op].compute(x.value, y.value))
        if abs(value) <= LARGEST:
            return _constant(value)
    return Node(op, (x, y))


def _sum(x: Node, y: Node) -> Node:
    return y if x == ZERO else x if y == ZERO else _folded("+", x, y=y)


def _difference(x: Node, y: Node) -> Node:
    if x == ZERO:
        return _negative(y)
    return x if y == ZERO else _folded("-", x, y=y)


def _negative(x: Node) -> Node:
    return _folded("*", _constant(-1.0), y=x) if x.op in (FLOAT, INT) else Node("neg", (x,))


def _product(slope: Node, factor: Node) -> Node:
    """A slope times something: 0 whatever the factor is, infinity too. Constants come first, as
    one: that of cap * tanh(score / cap) then is 1 - tanh^2.
    """
    if slope == ZERO:
        return ZERO
    if factor.op not in NUMERIC:
        is_plain = slope == ONE and factor.kind == FLOAT
        return factor if is_plain else Node("*", (slope, factor))
    if slope.op == "*" and slope.inputs[0].op in NUMERIC:
        return _product(_folded("*", slope.inputs[0], y=factor), slope.inputs[1])
    return slope if factor == ONE else _folded("*", factor, y=slope)


def _quotient(slope: Node, divisor: Node) -> Node:
    if divisor.op in NUMERIC and abs(divisor.value) * LARGEST >= 1:  # its inverse is a constant
        return _product(slope, _constant(1 / divisor.value))
    return ZERO if slope == ZERO else Node("/", (slope, divisor))


def _where(condition: Node, x: Node, y: Node) -> Node:
    if x.op == y.op == FLOAT and x == y:
        return x
    return Node("where", (condition, x, y))


class Term:
    """A node or a number in a rule: operators tidy, and a slope is a product's first factor."""

    def __init__(self, value: Node | float) -> None:
        self.node = value if isinstance(value, Node) else _constant(value)

    def __add__(self, other: Term | float) -> Term:
        return Term(_sum(self.node, _node_of(other)))

    def __sub__(self, other: Term | float) -> Term:
        return Term(_difference(self.node, _node_of(other)))

    def __rsub__(self, other: float) -> Term:
        return Term(_difference(_constant(other), self.node))

    def __mul__(self, other: Term | float) -> Term:
        return Term(_product(self.node, _node_of(other)))

    def __truediv__(self, other: Term | float) -> Term:
        return Term(_quotient(self.node, _node_of(other)))

    def __neg__(self) -> Term:
        return Term(_negative(self.node))

    def where(self, x: Term | float, y: Term | float) -> Term:
        """x where this condition holds, else y."""
        return Term(_where(self.node, _node_of(x), y=_node_of(y)))

    def __getattr__(self, op: str) -> Callable[..., Term]:
        return lambda *others: Term(Node(op, (self.node, *map(_node_of, others))))

    def __lt__(self, other: Term | float) -> Term:
        return Term(Node("<", (self.node, _node_of(other))))

    def __gt__(self, other: Term | float) -> Term:
        return Term(Node("<", (_node_of(other), self.node)))

    def is_zero(self) -> Term:
        """Where it is 0."""
        return Term(Node("==", (self.node, ZERO)))

    def __pow__(self, other: Term) -> Term:
        return Term(Node("pow", (self.node, other.node)))


def _node_of(value: Term | float) -> Node:
    return value.node if isinstance(value, Term) else _constant(value)
