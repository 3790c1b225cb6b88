"""Interval arithmetic: bounds of a mask's tree over a whole block, from its index ranges.

Interval arithmetic (Moore 1966): every node gets a [lo, hi] that holds all its values over the
block, for all blocks at once by broadcasting. Of bools, lo says "true everywhere" and hi "true
somewhere, perhaps". What is not followed is [-inf, inf] or [False, True]: never wrong, only wide.

Integers lie in float64, exact to 2^52, and open beyond. Past 64 bits they wrap, so that a step that
may get there has no end at all: once one of its ends is open, both are. Floats are not followed,
because their rounding differs between torch and kernels. A captured tensor is followed where its
last index is q_idx or k_idx plus a constant: by its minimum and maximum over the block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from .evaluation import load
from .expressions import BOOL, FLOAT, INT, Node, compute
from .widths import EXACTLY, Interval, hull

Tensor = torch.Tensor
EXACT = 2.0**52
# Steps of one or two numbers of 64 bits that never wrap: one end may be open alone
BOUNDED = {"load", "where", "minimum", "maximum", "//", "%", ">>", "&", "|", "^", "~"}


class Blocks(NamedTuple):
    """The index ranges of some blocks, as (batch, nheads, m_blocks, n_blocks) they broadcast to."""

    b: Tensor  # int64 (batch, 1, 1, 1)
    h: Tensor  # int64 (nheads, 1, 1)
    q_idx: Tensor  # int64 (m_blocks, BLOCK_M): positions, the last repeated past the end
    k_idx: Tensor  # int64 (n_blocks, BLOCK_N)


def bound(expr: Node, blocks: Blocks, tensors: tuple[Tensor, ...]) -> Interval:
    """The interval of a tree over each block."""

    def bounds_of(node: Node, inputs: list[Interval]) -> Interval:
        interval = _bound(node, inputs, blocks=blocks, tensors=tensors)
        return _tidy(interval, node.op in BOUNDED) if node.kind == INT else interval

    return compute(expr, bounds_of)


def _bound(
    node: Node, inputs: list[Interval], blocks: Blocks, tensors: tuple[Tensor, ...]
) -> Interval:
    if node.op in ("b", "h"):
        return _one(getattr(blocks, node.op).double())
    if node.op == "q_idx":
        return Interval._make(blocks.q_idx[:, i, None].double() for i in (0, -1))
    if node.op == "k_idx":
        return Interval._make(blocks.k_idx[:, i].double() for i in (0, -1))
    if node.op == BOOL:
        return _one(torch.full((), node.value, device=blocks.b.device))
    if node.op == INT:
        return _one(torch.full((), node.value, dtype=torch.float64, device=blocks.b.device))
    if node.kind == FLOAT or any(x.kind == FLOAT for x in node.inputs):
        return _anything(node.kind, blocks)
    if node.op == "load":
        return _load(node, blocks, tensors=tensors)
    is_of_bools = all(x.kind == BOOL for x in node.inputs)
    return (_OF_BOOLS if is_of_bools else _OF_INTS)[node.op](*inputs)


def _one(x: Tensor) -> Interval:
    return Interval(x, x)


def _anything(kind: str, blocks: Blocks) -> Interval:
    ends = (False, True) if kind == BOOL else (-torch.inf, torch.inf)
    dtype = torch.bool if kind == BOOL else torch.float64
    return Interval._make(torch.full((), x, dtype=dtype, device=blocks.b.device) for x in ends)


def _tidy(x: Interval, is_bounded: bool) -> Interval:
    """Ends past 2^52, or NaN from inf - inf, are open; both where one is, in a step that wraps."""
    exact = [end.abs() <= EXACT for end in x]
    if not is_bounded:
        exact = [exact[0] & exact[1]] * 2
    return Interval(torch.where(exact[0], x.lo, -torch.inf), torch.where(exact[1], x.hi, torch.inf))


def _load(expr: Node, blocks: Blocks, tensors: tuple[Tensor, ...]) -> Interval:
    x = tensors[expr.value[0]]
    *leading, last = expr.inputs or (Node(INT, (), 0),)
    x = x if expr.inputs else x[None]
    if not all(node.op in ("b", "h", INT) for node in leading):
        return _anything(expr.kind, blocks)
    index = [getattr(blocks, i.op) if i.op in ("b", "h") else i.value for i in leading]
    if last.op in ("b", "h", INT):
        values = load(x, expr, [*index, getattr(blocks, last.op) if last.op != INT else last.value])
        return _one(values if values.dtype == torch.bool else values.double())
    name, offset = _shifted(last)
    if name is None:
        return _anything(expr.kind, blocks)
    # One more dimension, inside the block: (batch, nheads, m_blocks, n_blocks, BLOCK)
    positions = getattr(blocks, name) + offset
    positions = positions[:, None] if name == "q_idx" else positions
    index = [i[..., None] if isinstance(i, Tensor) else i for i in index]
    values = load(x, expr, [*index, positions])
    lo, hi = torch.aminmax(values.to(torch.uint8) if values.dtype == torch.bool else values, dim=-1)
    dtype = torch.bool if values.dtype == torch.bool else torch.float64
    return Interval(lo.to(dtype), hi.to(dtype))


def _shifted(index: Node) -> tuple[str | None, int]:
    """q_idx or k_idx and the constant added to it; None for any other index."""
    if index.op in ("q_idx", "k_idx"):
        return index.op, 0
    if index.op in ("+", "-"):
        x, y = index.inputs
        if y.op == INT and x.op in ("q_idx", "k_idx"):
            return x.op, y.value if index.op == "+" else -y.value
        if index.op == "+" and x.op == INT and y.op in ("q_idx", "k_idx"):
            return y.op, x.value
    return None, 0


def _open_unless(is_known: Tensor, lo: Tensor, hi: Tensor) -> Interval:
    """The ends where they are known; elsewhere anything."""
    return Interval(torch.where(is_known, lo, -torch.inf), torch.where(is_known, hi, torch.inf))


def _divide(x: Interval, y: Interval) -> Interval:
    quotient = hull(torch.floor(a / b) for a in x for b in y)
    return _open_unless(y.lo > 0, quotient.lo, hi=quotient.hi)


def _remainder(x: Interval, y: Interval) -> Interval:
    """The remainder is exact by one divisor, within one of its periods, else anything below it."""
    start = torch.floor(x.lo / y.lo)
    exact = (y.lo == y.hi) & (start == torch.floor(x.hi / y.lo)) & start.isfinite()
    lo = torch.where(exact, x.lo - start * y.lo, 0.0)
    hi = torch.where(exact, x.hi - start * y.lo, y.hi - 1)
    return _open_unless(y.lo > 0, lo, hi=hi)


def _shift(x: Interval, y: Interval, is_left: bool) -> Interval:
    """A shift by one constant number of bits; negative and long ones are not followed."""
    is_followed = (y.lo == y.hi) & (y.lo >= 0) & (y.lo <= 40)
    factor = torch.exp2(y.lo.clamp(0, 40)).round()
    lo, hi = (end * factor if is_left else torch.floor(end / factor) for end in x)
    return _open_unless(is_followed, lo, hi=hi)


def _bitwise(x: Interval, y: Interval, lo: Tensor, hi: Tensor) -> Interval:
    """Bitwise operators of two that are not negative."""
    return _open_unless((x.lo >= 0) & (y.lo >= 0), lo, hi=hi)


def _magnitude(x: Interval) -> Interval:
    straddles = (x.lo <= 0) & (x.hi >= 0)
    lo, hi = hull(end.abs() for end in x)
    return Interval(torch.where(straddles, 0.0, lo), hi)


def _equal(x: Interval, y: Interval) -> Interval:
    same = (x.lo == y.hi) & (x.hi == y.lo)
    return Interval(same, (x.lo <= y.hi) & (y.lo <= x.hi))


def _not(x: Interval) -> Interval:
    return Interval(~x.hi, ~x.lo)


def _differ_bool(x: Interval, y: Interval) -> Interval:
    is_constant = (x.lo == x.hi) & (y.lo == y.hi)
    return Interval(is_constant & (x.lo ^ y.lo), ~is_constant | (x.lo ^ y.lo))


def _chosen(c: Interval, x: Interval, y: Interval) -> Interval:
    """x where the condition holds all over the block, y where nowhere, else both."""
    if x.lo.dtype == torch.bool:
        either = Interval(x.lo & y.lo, x.hi | y.hi)
    else:
        either = Interval(torch.minimum(x.lo, y.lo), torch.maximum(x.hi, y.hi))
    ends = zip(x, y, either)
    return Interval._make(torch.where(c.lo, a, torch.where(c.hi, e, b)) for a, b, e in ends)


_OF_BOOLS: dict[str, Callable[..., Interval]] = {
    "&": lambda x, y: Interval(x.lo & y.lo, x.hi & y.hi),
    "|": lambda x, y: Interval(x.lo | y.lo, x.hi | y.hi),
    "^": _differ_bool,
    "!=": _differ_bool,
    "==": lambda x, y: _not(_differ_bool(x, y)),
    "~": _not,
    "where": _chosen,
}
_OF_INTS: dict[str, Callable[..., Interval]] = {
    **EXACTLY,
    "//": _divide,
    "%": _remainder,
    "<<": lambda x, y: _shift(x, y, is_left=True),
    ">>": lambda x, y: _shift(x, y, is_left=False),
    "<": lambda x, y: Interval(x.hi < y.lo, x.lo < y.hi),
    "<=": lambda x, y: Interval(x.hi <= y.lo, x.lo <= y.hi),
    "==": _equal,
    "!=": lambda x, y: _not(_equal(x, y)),
    "&": lambda x, y: _bitwise(x, y, lo=torch.zeros_like(x.lo), hi=torch.minimum(x.hi, y.hi)),
    "|": lambda x, y: _bitwise(x, y, lo=torch.maximum(x.lo, y.lo), hi=x.hi + y.hi),
    "^": lambda x, y: _bitwise(x, y, lo=torch.zeros_like(x.lo), hi=x.hi + y.hi),
    "abs": _magnitude,
    "where": _chosen,
}
