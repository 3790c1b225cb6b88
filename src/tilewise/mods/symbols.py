"""Symbols, the values of a function during its trace: Python's operators and torch's functions are
either passed to the tracer or refused with a remedy.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..errors import ArgumentError
from . import expressions, functions
from .expressions import BOOL, Node


class Tracer(Protocol):
    """What symbols ask of a tracer, `trace.Tracer`, which makes them."""

    dialect: Any

    def build(self, op: str, values: Sequence[Any]) -> Symbol: ...
    def lift(self, value: Any) -> Symbol: ...
    def index(self, x: torch.Tensor, index: Any) -> Symbol | Row: ...
    def splice(self, expr: Node, leaves: dict[str, Symbol], tensors: tuple) -> Symbol: ...


class Row:
    """Part of a captured tensor, which the first of its dimensions were indexed for."""

    def __init__(self, tracer: Tracer, x: torch.Tensor, index: tuple):
        self.tracer, self.x, self.index = tracer, x, index

    def __getitem__(self, index) -> Symbol | Row:
        indices = index if isinstance(index, tuple) else (index,)
        return self.tracer.index(self.x, (*self.index, *indices))


class Symbol:
    """A value of the function while it is traced."""

    __slots__ = ("node", "tracer")
    __hash__ = None  # pyright: ignore[reportAssignmentType]  # == gives a symbol
    __array_ufunc__ = None  # numpy's numbers leave their operators to us

    def __init__(self, node: Node, tracer: Tracer):
        self.node, self.tracer = node, tracer

    @property
    def kind(self) -> str:
        """Whether it is a bool, an int or a float."""
        return self.node.kind

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return torch_call(func, args, kwargs=kwargs or {})

    def __repr__(self) -> str:
        return expressions.describe(self.node)

    def new_ones(self, size, *, dtype=None, device=None) -> Symbol:
        """The constant 1, or True, which FlexAttention's `noop_mask` is and `and_masks` begins
        with.
        """
        return self._new("new_ones", 1, size=size, dtype=dtype)

    def new_zeros(self, size, *, dtype=None, device=None) -> Symbol:
        """The constant 0, or False, as `or_masks` begins with."""
        return self._new("new_zeros", 0, size=size, dtype=dtype)

    def _new(self, name: str, value: int, size, dtype) -> Symbol:
        if size != ():
            raise no_meaning(self.tracer, f"`.{name}` of shape {size!r}", "the shape must be ()")
        return functions.filled(self, value, dtype=dtype)

    def __pow__(self, other) -> Symbol:
        return named(self.tracer, "pow", args=(self, other), kwargs={})

    def __rpow__(self, other) -> Symbol:
        return named(self.tracer, "pow", args=(other, self), kwargs={})

    @property
    def device(self) -> None:
        """None: a function is traced once for all devices."""

    @property
    def dtype(self) -> torch.dtype:
        """What `.to` takes for its kind."""
        return functions.DTYPE_OF[self.kind]

    def __getattr__(self, name: str):
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        if name in functions.METHODS or name in functions.TAKEN:
            return lambda *args, **kwargs: named(self.tracer, name, (self, *args), kwargs, True)
        raise no_meaning(self.tracer, f"`.{name}` of {self!r}")


def no_meaning(tracer: Tracer, what: str, remedy: str = "") -> ArgumentError:
    """The error that names what was done to a symbol, and where, and what to do instead."""
    dialect = tracer.dialect
    return ArgumentError(
        f"{what} has no meaning in a {dialect.name}: "
        + (remedy or f"a {dialect.name} may use {dialect.accepted}")
    )


# Names of methods, by which `functions.ALIASES` has the operators
BINARY = tuple("add sub mul truediv floordiv mod lshift rshift and or xor".split())
COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
UNARY = ("invert", "neg", "abs")
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
    **dict.fromkeys(("int", "float", "index", "complex", "iter", "len", "round"), NUMBER),
    **dict.fromkeys(("divmod", "rdivmod"), ("divmod of {0}", "use // and %")),
    **dict.fromkeys(("matmul", "rmatmul"), ("@ on {0}", "")),
    "call": ("a call of {0}", ""),
    "getitem": (
        "{0}[...]",
        "index a captured tensor, once for each of its dimensions: doc[b, q_idx] or doc[b][q_idx]",
    ),
    "contains": ("`in` on {0}", "join comparisons with |"),
}


def _attach() -> None:
    """The operators, and what is refused, onto Symbol."""

    def of_two(op):
        return lambda self, other: self.tracer.build(op, (self, other))

    def of_two_swapped(op):
        return lambda self, other: self.tracer.build(op, (other, self))

    def of_one(op):
        return lambda self: self.tracer.build(op, (self,))

    def refused(subject, remedy):
        def refuse(self, *_):
            raise no_meaning(self.tracer, subject.format(self), remedy=remedy)

        return refuse

    ops = functions.ALIASES
    for name in BINARY + COMPARED:
        setattr(Symbol, f"__{name}__", of_two(ops[name]))
    for name in BINARY:
        setattr(Symbol, f"__r{name}__", of_two_swapped(ops[name]))
    for name in UNARY:
        setattr(Symbol, f"__{name}__", of_one(ops.get(name, name)))
    for name, (subject, remedy) in REFUSED.items():
        setattr(Symbol, f"__{name}__", refused(subject, remedy))


_attach()


def symbols_in(args, kwargs) -> list[Symbol]:
    """The symbols among a call's arguments, also within tuples and lists."""
    groups = (x if isinstance(x, (tuple, list)) else (x,) for x in (*args, *kwargs.values()))
    return [x for group in groups for x in group if isinstance(x, Symbol)]


def torch_call(func, args, kwargs):
    """Handles a call of a torch function during a trace, if a symbol takes part."""
    symbols = symbols_in(args, kwargs)
    if not symbols:
        return func(*args, **kwargs)
    name = getattr(func, "__name__", str(func)).removeprefix("special_")
    name = name.strip("_") if name.startswith("__") else name
    tracer = symbols[0].tracer
    if name == "getitem":
        x, index = args
        return tracer.index(x, index)
    return named(tracer, name, args=args, kwargs=kwargs)


def named(tracer: Tracer, name: str, args: tuple, kwargs: dict, is_method: bool = False) -> Symbol:
    """What a function of torch's, by its name, gives for symbols; an error for what is refused."""
    taken = functions.TAKEN.get(name)
    if is_method:
        taken = functions.METHODS.get(name, taken)
    symbols = symbols_in(args, kwargs)
    bools_only = name.startswith("logical") and any(x.kind != BOOL for x in symbols)
    text = f"torch's `{name}` of {symbols[0]!r}"
    if taken is None or bools_only:
        raise no_meaning(tracer, text)
    try:
        inspect.signature(taken).bind(*args, **kwargs)
        return taken(*args, **kwargs)
    except functions.Refused as error:
        raise no_meaning(tracer, text, remedy=str(error)) from None
    except TypeError:
        raise no_meaning(tracer, f"{text} with these arguments") from None
