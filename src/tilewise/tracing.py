"""How a plain function of indices becomes a tree: it is called once, on symbols that write down
what is done to them.

The function takes (b, h, q_idx, kv_idx), as FlexAttention's mask_mod does, and may use:

    + - * // %   < <= > >= == !=   & | ^ ~ << >>   -x abs(x)
    where, minimum, maximum     of `tilewise.mods`, or torch's own
    doc[q_idx], doc[b, q_idx]   a captured tensor, one index for each of its dimensions
    n                           a captured number or 0-d tensor

Nothing else: Python asks a symbol for its truth at `and`, `or`, `not`, `if` and a chained
comparison, and a symbol has none. Trees are kept canonical in small ways: `a > b` is `b < a`, and
x + 0 is x.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from . import expressions
from .errors import ArgumentError
from .expressions import BOOL, FLOAT, INDICES, INT, OPERATORS, Node

Tensor = torch.Tensor
MAX_NODES = 400  # evaluating and hashing recurse: below Python's own limit
ACCEPTED = (
    "a mask is made of + - * // % comparisons & | ^ ~ << >> abs, of where, minimum and maximum "
    "from tilewise.mods, and of captured tensors indexed like doc[q_idx]"
)


class Traced(NamedTuple):
    """A function's tree and the tensors it captured, in the order it meets them."""

    expr: Node
    tensors: tuple[Tensor, ...]


class Symbol:
    """A value of the function while it is traced."""

    __slots__ = ("kind", "node", "size", "tracer")
    __hash__ = None
    __array_ufunc__ = None  # numpy's numbers leave their operators to us

    def __init__(self, node: Node, kind: str, size: int, tracer: Tracer):
        self.node, self.kind, self.size, self.tracer = node, kind, size, tracer

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _torch_call(func, args, kwargs or {})

    def __repr__(self) -> str:
        return expressions.describe(self.node)

    def __getattr__(self, name: str):
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        raise ArgumentError(f"`.{name}` of {self!r} has no meaning in a mask: {ACCEPTED}")


