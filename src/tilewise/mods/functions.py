"""What torch names in mask and score functions: a row for each of its functions, which are methods
of its tensors too, as an operator of `OPERATORS` or made of some, with torch's own arguments.

Values, and derivatives where functions have an edge, are torch's: relu'(0) is 0, clamp's slope at
its ends is 1. Floats stay fp32, so that a conversion to another float is refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from .expressions import BOOL, FLOAT, INT, OPERATORS, kind_of_dtype

LN_10 = math.log(10)
HIGHEST_POWER = 16  # that is made of products
DTYPE_OF = {BOOL: torch.bool, INT: torch.int64, FLOAT: torch.float32}
# Those of flex_attention's indices and of comparisons; in addition to fp32
TAKEN_DTYPES = {torch.bool, torch.int32, torch.int64, torch.float32}


class Refused(Exception):
    """Why a function is not taken with these arguments, for a message."""


def step(op: str, *values: Any) -> Any:
    """An operator of some values, of which one is a symbol."""
    tracer = next(x.tracer for x in values if hasattr(x, "tracer"))
    return tracer.build(op, values)


def where(condition, x, y):
    """torch.where."""
    return step("where", condition, x, y)


def clamp(x, min=None, max=None):
    """torch.clamp, whose slope at an end is 1; max where min is above it."""
    if min is not None:
        x = where(x < min, min, x)
    return x if max is None else where(step("<", max, x), max, x)


def _not_in_place(inplace: bool) -> None:
    if inplace:
        raise Refused("inplace=True: nothing is changed in place, so use what it returns")


def hardtanh(x, min_val=-1.0, max_val=1.0, inplace=False):
    """torch.nn.functional.hardtanh, whose slope at an end is 0."""
    _not_in_place(inplace)
    return where(x <= min_val, min_val, where(x < max_val, x, max_val))


def relu(x, inplace=False):
    """torch.relu."""
    _not_in_place(inplace)
    return where(x <= 0, 0, x)


def relu6(x, inplace=False):
    """torch.nn.functional.relu6."""
    return hardtanh(x, 0.0, max_val=6.0, inplace=inplace)


def leaky_relu(x, negative_slope=0.01, inplace=False):
    """torch.nn.functional.leaky_relu."""
    _not_in_place(inplace)
    return where(x > 0, x, x * negative_slope)


def elu(x, alpha=1.0, inplace=False):
    """torch.nn.functional.elu."""
    _not_in_place(inplace)
    return where(x > 0, x, alpha * step("expm1", x))


def silu(x, inplace=False):
    """torch.nn.functional.silu."""
    _not_in_place(inplace)
    return x * step("sigmoid", x)


def mish(x, inplace=False):
    """torch.nn.functional.mish."""
    _not_in_place(inplace)
    return x * step("tanh", softplus(x))


def gelu(x, approximate="none"):
    """torch.nn.functional.gelu."""
    if approximate == "none":
        return x * 0.5 * (1.0 + step("erf", x * math.sqrt(0.5)))
    if approximate != "tanh":
        raise Refused(f'approximate={approximate!r}: it is "none" or "tanh"')
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1.0 + step("tanh", inner))


def softplus(x, beta=1.0, threshold=20.0):
    """torch.nn.functional.softplus."""
    if beta != 1:
        return where(x * beta > threshold, x, softplus(x * beta, threshold=threshold) / beta)
    return where(x > threshold, x, step("log1p", step("exp", x)))


def logsigmoid(x):
    """torch.nn.functional.logsigmoid."""
    return step("minimum", x, 0.0) - step("log1p", step("exp", -abs(x)))


def softsign(x):
    """torch.nn.functional.softsign."""
    return x / (1.0 + abs(x))


def floor(x):
    """torch.floor."""
    return x if x.kind == INT else step("floor", x)


def ceil(x):
    """torch.ceil."""
    return x if x.kind == INT else -step("floor", -x)


def trunc(x):
    """torch.trunc."""
    return x if x.kind == INT else where(x < 0, ceil(x), floor(x))


def round_half_even(x, decimals=0):
    """torch.round."""
    if decimals:
        raise Refused("decimals: scale what is rounded")
    if x.kind == INT:
        return x
    down = step("floor", x)
    is_up = where(x - down == 0.5, step("floor", down * 0.5) != down * 0.5, x - down > 0.5)
    return where(is_up, down + 1.0, down)


def sign(x):
    """torch.sign."""
    one, zero = (1, 0) if x.kind == INT else (1.0, 0.0)
    return where(x < 0, -one, where(x > 0, one, zero))


def power(x, y):
    """torch.pow: of whole numbers by products."""
    is_number = isinstance(y, (int, float)) and not isinstance(y, bool)
    if is_number and y == int(y) and 0 < y <= HIGHEST_POWER:
        product = x
        for bit in bin(int(y))[3:]:
            product = product * product * x if bit == "1" else product * product
        return product if isinstance(y, int) else product * 1.0
    if is_number and y == 0.5:
        return step("sqrt", x)
    if _are_integers(x, y):
        if type(x) is int and x == 2:
            return step("<<", 1, y)
        raise Refused("integers to a power of integers: make one of them a float")
    return step("pow", x, y)


def _are_integers(*values: Any) -> bool:
    return all(x.kind == INT if hasattr(x, "kind") else type(x) is int for x in values)


def divide(x, y, *, rounding_mode=None):
    """torch.div."""
    if rounding_mode is None:
        return step("/", x, y)
    if rounding_mode not in ("floor", "trunc"):
        raise Refused(f'rounding_mode={rounding_mode!r}: it is None, "floor" or "trunc"')
    if _are_integers(x, y):
        down = step("//", x, y)
        if rounding_mode == "floor":
            return down
        is_exact = step("==", down * y, x)
        return where(is_exact | (down >= 0), down, down + 1)
    quotient = step("/", x, y)
    return floor(quotient) if rounding_mode == "floor" else trunc(quotient)


def convert(x, dtype):
    """x.to(dtype), where dtype is one that kernels compute in; `dtype` may be a tensor's."""
    if dtype not in TAKEN_DTYPES:
        raise Refused(f"{dtype}: floats are fp32 and integers exact: use .float() or .long()")
    kind = kind_of_dtype(dtype)
    if kind == x.kind:
        return x
    if kind == BOOL:
        return x != 0
    if x.kind == BOOL:
        return where(x, 1, 0) if kind == INT else where(x, 1.0, 0.0)
    return step("whole", x) if kind == INT else x * 1.0


