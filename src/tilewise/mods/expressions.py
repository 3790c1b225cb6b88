"""The expression tree of a mask or a score function.

A tree is a nest of `Node`s: the four indices, the score, constants, loads from captured tensors,
and the operators of `OPERATORS`, which are all there is. Two functions that compute the same by the
same steps have equal trees, constants included, so that a tree is a key: a closure that is created
at every call is compiled once.

Integers are exact within 64 bits and wrap beyond, the same in torch and in kernels; those compute
in 32 bits what is seen to fit (`mods.widths`). `//` and `%` round down as Python's do, x // 0 is
0 and x % 0 is x; a shift by less than 0 or more than 63 bits moves every bit out, so that << gives
0 and >> the sign, 0 or -1. Constants that divide by 0 or shift so are refused. Floats are fp32, or
fp64 in torch where the score is; an integer that meets one becomes one, rounded. A negative
index of a tensor counts from its end, as in torch, so that `where(q_idx > 0, doc[q_idx - 1], -1)`
can be asked at query 0. One past either end is an ArgumentError in torch on a CPU; kernels, which
cannot raise, read the first or last element there.
"""

from __future__ import annotations

import hashlib
import math
import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ..errors import ArgumentError
from . import integers

Tensor = torch.Tensor
Result = TypeVar("Result")
INDICES = ("b", "h", "q_idx", "k_idx")
SCORE = "score"
BOOL, INT, FLOAT = "bool", "int", "float"
NUMERIC = {INT, FLOAT}
# How many there may be of each: so few that sums, and small multiples, stay in 32 bits.
MAX_SIZES = {"b": 2**28, "h": 2**16, "q_idx": 2**28, "k_idx": 2**28}
LEAVES = {
    **dict.fromkeys(INDICES, INT),
    SCORE: FLOAT,
    **{kind: kind for kind in (BOOL, INT, FLOAT)},
}
LARGEST = torch.finfo(torch.float32).max  # of finite float constants
# What kernels load and torch indexes; uint64 has values that int64 has not.
DTYPES = {
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


class Node:
    """One step. `op` is an index, SCORE, the kind of a constant, "load", or a key of OPERATORS.

    Equal trees are one object, compared and hashed by what they are: a part that occurs in a tree
    many times is processed once.
    """

    __slots__ = ("__weakref__", "inputs", "kind", "op", "value")
    op: str
    inputs: tuple[Node, ...]
    value: Any  # a constant's value; a load's (slot in the captured tensors, dtype)
    kind: str  # what it gives; "" if there is no such step

    def __new__(cls, op: str, inputs: tuple[Node, ...] = (), value: Any = None) -> Node:
        key = op, inputs, repr(value)  # repr: 0.0 is not -0.0
        with _lock:
            node = _nodes.get(key)
            if node is None:
                node = super().__new__(cls)
                node.op, node.inputs, node.value = op, inputs, value
                node.kind = kind_of_step(op, value, kinds=[x.kind for x in inputs])
                _nodes[key] = node
        return node

    def __repr__(self) -> str:
        return f"Node({describe(self)})"

    def __deepcopy__(self, memo: dict) -> Node:
        return self

    def __reduce__(self):
        return tree_of, (rows_of(self),)


_lock = threading.Lock()
_nodes: weakref.WeakValueDictionary[tuple, Node] = weakref.WeakValueDictionary()


def tree_of(rows: list[tuple]) -> Node:
    """The tree of such rows as `rows_of` gives."""
    nodes: list[Node] = []
    for op, inputs, value in rows:
        nodes.append(Node(op, tuple(nodes[i] for i in inputs), value))
    return nodes[-1]


class Operator(NamedTuple):
    """How an operator is written for Triton, what it gives for inputs of some kinds ("": it is
    refused), what it computes in torch, and the slope of what it gives from those of its inputs,
    where that is a float: f is its value, x its inputs, d their slopes (`mods.derivative.Term`).
    """

    text: str
    kind: Callable[[list[str]], str]
    compute: Callable[..., Tensor]
    slope: Callable[[Any, Any, Any], Any] | None = None

    @property
    def arity(self) -> int:
        """How many operands it takes."""
        return self.text.count("{")

    def written(self, operands: Sequence[str]) -> str:
        """The operator of these, for Triton."""
        return self.text.format(*operands)


def _number(kinds: list[str]) -> str:
    return "" if set(kinds) - NUMERIC else FLOAT if FLOAT in kinds else INT


def _integer(kinds: list[str]) -> str:
    return INT if set(kinds) == {INT} else ""


def _real(kinds: list[str]) -> str:
    return "" if set(kinds) - NUMERIC else FLOAT


def _whole(kinds: list[str]) -> str:
    return INT if kinds == [FLOAT] else ""


def _ordered(kinds: list[str]) -> str:
    return "" if set(kinds) - NUMERIC else BOOL


def _equal(kinds: list[str]) -> str:
    return BOOL if len(set(kinds)) == 1 or not set(kinds) - NUMERIC else ""


def _bits(kinds: list[str]) -> str:
    return kinds[0] if set(kinds) in ({BOOL}, {INT}) else ""


def _chosen(kinds: list[str]) -> str:
    condition, x, y = kinds
    return "" if condition != BOOL else x if x == y else _number([x, y])


def _slope_of_abs(f, x, d):
    return (x[0] < 0.0).where(-d[0], (x[0] > 0.0).where(d[0], 0.0))


def _slope_of_minimum(f, x, d):
    """The slope of the smaller one, and half of each where they are equal, as torch's."""
    return (x[0] < x[1]).where(d[0], (x[1] < x[0]).where(d[1], (d[0] + d[1]) * 0.5))


def _slope_of_maximum(f, x, d):
    return (x[1] < x[0]).where(d[0], (x[0] < x[1]).where(d[1], (d[0] + d[1]) * 0.5))


def _slope_of_pow(f, x, d):
    of_base = x[1].is_zero().where(0.0, d[0] * x[1] * (x[0] ** (x[1] - 1.0)))
    return of_base + d[1] * x[0].is_zero().where(0.0, f * x[0].log())


def _slope_of_erf(f, x, d):
    return d[0] * (2 / math.sqrt(math.pi)) * (-(x[0] * x[0])).exp()


LN_2 = math.log(2)
OPERATORS = {
    "+": Operator("({0} + {1})", _number, compute=operator.add, slope=lambda f, x, d: d[0] + d[1]),
    "-": Operator("({0} - {1})", _number, compute=operator.sub, slope=lambda f, x, d: d[0] - d[1]),
    "*": Operator("({0} * {1})", _number, operator.mul, lambda f, x, d: d[0] * x[1] + d[1] * x[0]),
    "/": Operator("({0} / {1})", _real, operator.truediv, lambda f, x, d: (d[0] - d[1] * f) / x[1]),
    "//": Operator("({0} // {1})", _integer, compute=integers.floor_divide),
    "%": Operator("({0} % {1})", _integer, compute=integers.remainder),
    "<<": Operator("({0} << {1})", _integer, compute=integers.shift_left),
    ">>": Operator("({0} >> {1})", _integer, compute=integers.shift_right),
    "<": Operator("({0} < {1})", _ordered, compute=operator.lt),
    "<=": Operator("({0} <= {1})", _ordered, compute=operator.le),
    "==": Operator("({0} == {1})", _equal, compute=operator.eq),
    "!=": Operator("({0} != {1})", _equal, compute=operator.ne),
    "&": Operator("({0} & {1})", _bits, compute=operator.and_),
    "|": Operator("({0} | {1})", _bits, compute=operator.or_),
    "^": Operator("({0} ^ {1})", _bits, compute=operator.xor),
    "~": Operator("(~{0})", _bits, compute=torch.bitwise_not),
    "neg": Operator("(-{0})", _number, compute=torch.neg, slope=lambda f, x, d: -d[0]),
    "abs": Operator("tl.abs({0})", _number, compute=torch.abs, slope=_slope_of_abs),
    "minimum": Operator("tl.minimum({0}, {1})", _number, torch.minimum, _slope_of_minimum),
    "maximum": Operator("tl.maximum({0}, {1})", _number, torch.maximum, _slope_of_maximum),
    "where": Operator(
        "tl.where({0}, {1}, {2})", _chosen, torch.where, lambda f, x, d: x[0].where(d[1], d[2])
    ),
    "exp": Operator("tl.exp({0})", _real, compute=torch.exp, slope=lambda f, x, d: d[0] * f),
    "exp2": Operator("tl.exp2({0})", _real, torch.exp2, lambda f, x, d: d[0] * LN_2 * f),
    "expm1": Operator("expm1({0})", _real, torch.expm1, lambda f, x, d: d[0] * (f + 1.0)),
    "log": Operator("tl.log({0})", _real, compute=torch.log, slope=lambda f, x, d: d[0] / x[0]),
    "log2": Operator("tl.log2({0})", _real, torch.log2, lambda f, x, d: d[0] * (1 / LN_2) / x[0]),
    "log1p": Operator("log1p({0})", _real, torch.log1p, lambda f, x, d: d[0] / (x[0] + 1.0)),
    "pow": Operator("power({0}, {1})", _real, compute=torch.pow, slope=_slope_of_pow),
    "sqrt": Operator("tl.sqrt({0})", _real, torch.sqrt, lambda f, x, d: d[0] * 0.5 / f),
    "rsqrt": Operator("tl.rsqrt({0})", _real, torch.rsqrt, lambda f, x, d: d[0] * -0.5 * f / x[0]),
    "sin": Operator("tl.sin({0})", _real, torch.sin, lambda f, x, d: d[0] * x[0].cos()),
    "cos": Operator("tl.cos({0})", _real, torch.cos, lambda f, x, d: -(d[0] * x[0].sin())),
    "tanh": Operator("tanh({0})", _real, torch.tanh, lambda f, x, d: d[0] * (1.0 - f * f)),
    "sigmoid": Operator(
        "tl.sigmoid({0})", _real, torch.sigmoid, lambda f, x, d: d[0] * (f * (1.0 - f))
    ),
    "erf": Operator("tl.erf({0})", _real, compute=torch.erf, slope=_slope_of_erf),
    "floor": Operator("tl.floor({0})", _real, compute=torch.floor, slope=lambda f, x, d: 0.0),
    "whole": Operator("whole({0})", _whole, compute=integers.whole),
}
# What rounds differently in torch and in kernels, which the tiles of a mask must not
ROUNDED = frozenset(name for name, step in OPERATORS.items() if step.kind is _real)
DIVISIONS, SHIFTS = ("//", "%"), ("<<", ">>")


def undefined(op: str, operands: Sequence[Node]) -> str:
    """What is wrong with an operator of these nodes; "" if nothing is."""
    if op not in (*DIVISIONS, *SHIFTS) or operands[1].op != INT:
        return ""
    value = operands[1].value
    if op in DIVISIONS:
        return "" if value else "divides by 0: divide by a number that is not 0"
    last = integers.LAST_BIT
    return "" if 0 <= value <= last else f"shifts by {value} bits: shift by 0 to {last}"


def kind_of_step(op: str, value: Any, kinds: list[str]) -> str:
    """What a step of operands of some kinds gives, BOOL, INT or FLOAT; "" if there is none."""
    if "" in kinds:
        return ""
    if op == "load":
        return "" if set(kinds) - {INT} else kind_of_dtype(value[1])
    if op in OPERATORS:
        return OPERATORS[op].kind(kinds) if len(kinds) == OPERATORS[op].arity else ""
    return "" if kinds else LEAVES.get(op, "")


def is_float_constant(value: object) -> bool:
    """Whether a value is a float that fp32 has, infinity too; rounded, but no NaN."""
    return type(value) is float and (math.isinf(value) or abs(value) <= LARGEST)


def kind_of_dtype(dtype: torch.dtype) -> str:
    """The kind of a captured tensor's elements."""
    return BOOL if dtype == torch.bool else FLOAT if dtype.is_floating_point else INT


def nodes_of(expr: Node) -> list[Node]:
    """The distinct nodes, inputs before their users, the whole tree last."""
    ordered: dict[Node, None] = {}
    stack = [expr]  # and no recursion: derivatives are deep
    while stack:
        missing = [x for x in stack[-1].inputs if x not in ordered]
        if missing:
            stack.extend(reversed(missing))
        else:
            ordered.setdefault(stack.pop())
    return list(ordered)


def compute(expr: Node, of_node: Callable[[Node, list[Result]], Result]) -> Result:
    """What `of_node` makes of a tree, from each distinct node and what it made of that one's
    inputs, which is kept no longer than it is needed.
    """
    nodes = nodes_of(expr)
    last_user = {x: node for node in nodes for x in node.inputs}
    results: dict[Node, Result] = {}
    for node in nodes:
        results[node] = of_node(node, [results[x] for x in node.inputs])
        for x in set(node.inputs):
            if last_user[x] is node:
                del results[x]
    return results[expr]


def loads_of(expr: Node) -> list[Node]:
    """What a tree reads of captured tensors."""
    return [node for node in nodes_of(expr) if node.op == "load"]


def slots_of(expr: Node) -> int:
    """How many captured tensors there must be for it."""
    return 1 + max((load.value[0] for load in loads_of(expr)), default=-1)


def rows_of(expr: Node) -> list[tuple[str, tuple[int, ...], Any]]:
    """The distinct nodes as (op, numbers of inputs, value), the whole tree last."""
    nodes = nodes_of(expr)
    numbers = {node: number for number, node in enumerate(nodes)}
    return [(node.op, tuple(numbers[x] for x in node.inputs), node.value) for node in nodes]


def takes_floats(node: Node) -> bool:
    """Whether an operator's integer operands become floats."""
    return node.op in OPERATORS and FLOAT in (node.kind, *(x.kind for x in node.inputs))


LONGEST = 500  # letters of a part in a message


def describe(expr: Node) -> str:
    """The tree as people write it, for messages; of a part that is too long, three dots."""

    def text_of(node: Node, inputs: list[str]) -> str:
        text = _described(node, inputs)
        return text if len(text) <= LONGEST else "(...)"

    return compute(expr, text_of)


def _described(node: Node, inputs: list[str]) -> str:
    if node.op in (*INDICES, SCORE):
        return node.op
    if node.op in (BOOL, INT, FLOAT):
        return constant_text(node.value)
    if node.op == "load":
        return f"t{node.value[0]}[{', '.join(inputs)}]"
    return OPERATORS[node.op].written(inputs).replace("tl.", "")


def constant_text(value: bool | int | float) -> str:
    """A number as Python and Triton read it, ready to be an operand."""
    text = repr(value)
    text = f'float("{text}")' if text in ("inf", "-inf") else text
    return f"({text})" if text.startswith("-") else text


# Trees by name, the least recently used first.
TABLE_SIZE = 1024
_table: OrderedDict[str, Node] = OrderedDict()


def intern(expr: Node) -> str:
    """The name of a tree, the same in every process, kept in a table of TABLE_SIZE trees."""
    kind = "mask" if expr.kind == BOOL else "score"
    name = f"{kind}_{hashlib.sha256(repr(rows_of(expr)).encode()).hexdigest()[:24]}"
    touch(name, expr)
    return name


def touch(name: str, expr: Node) -> None:
    """Keeps a tree under the name that `intern` gave it, as the one that was used last."""
    with _lock:
        _table.setdefault(name, expr)
        _table.move_to_end(name)
        while len(_table) > TABLE_SIZE:
            _table.popitem(last=False)


def lookup(name: str) -> Node:
    """The tree of a name that `intern` gave."""
    with _lock:
        if name in _table:
            _table.move_to_end(name)
            return _table[name]
    raise ArgumentError(
        f"{name} is no longer known: {TABLE_SIZE} other masks and score functions were used since; "
        f"build the {name.split('_')[0]} again"
    )
