"""Symbols, the values of a function during its trace: Python's operators and torch's functions are
either passed to the tracer or refused with a remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from . import expressions
from .expressions import BOOL, FLOAT, INT, Node

if TYPE_CHECKING:
    from .trace import Tracer


BINARY = {
    **{"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"},
    **{"lshift": "<<", "rshift": ">>", "and": "&", "or": "|", "xor": "^"},
}


def _binary(name: str) -> tuple[Callable[..., Symbol], Callable[..., Symbol]]:
    """An operator of two, by its first and by its second."""
    op = BINARY[name]
    return (
        lambda self, other: self.tracer.build(op, self, other),
        lambda self, other: self.tracer.build(op, other, self),
    )


class Symbol:
    """A value of the function while it is traced."""

    __slots__ = ("node", "size", "tracer")
    __hash__ = None  # pyright: ignore[reportAssignmentType]  # == gives a symbol
    __array_ufunc__ = None  # numpy's numbers leave their operators to us

    __add__, __radd__ = _binary("add")
    __sub__, __rsub__ = _binary("sub")
    __mul__, __rmul__ = _binary("mul")
    __truediv__, __rtruediv__ = _binary("truediv")
    __floordiv__, __rfloordiv__ = _binary("floordiv")
    __mod__, __rmod__ = _binary("mod")
    __lshift__, __rlshift__ = _binary("lshift")
    __rshift__, __rrshift__ = _binary("rshift")
    __and__, __rand__ = _binary("and")
    __or__, __ror__ = _binary("or")
    __xor__, __rxor__ = _binary("xor")

    def __init__(self, node: Node, size: int, tracer: Tracer):
        self.node, self.size, self.tracer = node, size, tracer

    @property
    def kind(self) -> str:
        """Whether it is a bool, an int or a float."""
        return self.node.kind

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return torch_call(func, args, kwargs or {})

    def __repr__(self) -> str:
        return expressions.describe(self.node)

    def __invert__(self) -> Symbol:
        return self.tracer.build("~", self)

    def __neg__(self) -> Symbol:
        return self.tracer.build("neg", self)

    def __abs__(self) -> Symbol:
        return self.tracer.build("abs", self)

    def new_ones(self, size, *, dtype=None) -> Symbol:
        """The constant 1, or True, as `and_masks` of FlexAttention begins with."""
        return self._new("new_ones", 1, size, dtype)

    def new_zeros(self, size, *, dtype=None) -> Symbol:
        """The constant 0, or False, as `or_masks` begins with."""
        return self._new("new_zeros", 0, size, dtype)

    def _new(self, name: str, value: int, size, dtype) -> Symbol:
        if size != ():
            raise no_meaning(self.tracer, f"`.{name}` of shape {size!r}", "the shape must be ()")
        kind = self.kind if dtype is None else expressions.kind_of_dtype(dtype)
        return self.tracer.lift({BOOL: bool, INT: int, FLOAT: float}[kind](value))

    def __getattr__(self, name: str):
        if name.startswith("__"):  # what Python itself looks for
            raise AttributeError(name)
        raise no_meaning(self.tracer, f"`.{name}` of {self!r}")


def no_meaning(tracer: Tracer, what: str, remedy: str = "") -> ArgumentError:
    """The error that names what was done to a symbol, and where, and what to do instead."""
    dialect = tracer.dialect
    return ArgumentError(
        f"{what} has no meaning in a {dialect.name}: "
        + (remedy or f"a {dialect.name} is made of {dialect.accepted}")
    )


COMPARED = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
UNARY = {"invert": "~", "neg": "neg", "abs": "abs"}
FUNCTIONS = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid")
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
    **dict.fromkeys(("pow", "rpow"), ("** on {0}", "multiply, or shift with <<")),
    **dict.fromkeys(("divmod", "rdivmod"), ("divmod of {0}", "use // and %")),
    **dict.fromkeys(("matmul", "rmatmul"), ("@ on {0}", "")),
    "call": ("a call of {0}", ""),
    "getitem": (
        "{0}[...]",
        "index a captured tensor, by all its dimensions at once: doc[b, q_idx]",
    ),
    "contains": ("`in` on {0}", "join comparisons with |"),
}
# Functions of torch by their names, dunders bare.
OF_TORCH = {
    **{**BINARY, **COMPARED, **UNARY},
    **{name: name for name in ("where", "minimum", "maximum", *FUNCTIONS)},
    **{"floor_divide": "//", "remainder": "%", "negative": "neg", "absolute": "abs"},
    **{"div": "/", "divide": "/", "true_divide": "/", "subtract": "-", "multiply": "*"},
    **{"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "bitwise_not": "~"},
    **{"logical_and": "&", "logical_or": "|", "logical_xor": "^", "logical_not": "~"},
    **{"bitwise_left_shift": "<<", "bitwise_right_shift": ">>"},
}


def _attach() -> None:
    """Comparisons and what is refused, onto Symbol."""

    def compared(op):
        return lambda self, other: self.tracer.build(op, self, other)

    def refused(what, remedy):
        def refuse(self, *_):
            raise no_meaning(self.tracer, what.format(self), remedy)

        return refuse

    for name, op in COMPARED.items():
        setattr(Symbol, f"__{name}__", compared(op))
    for name, (what, remedy) in REFUSED.items():
        setattr(Symbol, f"__{name}__", refused(what, remedy))


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
    name = getattr(func, "__name__", str(func)).strip("_")
    tracer = symbols[0].tracer
    if name == "getitem":
        return tracer.load(*args)
    bools_only = name.startswith("logical") and any(x.kind != BOOL for x in symbols)
    if name not in OF_TORCH or kwargs or bools_only:
        raise no_meaning(tracer, f"torch's `{name}` of {symbols[0]!r}")
    return tracer.build(OF_TORCH[name], *args)
