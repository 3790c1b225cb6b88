"""Traces a function of indices: it is called once, on symbols that record their operators in a
tree.

A mask takes (b, h, q_idx, kv_idx), as FlexAttention's mask_mod does, and may use::

    + - * // % **   < <= > >= == !=   & | ^ ~ << >>   -x abs(x)
    where, minimum, maximum     of `tilewise.mods`, or torch's own
    clamp, sign, long, ...      of torch, as functions or methods: `tilewise.mods.functions`
    doc[q_idx], doc[b, q_idx]   a captured tensor, one index for each of its dimensions
    n                           a captured number or 0-d tensor
    b.new_ones((), dtype=...)   a constant, and new_zeros: FlexAttention's and_masks and or_masks
    s * (q_idx < kv_idx)        bools are 0 and 1 in sums and products, as torch's

A score function takes (score, b, h, q_idx, kv_idx), as its score_mod does, and may use / as well,
and functions that round: torch's exp, log, tanh, erf, sin, pow, gelu, softplus and the like.

Nothing else: a symbol has no truth value, which Python needs for `and`, `or`, `not`, `if` and
chained comparisons. Trees are canonical in small ways: `a > b` is `b < a`, and ``x + 0``,
``x & True`` and ``x | False`` are x.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ..errors import ArgumentError
from . import expressions
from .expressions import (
    BOOL,
    DTYPES,
    FLOAT,
    INDICES,
    INT,
    LARGEST,
    NUMERIC,
    OPERATORS,
    ROUNDED,
    SCORE,
    Node,
    is_float_constant,
    slots_of,
)
from .symbols import Row, Symbol, no_meaning, torch_call

Tensor = torch.Tensor
MAX_NODES = 400
ZERO = Node(INT, (), 0)
MIRRORED = {">": "<", ">=": "<="}
NEUTRAL = {"&": Node(BOOL, (), True), "|": Node(BOOL, (), False)}


class Dialect(NamedTuple):
    """What a kind of function takes, may be made of and returns."""

    name: str
    parameters: tuple[str, ...]
    operators: frozenset[str]
    accepted: str
    result: str
    remedy: str  # for another result


MASK = Dialect(
    "mask",
    INDICES,
    frozenset(OPERATORS) - ROUNDED,
    "+ - * // % comparisons & | ^ ~ << >> abs, where, minimum and maximum of tilewise.mods, "
    "torch's clamp, sign, long and others that do not round, and captured tensors indexed like "
    "doc[q_idx]",
    BOOL,
    "so compare it with something",
)
SCORE_FUNCTION = Dialect(
    "score function",
    (SCORE, *INDICES),
    frozenset(OPERATORS),
    "+ - * / // % comparisons & | ^ ~ << >> abs, where, minimum and maximum of tilewise.mods, "
    "torch's exp, log, tanh, gelu and others (tilewise.mods.functions lists them), and captured "
    "tensors indexed like bias[h, q_idx, kv_idx]",
    FLOAT,
    "so add it to the score, multiply it by 1.0, or choose with where(x, score, -math.inf)",
)


class Tracer(TorchFunctionMode):
    """Builds nodes and collects tensors; while entered, it intercepts torch functions."""

    def __init__(self, dialect: Dialect, tensors: tuple[Tensor, ...] = ()):
        super().__init__()
        self.dialect = dialect
        self.tensors = list(tensors)
        self.steps: set[Node] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return torch_call(func, args, kwargs=kwargs or {})

    def parameters(self) -> list[Symbol]:
        """What the function is called on."""
        return [Symbol(Node(p), self) for p in self.dialect.parameters]

    def lift(self, value) -> Symbol:
        """An operand as a symbol: numbers are constants, 0-d tensors are loads."""
        if isinstance(value, Symbol):
            return value
        if isinstance(value, Tensor):
            if value.ndim:
                raise ArgumentError(
                    f"a tensor of shape {tuple(value.shape)} is an operand in a "
                    f"{self.dialect.name}: index it by each of its dimensions, like doc[q_idx] or "
                    "doc[b, q_idx]"
                )
            return self.load(value, ())
        if isinstance(value, bool):
            return Symbol(Node(BOOL, (), value), self)
        if isinstance(value, numbers.Integral):
            if -(2**63) <= int(value) < 2**63:
                return Symbol(Node(INT, (), int(value)), self)
        elif isinstance(value, numbers.Real):
            if is_float_constant(float(value)):
                return Symbol(Node(FLOAT, (), float(value)), self)
            if math.isfinite(value):
                remedy = "floats are fp32, so use math.inf or scale what it meets"
                raise no_meaning(self, f"{value!r}, past {LARGEST:.3g},", remedy=remedy)
        if isinstance(value, Row):
            raise ArgumentError(_indexed_by(value.x, value.index))
        raise no_meaning(self, f"{value!r} ({type(value).__name__}) as an operand")

    def build(self, op: str, values: Sequence[Any]) -> Symbol:
        """A step from its operands."""
        if op in MIRRORED:
            op, values = MIRRORED[op], values[::-1]
        operands = [self.lift(value) for value in values]
        if op in ("+", "*") and {x.kind for x in operands} & NUMERIC:  # torch's bools are 0 and 1
            operands = [self.build("where", (x, 1, 0)) if x.kind == BOOL else x for x in operands]
        node = Node(op, tuple(x.node for x in operands))
        if op not in self.dialect.operators:
            remedy = "divide with //" if op == "/" else ""
            raise no_meaning(self, expressions.describe(node), remedy=remedy)
        if op in ("+", "-") and operands[1].node == ZERO and operands[0].kind == INT:
            return operands[0]
        if op == "+" and operands[0].node == ZERO and operands[1].kind == INT:
            return operands[1]
        if op in NEUTRAL and BOOL == operands[0].kind == operands[1].kind:
            for x, other in (operands, operands[::-1]):
                if x.node == NEUTRAL[op]:
                    return other
        if not node.kind:
            said = " and ".join(f"{x!r} ({x.kind})" for x in operands)
            raise ArgumentError(
                f"`{op}` does not take {said} in a {self.dialect.name}: compare numbers to get "
                "bools, turn a bool into a number with where(x, 1, 0), and keep floats out of // "
                "% << >> & | ^ ~"
            )
        if wrong := expressions.undefined(op, node.inputs):
            raise ArgumentError(f"{expressions.describe(node)} in a {self.dialect.name} {wrong}")
        return self._symbol(node)

    def index(self, x: Tensor, index) -> Symbol | Row:
        """A captured tensor at an index for each of its dimensions, or for the first of them."""
        index = index if isinstance(index, tuple) else (index,)
        are_one = all(isinstance(i, (Symbol, Tensor, numbers.Integral)) for i in index)
        return Row(self, x, index=index) if are_one and len(index) < x.ndim else self.load(x, index)

    def load(self, x: Tensor, index: tuple) -> Symbol:
        """A captured tensor at an index for each dimension."""
        _check_captured(x)
        if len(index) != x.ndim or x.numel() == 0:
            raise ArgumentError(_indexed_by(x, index))
        if not all(isinstance(i, (Symbol, Tensor, numbers.Integral)) for i in index):
            raise ArgumentError(
                f"a captured tensor is indexed by {index!r}: each must be one integer, not a "
                "slice, None or ..."
            )
        operands = [self.lift(i) for i in index]
        for d, (symbol, size) in enumerate(zip(operands, x.shape)):
            if symbol.kind != INT:
                raise ArgumentError(f"a captured tensor is indexed by {symbol!r}: use integers")
            if symbol.node.op != INT or 0 <= symbol.node.value < size:
                continue
            if not -size <= symbol.node.value < 0:
                raise ArgumentError(
                    f"a captured tensor of shape {tuple(x.shape)} is indexed by {symbol!r}: "
                    f"constants must lie in [-{size}, {size})"
                )
            operands[d] = self.lift(symbol.node.value + int(size))
        slot = next((i for i, tensor in enumerate(self.tensors) if tensor is x), len(self.tensors))
        if slot == len(self.tensors):
            self.tensors.append(x)
        node = Node("load", tuple(s.node for s in operands), (slot, x.dtype))
        return self._symbol(node)

    def splice(self, expr: Node, leaves: dict[str, Symbol], tensors: tuple[Tensor, ...]) -> Symbol:
        """A tree made before, at these indices and this score."""

        def symbol_of(node: Node, inputs: list[Symbol]) -> Symbol:
            if node.op in leaves:
                return leaves[node.op]
            if node.op in (BOOL, INT, FLOAT):
                return self.lift(node.value)
            if node.op == "load":
                return self.load(tensors[node.value[0]], tuple(inputs))
            return self.build(node.op, inputs)

        return expressions.compute(expr, symbol_of)

    def _symbol(self, node: Node) -> Symbol:
        self.steps.add(node)
        if len(self.steps) > MAX_NODES:
            raise ArgumentError(
                f"a {self.dialect.name} has more than {MAX_NODES} operators: compute a tensor "
                "before, and index that"
            )
        return Symbol(node, self)


def _indexed_by(x: Tensor, index: tuple) -> str:
    return (
        f"a captured {x.dtype} tensor of shape {tuple(x.shape)} is indexed by {len(index)}: it "
        "must not be empty, and have one index for each dimension, like doc[b, q_idx]"
    )


def _check_captured(x: Tensor) -> None:
    """Checks that kernels can load a captured tensor in place."""
    remedy = ""
    if x.layout != torch.strided:
        remedy = "x.to_dense()"
    elif x.is_quantized:
        remedy = "x.dequantize()"
    elif x.dtype not in DTYPES:
        is_float = x.dtype.is_floating_point
        remedy = "x.real or x.imag" if x.is_complex() else "x.float()" if is_float else "x.long()"
    elif x.is_neg():
        remedy = "x.resolve_neg()"
    if remedy:
        raise ArgumentError(
            f"a captured tensor x of shape {tuple(x.shape)} is {x.dtype} ({x.layout}"
            f"{', negated when it is read' if x.is_neg() else ''}), which kernels cannot load: "
            f"capture {remedy} instead"
        )


def trace(
    function: Callable, dialect: Dialect, tensors: tuple[Tensor, ...] = ()
) -> tuple[Node, tuple[Tensor, ...]]:
    """Calls the function on symbols and returns its tree with the tensors that it captured, in the
    order of their use. `tensors` are captured already, by a companion of the function.
    """
    tracer = Tracer(dialect, tensors)
    label = f"{dialect.name.removesuffix(' function')} function"
    label += f" {getattr(function, '__name__', type(function).__name__)}"
    try:
        with tracer:
            result = function(*tracer.parameters())
    except ArgumentError:
        raise
    except Exception as error:
        takes = ", ".join(dialect.parameters).replace("k_idx", "kv_idx")
        raise ArgumentError(
            f"{label} cannot be traced ({type(error).__name__}: {error}): it takes ({takes}), and "
            f"a {dialect.name} may use {dialect.accepted}"
        ) from error
    result = tracer.lift(result)
    if result.kind != dialect.result:
        raise ArgumentError(
            f"{label} returns {result!r}, which is {result.kind}: it must return a "
            f"{dialect.result}, {dialect.remedy}"
        )
    return result.node, tuple(tracer.tensors[: max(len(tensors), slots_of(result.node))])


def where(condition, x, y):
    """x where the condition holds, else y: for symbols, and for tensors as torch.where."""
    return _choose("where", condition, x, y)


def minimum(x, y):
    """The smaller of two: symbols, tensors or numbers."""
    return _choose("minimum", x, y)


def maximum(x, y):
    """The larger of two: symbols, tensors or numbers."""
    return _choose("maximum", x, y)


def _choose(op: str, *values) -> Any:
    for value in values:
        if isinstance(value, Symbol):
            return value.tracer.build(op, values)
    values = [torch.as_tensor(value) for value in values]
    return OPERATORS[op].compute(*values)
