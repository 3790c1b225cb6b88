"""What a mask predicate computes: its expression as a tree, its value in torch, its line of Triton.

A tree is a nest of `Node`s: the four indices, constants, loads from captured tensors, and the
operators of `OPERATORS`, which are all there is. Two predicates that compute the same by the same
steps have equal trees, constants included, so that a tree is a key: a closure made anew at every
call compiles nothing anew.

Integers are as wide as int64 in torch and 32 bits in kernels: keep what a predicate computes below
2^31. `//` and `%` round down as Python's do. An index past either end of a tensor reads its first
or last element: that is what lets `where(q_idx > 0, doc[q_idx - 1], -1)` be asked at query 0.
"""

from __future__ import annotations

import hashlib
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch

from .errors import ArgumentError

Tensor = torch.Tensor
INDICES = ("b", "h", "q_idx", "k_idx")
BOOL, INT, FLOAT = "bool", "int", "float"
NUMBERS = {INT, FLOAT}


class Node(NamedTuple):
    """One step. `op` is an index, the kind of a constant, "load", or a key of OPERATORS."""

    op: str
    inputs: tuple[Node, ...] = ()
    value: object = None  # a constant's value; a load's (slot in the captured tensors, dtype)


class Operator(NamedTuple):
    """How an operator is written for Triton, what it gives for inputs of some kinds (None: it is
    refused), and what it computes in torch.
    """

    text: str
    kind: Callable[..., str | None]
    compute: Callable[..., Tensor]


def _number(*kinds: str) -> str | None:
    return None if set(kinds) - NUMBERS else FLOAT if FLOAT in kinds else INT


def _integer(*kinds: str) -> str | None:
    return INT if set(kinds) == {INT} else None


def _ordered(x: str, y: str) -> str | None:
    return None if {x, y} - NUMBERS else BOOL


def _equal(x: str, y: str) -> str | None:
    return BOOL if x == y or not {x, y} - NUMBERS else None


def _bits(*kinds: str) -> str | None:
    return kinds[0] if set(kinds) in ({BOOL}, {INT}) else None


def _chosen(condition: str, x: str, y: str) -> str | None:
    return None if condition != BOOL else x if x == y else _number(x, y)


def _minimum(x, y):
    return torch.where(x < y, x, y)


def _maximum(x, y):
    return torch.where(x > y, x, y)


OPERATORS = {
    "+": Operator("({0} + {1})", _number, operator.add),
    "-": Operator("({0} - {1})", _number, operator.sub),
    "*": Operator("({0} * {1})", _number, operator.mul),
    "//": Operator("({0} // {1})", _integer, operator.floordiv),
    "%": Operator("({0} % {1})", _integer, operator.mod),
    "<<": Operator("({0} << {1})", _integer, operator.lshift),
    ">>": Operator("({0} >> {1})", _integer, operator.rshift),
    "<": Operator("({0} < {1})", _ordered, operator.lt),
    "<=": Operator("({0} <= {1})", _ordered, operator.le),
    "==": Operator("({0} == {1})", _equal, operator.eq),
    "!=": Operator("({0} != {1})", _equal, operator.ne),
    "&": Operator("({0} & {1})", _bits, operator.and_),
    "|": Operator("({0} | {1})", _bits, operator.or_),
    "^": Operator("({0} ^ {1})", _bits, operator.xor),
    "~": Operator("(~{0})", _bits, operator.invert),
    "neg": Operator("(-{0})", _number, operator.neg),
    "abs": Operator("tl.abs({0})", _number, torch.abs),
    "minimum": Operator("tl.minimum({0}, {1})", _number, _minimum),
    "maximum": Operator("tl.maximum({0}, {1})", _number, _maximum),
    "where": Operator("tl.where({0}, {1}, {2})", _chosen, torch.where),
}


def kind_of(expr: Node) -> str:
    """Whether a tree gives "bool", "int" or "float"."""
    if expr.op in INDICES:
        return INT
    if expr.op in (BOOL, INT, FLOAT):
        return expr.op
    if expr.op == "load":
        return kind_of_dtype(expr.value[1])
    return OPERATORS[expr.op].kind(*map(kind_of, expr.inputs))


def kind_of_dtype(dtype: torch.dtype) -> str:
    """The kind of a captured tensor's elements."""
    return BOOL if dtype == torch.bool else FLOAT if dtype.is_floating_point else INT


def walk(expr: Node):
    """Every node, inputs before their user."""
    for node in expr.inputs:
        yield from walk(node)
    yield expr


def evaluate(expr: Node, b, h, q_idx, k_idx, tensors: tuple[Tensor, ...] = ()) -> Tensor:
    """The value in torch: indices are ints or integer tensors that broadcast against each other,
    and the answer has the shape of those that the tree mentions.
    """
    values = (torch.as_tensor(x).to(torch.int64) for x in (b, h, q_idx, k_idx))
    return _value(expr, dict(zip(INDICES, values)), tensors)