def filled(x, value, dtype=None):
    """torch.full_like of a symbol."""
    kind = x.kind if dtype is None else kind_of_dtype(dtype)
    if isinstance(value, (bool, int, float)):
        return x.tracer.lift({BOOL: bool, INT: int, FLOAT: float}[kind](value))
    return convert(value, DTYPE_OF[kind])


# By torch's names, in addition to those of operators
COMPOSITES: dict[str, Callable[..., Any]] = {
    **{"clamp": clamp, "clip": clamp, "hardtanh": hardtanh, "relu": relu, "relu6": relu6},
    "clamp_min": lambda x, min: clamp(x, min),
    "clamp_max": lambda x, max: clamp(x, None, max=max),
    **{"leaky_relu": leaky_relu, "elu": elu, "silu": silu, "mish": mish, "gelu": gelu},
    **{"softplus": softplus, "logsigmoid": logsigmoid, "log_sigmoid": logsigmoid},
    **{"softsign": softsign, "floor": floor, "ceil": ceil, "trunc": trunc, "fix": trunc},
    **{"round": round_half_even, "sign": sign, "sgn": sign, "pow": power},
    **{"div": divide, "divide": divide, "true_divide": lambda x, y: divide(x, y)},
    "fmax": lambda x, y: where(step("<", x, y), y, x),
    "fmin": lambda x, y: where(step("<", y, x), y, x),
    "add": lambda x, y, *, alpha=1: step("+", x, y if alpha == 1 else step("*", y, alpha)),
    "sub": lambda x, y, *, alpha=1: step("-", x, y if alpha == 1 else step("*", y, alpha)),
    "clone": lambda x: x,
    "isfinite": lambda x: abs(x) < math.inf,
    "square": lambda x: x * x,
    "reciprocal": lambda x: 1.0 / x,
    "frac": lambda x: x - trunc(x),
    "log10": lambda x: step("log", x) / LN_10,
    "tan": lambda x: step("sin", x) / step("cos", x),
    "erfc": lambda x: 1.0 - step("erf", x),
    "rsub": lambda x, y: step("-", y, x),
    "isnan": lambda x: x != x,
    "isinf": lambda x: abs(x) == math.inf,
    "masked_fill": lambda x, mask, value: where(mask, value, x),
    "zeros_like": lambda x, *, dtype=None: filled(x, 0, dtype=dtype),
    "ones_like": lambda x, *, dtype=None: filled(x, 1, dtype=dtype),
    "full_like": lambda x, fill_value, *, dtype=None: filled(x, fill_value, dtype=dtype),
    "float": lambda x: convert(x, torch.float32),
    "int": lambda x: convert(x, torch.int32),
    "long": lambda x: convert(x, torch.int64),
    "bool": lambda x: convert(x, torch.bool),
    "to": convert,
    "type": convert,
    "type_as": lambda x, other: convert(x, other.dtype),
}
# As methods alone: torch's functions of these names have other arguments
METHODS: dict[str, Callable[..., Any]] = {"where": lambda x, condition, y: where(condition, x, y)}
# Other names of operators
ALIASES = {
    **{"add": "+", "sub": "-", "mul": "*", "subtract": "-", "multiply": "*"},
    **{"truediv": "/", "floordiv": "//", "floor_divide": "//", "mod": "%", "remainder": "%"},
    **{"lt": "<", "less": "<", "le": "<=", "less_equal": "<=", "gt": ">", "greater": ">"},
    **{"ge": ">=", "greater_equal": ">=", "eq": "==", "ne": "!=", "not_equal": "!="},
    **{"and": "&", "or": "|", "xor": "^", "invert": "~", "negative": "neg", "absolute": "abs"},
    **{"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "bitwise_not": "~"},
    **{"logical_and": "&", "logical_or": "|", "logical_xor": "^", "logical_not": "~"},
    **{"lshift": "<<", "rshift": ">>", "bitwise_left_shift": "<<", "bitwise_right_shift": ">>"},
    **{"max": "maximum", "min": "minimum"},
}
OF_TORCH = [name for name in OPERATORS if name.isalnum() and name != "whole"]
TAKEN: dict[str, Callable[..., Any]] = {
    **{name: functools.partial(step, name) for name in OF_TORCH},
    **{name: functools.partial(step, op) for name, op in ALIASES.items()},
    **COMPOSITES,
}
