"""What a mask or a score function computes: its expression as a tree, and its value in torch.

A tree is a nest of `Node`s: the four indices, the score, constants, loads from captured tensors,
and the operators of `OPERATORS`, which are all there is. Two functions that compute the same by the
same steps have equal trees, constants included, so that a tree is a key: a closure made anew at
every call compiles nothing anew.

Integers are as wide as int64 in torch and 32 bits in kernels: keep what a function computes below
2^31. `//` and `%` round down as Python's do. Floats are fp32, or fp64 in torch where the score is;
an integer that meets one becomes one. An index past either end of a tensor reads its first or last
element: that is what lets `where(q_idx > 0, doc[q_idx - 1], -1)` be asked at query 0.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch

from .errors import ArgumentError

Tensor = torch.Tensor
INDICES = ("b", "h", "q_idx", "k_idx")
SCORE = "score"
BOOL, INT, FLOAT = "bool", "int", "float"
NUMBERS = {INT, FLOAT}


class Node(NamedTuple):
    """One step. `op` is an index, SCORE, the kind of a constant, "load", or a key of OPERATORS."""

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


def _real(*kinds: str) -> str | None:
    return None if set(kinds) - NUMBERS else FLOAT


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
    "/": Operator("({0} / {1})", _real, operator.truediv),
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
    "exp": Operator("tl.exp({0})", _real, torch.exp),
    "exp2": Operator("tl.exp2({0})", _real, torch.exp2),
    "log": Operator("tl.log({0})", _real, torch.log),
    "log2": Operator("tl.log2({0})", _real, torch.log2),
    "sqrt": Operator("tl.sqrt({0})", _real, torch.sqrt),
    "rsqrt": Operator("tl.rsqrt({0})", _real, torch.rsqrt),
    "tanh": Operator("tanh({0})", _real, torch.tanh),
    "sigmoid": Operator("tl.sigmoid({0})", _real, torch.sigmoid),
}


def kind_of(expr: Node) -> str:
    """Whether a tree gives "bool", "int" or "float"."""
    return _kind(expr.op, expr.value, [kind_of(node) for node in expr.inputs])


def _kind(op: str, value: object, kinds: list[str]) -> str:
    if op in INDICES:
        return INT
    if op == SCORE:
        return FLOAT
    if op in (BOOL, INT, FLOAT):
        return op
    return kind_of_dtype(value[1]) if op == "load" else OPERATORS[op].kind(*kinds)


def kind_of_dtype(dtype: torch.dtype) -> str:
    """The kind of a captured tensor's elements."""
    return BOOL if dtype == torch.bool else FLOAT if dtype.is_floating_point else INT


def walk(expr: Node):
    """Every node, inputs before their user."""
    for node in expr.inputs:
        yield from walk(node)
    yield expr


class Step(NamedTuple):
    """A node whose inputs are given by their numbers, as computers take them."""

    op: str
    inputs: tuple[int, ...]
    value: object
    kind: str


def steps(expr: Node) -> list[Step]:
    """The distinct nodes, inputs before their users, the whole tree last: what stands in the tree
    twice is here once.
    """
    found: list[Step] = []
    known: dict[str, int] = {}
    numbers: dict[int, int] = {}  # of nodes, by id
    stack = [expr]  # and no recursion: derivatives are deep
    while stack:
        node = stack[-1]
        missing = [x for x in node.inputs if id(x) not in numbers]
        if missing:
            stack.extend(reversed(missing))
            continue
        stack.pop()
        inputs = tuple(numbers[id(x)] for x in node.inputs)
        kind = _kind(node.op, node.value, [found[i].kind for i in inputs])
        step = Step(node.op, inputs, node.value, kind)
        number = known.setdefault(repr(step), len(found))  # repr: 0.0 is not -0.0
        numbers[id(node)] = number
        if number == len(found):
            found.append(step)
    return found


def takes_floats(op: str, kinds: list[str]) -> bool:
    """Whether an operator's integer operands become floats."""
    return op in OPERATORS and FLOAT in (*kinds, OPERATORS[op].kind(*kinds))