def _value(expr: Node, indices: dict[str, Tensor], tensors: tuple[Tensor, ...]):
    if expr.op in INDICES:
        return indices[expr.op]
    if expr.op == BOOL:  # a tensor: ~ of Python's own bools is an int
        return torch.full((), expr.value, device=indices["q_idx"].device)
    if expr.op in NUMBERS:
        return expr.value
    inputs = [_value(node, indices, tensors) for node in expr.inputs]
    if expr.op != "load":
        return OPERATORS[expr.op].compute(*inputs)
    return load(tensors[expr.value[0]], inputs)


def load(x: Tensor, index: list) -> Tensor:
    """The elements of a captured tensor at clamped indices; integers come as int64."""
    at = [
        i.to(x.device).clamp(0, n - 1)
        if isinstance(i, Tensor)
        else torch.full((), i, device=x.device)
        for i, n in zip(index, x.shape)
    ]
    # Not x[...]: under vmap that asks for the value of an index
    found = torch.ops.aten.index.Tensor(x, at) if at else x
    return found.to(torch.int64) if kind_of_dtype(x.dtype) == INT else found


def source(expr: Node) -> str:
    """The tree as one line of Triton over b, h, q_idx, k_idx and, for the captured tensor i,
    `t{i}`, `t{i}_size{d}` and `t{i}_stride{d}`.

    The four indices must lie in the sequences (kernels clamp them in ragged tiles); others are
    clamped here. Triton's `//` and `%` round to zero: where an operand is not seen to be at least
    0, what is printed rounds down.
    """
    return _text(expr, _address)


def describe(expr: Node) -> str:
    """The tree as people write it, for messages."""
    return _text(expr, lambda slot, index: f"t{slot}[{', '.join(index)}]").replace("tl.", "")


def _text(expr: Node, load_text: Callable[..., str]) -> str:
    if expr.op in INDICES:
        return expr.op
    if expr.op in (BOOL, INT, FLOAT):
        return _constant(expr.value)
    inputs = [_text(node, load_text) for node in expr.inputs]
    if expr.op == "load":
        slot = expr.value[0]
        if load_text is _address:
            inputs = [
                text if node.op in (*INDICES, INT) else _clamped(text, f"t{slot}_size{d}")
                for d, (node, text) in enumerate(zip(expr.inputs, inputs))
            ]
        return load_text(slot, inputs)
    if (
        load_text is _address
        and expr.op in ("//", "%")
        and not all(map(is_nonnegative, expr.inputs))
    ):
        x, d = inputs
        rest = f"((({x} % {d}) + {d}) % {d})"
        return rest if expr.op == "%" else f"(({x} - {rest}) // {d})"
    return OPERATORS[expr.op].text.format(*inputs)


def _constant(value) -> str:
    text = repr(value)
    text = f'float("{text}")' if text in ("inf", "-inf") else text
    return f"({text})" if text.startswith("-") else text


def _address(slot: int, index: list[str]) -> str:
    terms = [f"t{slot}", *(f"{text} * t{slot}_stride{d}" for d, text in enumerate(index))]
    return f"tl.load({' + '.join(terms)})"


def _clamped(text: str, size: str) -> str:
    return f"tl.minimum(tl.maximum({text}, 0), {size} - 1)"


def is_nonnegative(expr: Node) -> bool:
    """Whether an integer is seen to be at least 0 from its operators alone."""
    if expr.op == INT:
        return expr.value >= 0
    if expr.op in (*INDICES, "abs"):
        return True
    if expr.op in ("+", "*", "//", "%", "<<", ">>", "&", "|", "^", "minimum"):
        return all(map(is_nonnegative, expr.inputs))
    if expr.op == "maximum":
        return any(map(is_nonnegative, expr.inputs))
    return expr.op == "where" and all(map(is_nonnegative, expr.inputs[1:]))


# Trees by name, the least recently used first: names cross torch.library, trees cannot.
TABLE_SIZE = 1024
_table: OrderedDict[str, Node] = OrderedDict()
_lock = threading.Lock()


def intern(expr: Node) -> str:
    """The name of a tree, the same in every process, kept in a table of TABLE_SIZE trees."""
    name = "mask_" + hashlib.sha256(repr(expr).encode()).hexdigest()[:24]
    with _lock:
        _table.setdefault(name, expr)
        _table.move_to_end(name)
        while len(_table) > TABLE_SIZE:
            _table.popitem(last=False)
    return name


def named(name: str) -> Node:
    """The tree of a name that `intern` gave."""
    with _lock:
        if name in _table:
            _table.move_to_end(name)
            return _table[name]
    raise ArgumentError(
        f"{name} is no longer known: {TABLE_SIZE} other masks were used since; build the mask again"
    )