BINARY = {
    **{"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"},
    **{"lshift": "<<", "rshift": ">>", "and": "&", "or": "|", "xor": "^"},
}
COMPARED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
UNARY = {"invert": "~", "neg": "neg", "abs": "abs"}
MIRRORED = {">": "<", ">=": "<="}
TRUTH = (
    "the truth of {0} (`and`, `or`, `not`, `if` or a chained comparison)",
    "join with &, | and ~, each comparison in brackets, and choose with tilewise.mods.where",
)
NUMBER = (
    "{0} as a Python number",
    "index a torch tensor with it, not a list or an array, and loop over nothing",
)
REFUSED = {
    "bool": TRUTH,
    **{name: NUMBER for name in ("int", "float", "index", "complex", "iter", "len", "round")},
    "truediv": ("{0} / ...", "divide with //"),
    "rtruediv": ("... / {0}", "divide with //"),
    **{name: ("** on {0}", "multiply, or shift with <<") for name in ("pow", "rpow")},
    **{name: ("divmod of {0}", "use // and %") for name in ("divmod", "rdivmod")},
    **{name: ("@ on {0}", ACCEPTED) for name in ("matmul", "rmatmul")},
    "call": ("a call of {0}", ACCEPTED),
    "getitem": (
        "{0}[...]",
        "index a captured tensor, by all its dimensions at once: doc[b, q_idx]",
    ),
    "contains": ("`in` on {0}", "join comparisons with |"),
}
# Functions of torch by their names, dunders bare.
OF_TORCH = {
    **{**BINARY, **COMPARED, **UNARY},
    **{name: name for name in ("where", "minimum", "maximum")},
    **{"floor_divide": "//", "remainder": "%", "negative": "neg", "absolute": "abs"},
    **{"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "bitwise_not": "~"},
    **{"logical_and": "&", "logical_or": "|", "logical_xor": "^", "logical_not": "~"},
    **{"bitwise_left_shift": "<<", "bitwise_right_shift": ">>"},
}


def _attach() -> None:
    """Python's operators, onto Symbol."""

    def forward(op):
        return lambda self, *others: self.tracer.build(op, self, *others)

    def reflected(op):
        return lambda self, other: self.tracer.build(op, other, self)

    def refused(what, remedy):
        def refuse(self, *_):
            raise ArgumentError(f"{what.format(self)} has no meaning in a mask: {remedy}")

        return refuse

    for name, op in {**BINARY, **COMPARED, **UNARY}.items():
        setattr(Symbol, f"__{name}__", forward(op))
    for name, op in BINARY.items():
        setattr(Symbol, f"__r{name}__", reflected(op))
    for name, (what, remedy) in REFUSED.items():
        setattr(Symbol, f"__{name}__", refused(what, remedy))


_attach()


class Tracer(TorchFunctionMode):
    """Builds nodes and collects the tensors; while it is entered, it hears what torch is asked."""

    def __init__(self):
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _torch_call(func, args, kwargs or {})

    def index(self, name: str) -> Symbol:
        """One of the four indices."""
        return Symbol(Node(name), INT, 1, self)

    def lift(self, value) -> Symbol:
        """An operand as a symbol: numbers are constants, 0-d tensors are loads."""
        if isinstance(value, Symbol):
            return value
        if isinstance(value, Tensor):
            if value.ndim:
                raise ArgumentError(
                    f"a tensor of shape {tuple(value.shape)} is an operand in a mask: index it by "
                    "each of its dimensions, like doc[q_idx] or doc[b, q_idx]"
                )
            return self.load(value, ())
        if isinstance(value, bool):
            return Symbol(Node(BOOL, (), value), BOOL, 1, self)
        if isinstance(value, numbers.Integral):
            if -(2**63) <= value < 2**63:
                return Symbol(Node(INT, (), int(value)), INT, 1, self)
        elif isinstance(value, numbers.Real) and not math.isnan(value):
            return Symbol(Node(FLOAT, (), float(value)), FLOAT, 1, self)
        raise ArgumentError(f"{value!r} ({type(value).__name__}) is an operand: {ACCEPTED}")

    def build(self, op: str, *values) -> Symbol:
        """A step from its operands."""
        if op in MIRRORED:
            op, values = MIRRORED[op], values[::-1]
        operands = [self.lift(value) for value in values]
        if op in ("+", "-") and operands[1].node == Node(INT, (), 0) and operands[0].kind == INT:
            return operands[0]
        if op == "+" and operands[0].node == Node(INT, (), 0) and operands[1].kind == INT:
            return operands[1]
        kind = OPERATORS[op].kind(*(x.kind for x in operands))
        if kind is None:
            said = " and ".join(f"{x!r} ({x.kind})" for x in operands)
            raise ArgumentError(
                f"`{op}` is not for {said} in a mask: compare numbers to get bools, turn a bool "
                "into a number with where(x, 1, 0), and keep floats out of // % << >> & | ^ ~"
            )
        return self._symbol(Node(op, tuple(x.node for x in operands)), kind, operands)

    def load(self, x: Tensor, index) -> Symbol:
        """A captured tensor at an index for each dimension."""
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != x.ndim or x.is_complex() or x.numel() == 0:
            raise ArgumentError(
                f"a captured {x.dtype} tensor of shape {tuple(x.shape)} is indexed by "
                f"{len(index)}: it must be real, not empty, and have one index for each dimension, "
                "like doc[b, q_idx]"
            )
        if not all(isinstance(i, (Symbol, Tensor, numbers.Integral)) for i in index):
            raise ArgumentError(
                f"a captured tensor is indexed by {index!r}: each must be one integer, not a "
                "slice, None or ..."
            )
        operands = [self.lift(i) for i in index]
        for symbol, size in zip(operands, x.shape):
            if symbol.kind != INT:
                raise ArgumentError(f"a captured tensor is indexed by {symbol!r}: use integers")
            if symbol.node.op == INT and not 0 <= symbol.node.value < size:
                raise ArgumentError(
                    f"a captured tensor of shape {tuple(x.shape)} is indexed by {symbol!r}: "
                    f"constants must lie in [0, {size})"
                )
        slot = next((i for i, known in enumerate(self.tensors) if known is x), len(self.tensors))
        if slot == len(self.tensors):
            self.tensors.append(x)
        node = Node("load", tuple(s.node for s in operands), (slot, x.dtype))
        return self._symbol(node, expressions.kind_of_dtype(x.dtype), operands)

    def splice(self, expr: Node, symbols: list[Symbol], tensors: tuple[Tensor, ...]) -> Symbol:
        """A tree made before, at these indices."""
        if expr.op in INDICES:
            return symbols[INDICES.index(expr.op)]
        if expr.op in (BOOL, INT, FLOAT):
            return self.lift(expr.value)
        inputs = [self.splice(node, symbols, tensors) for node in expr.inputs]
        if expr.op == "load":
            return self.load(tensors[expr.value[0]], tuple(inputs))
        return self.build(expr.op, *inputs)

    def _symbol(self, node: Node, kind: str, operands: list[Symbol]) -> Symbol:
        size = 1 + sum(x.size for x in operands)
        if size > MAX_NODES:
            raise ArgumentError(
                f"a mask has over {MAX_NODES} operators: put what it counts into a tensor and "
                "index that"
            )
        return Symbol(node, kind, size, self)


def _torch_call(func, args, kwargs):
    """What torch is asked while a function is traced: our business where a symbol takes part."""
    groups = (x if isinstance(x, (tuple, list)) else (x,) for x in (*args, *kwargs.values()))
    symbols = [x for group in groups for x in group if isinstance(x, Symbol)]
    if not symbols:
        return func(*args, **kwargs)
    name = getattr(func, "__name__", str(func)).strip("_")
    tracer = symbols[0].tracer
    if name == "getitem":
        return tracer.load(*args)
    bools_only = name.startswith("logical") and any(x.kind != BOOL for x in symbols)
    if name not in OF_TORCH or kwargs or bools_only:
        raise ArgumentError(f"torch's `{name}` of {symbols[0]!r} has no meaning here: {ACCEPTED}")
    return tracer.build(OF_TORCH[name], *args)


def trace(function: Callable) -> Traced:
    """Calls the function on symbols."""
    tracer = Tracer()
    name = getattr(function, "__name__", type(function).__name__)
    try:
        with tracer:
            result = function(*map(tracer.index, INDICES))
    except ArgumentError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"mask function {name} cannot be traced ({type(error).__name__}: {error}): it takes "
            f"(b, h, q_idx, kv_idx), and {ACCEPTED}"
        ) from error
    result = tracer.lift(result)
    if result.kind != BOOL:
        raise ArgumentError(
            f"mask function {name} returns {result!r}, which is {result.kind}: it must return a "
            "bool, so compare it with something"
        )
    return Traced(result.node, tuple(tracer.tensors))


def where(condition, x, y):
    """x where the condition holds, else y: for symbols, and for tensors as torch.where."""
    return _choose("where", condition, x, y)


def minimum(x, y):
    """The smaller of two: symbols, tensors or numbers."""
    return _choose("minimum", x, y)


def maximum(x, y):
    """The larger of two: symbols, tensors or numbers."""
    return _choose("maximum", x, y)


def _choose(op: str, *values):
    for value in values:
        if isinstance(value, Symbol):
            return value.tracer.build(op, *values)
    if not any(isinstance(value, Tensor) for value in values):
        values = [torch.as_tensor(value) for value in values]
    return OPERATORS[op].compute(*values)