def evaluate(
    expr: Node, b, h, q_idx, k_idx, tensors: tuple[Tensor, ...] = (), score: Tensor | None = None
) -> Tensor:
    """The value in torch: indices are ints or integer tensors that broadcast against each other and
    the score, and the answer has the shape of those that the tree mentions.
    """
    given = {name: _tensor(x).long() for name, x in zip(INDICES, (b, h, q_idx, k_idx))}
    dtype = torch.float32
    if score is not None:
        score = _tensor(score)
        dtype = torch.promote_types(score.dtype, dtype)
        given[SCORE] = score.to(dtype)
    plan = steps(expr)
    last_user = {i: number for number, step in enumerate(plan) for i in step.inputs}
    found: list = []
    for number, step in enumerate(plan):
        kinds = [plan[i].kind for i in step.inputs]
        operands = [found[i] for i in step.inputs]
        if takes_floats(step.op, kinds):
            operands = [x.to(dtype) if k == INT else x for x, k in zip(operands, kinds)]
        found.append(_value(step, operands, given, tensors, dtype))
        for i in step.inputs:
            if last_user[i] == number:
                found[i] = None  # its memory
    return found[-1]


def _tensor(x) -> Tensor:
    """A tensor as it is, a number as one that goes with those of any device."""
    return x if isinstance(x, Tensor) else torch.tensor(x, device="cpu")


def _value(step: Step, operands: list, given: dict[str, Tensor], tensors, dtype) -> Tensor:
    if step.op in given:
        return given[step.op]
    if step.op in (BOOL, INT, FLOAT):
        kind = dtype if step.op == FLOAT else None
        return torch.full((), step.value, dtype=kind, device=given["q_idx"].device)
    if step.op != "load":
        return OPERATORS[step.op].compute(*operands)
    found = load(tensors[step.value[0]], operands)
    return found.to(dtype) if step.kind == FLOAT else found


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


def describe(expr: Node) -> str:
    """The tree as people write it, for messages."""
    if expr.op in (*INDICES, SCORE):
        return expr.op
    if expr.op in (BOOL, INT, FLOAT):
        return constant_text(expr.value)
    inputs = [describe(node) for node in expr.inputs]
    if expr.op == "load":
        return f"t{expr.value[0]}[{', '.join(inputs)}]"
    return OPERATORS[expr.op].text.format(*inputs).replace("tl.", "")


def constant_text(value: bool | int | float) -> str:
    """A number as Python and Triton read it, ready to be an operand."""
    text = repr(value)
    text = f'float("{text}")' if text in ("inf", "-inf") else text
    return f"({text})" if text.startswith("-") else text


# Trees by name, the least recently used first.
TABLE_SIZE = 1024
_table: OrderedDict[str, Node] = OrderedDict()
_lock = threading.Lock()


def intern(expr: Node) -> str:
    """The name of a tree, the same in every process, kept in a table of TABLE_SIZE trees."""
    plan = steps(expr)
    kind = "mask" if plan[-1].kind == BOOL else "score"
    name = f"{kind}_{hashlib.sha256(repr(plan).encode()).hexdigest()[:24]}"
    remember(name, expr)
    return name


def remember(name: str, expr: Node) -> None:
    """Keeps a tree under the name that `intern` gave it, as the one that was used last."""
    with _lock:
        _table.setdefault(name, expr)
        _table.move_to_end(name)
        while len(_table) > TABLE_SIZE:
            _table.popitem(last=False)


def text_of(name: str) -> str:
    """A named tree in words that any process understands: what crosses torch.library, and so is
    written into compiled and exported programs. "" of "".
    """
    return _text(name)


# As torch.compiler.assume_constant_result does: a compiler takes the answer, and no locks
text_of._dynamo_marked_constant = True


@functools.lru_cache(maxsize=TABLE_SIZE)
def _text(name: str) -> str:
    told = []
    for op, inputs, value, _ in steps(named(name)) if name else ():
        if op == "load":
            value = value[0], str(value[1]).removeprefix("torch.")
        told.append((op, inputs, value))
    return json.dumps(told) if told else ""


def name_of(text: str) -> str:
    """The name of the tree that a text of `text_of` tells, which is then known here."""
    if not text:
        return ""
    name, expr = _told(text)
    remember(name, expr)
    return name


@functools.lru_cache(maxsize=TABLE_SIZE)
def _told(text: str) -> tuple[str, Node]:
    nodes: list[Node] = []
    for op, inputs, value in json.loads(text):
        if op == "load":
            value = value[0], getattr(torch, value[1])
        nodes.append(Node(op, tuple(nodes[i] for i in inputs), value))
    return intern(nodes[-1]), nodes[-1]


def named(name: str) -> Node:
    """The tree of a name that `intern` gave."""
    with _lock:
        if name in _table:
            _table.move_to_end(name)
            return _table[name]
    raise ArgumentError(
        f"{name} is no longer known: {TABLE_SIZE} other masks and score functions were used since; "
        f"build the {name.split('_')[0]} again"
    )
