"""Arithmetic of floats, rounded to nearest even as the ISA says; approximations are exact here.

`max` of zeros of two signs may be either of them here, where the ISA says +0.
"""

import numpy as np

from .errors import UnknownInstruction
from .formats import bf16_from_f32, f32_from_bf16, flush, halves, packed
from .moves import put
from .parse import Instruction
from .program import FLOATS, Program, Step, instruction, unknown


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Rounded once: fp64 holds the product of fp32 exactly, and the sum all but."""
    return (a.astype(np.float64) * b + c).astype(a.dtype)


ARITHMETIC = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": fused,
    "div": np.divide,
    "max": np.fmax,
    "min": np.fmin,
    "abs": np.abs,
    "neg": np.negative,
}
PASS_NAN = {"max": np.maximum, "min": np.minimum}
# Of fp64, rounded once
APPROXIMATIONS = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}


@instruction("add", "sub", "mul", "fma", "div", "max", "min", "abs", "neg", of_floats=True)
def arithmetic(code: Program, one: Instruction) -> Step:
    """One operation, of numbers or of pairs of them."""
    *how, type_ = one.modifiers
    left = set(how) - {"rn", "full", "approx", "ftz", "NaN", "relu"}
    if left or type_ not in FLOATS:
        raise unknown(one, *left)
    function = PASS_NAN[one.opcode] if "NaN" in how else ARITHMETIC[one.opcode]
    if type_ not in ("f32", "f64"):
        return _of_halves(code, one, function, type_, "relu" in how)
    if "relu" in how:
        raise unknown(one, "relu")
    d, sources = code.slots.write(one.operands[0], type_), code.sources(one.operands[1:], type_)
    if "ftz" in how:
        return lambda r, group: put(r[d], flush(function(*(flush(r[x]) for x in sources))), group)
    if isinstance(function, np.ufunc):
        if len(sources) == 2:
            a, b = sources
            return lambda r, group: function(r[a], r[b], out=r[d], where=group.where)
        (a,) = sources
        return lambda r, group: function(r[a], out=r[d], where=group.where)
    return lambda r, group: put(r[d], function(*(r[x] for x in sources)), group)


def _of_halves(code: Program, one: Instruction, function, type_: str, has_relu: bool) -> Step:
    """Numbers of 16 bits, or pairs; computed in fp32 or fp64 and rounded once."""
    is_pair, is_bf16 = type_.endswith("x2"), type_.startswith("bf16")
    holder = "b32" if is_pair else "b16"
    d, sources = code.slots.write(one.operands[0], holder), code.sources(one.operands[1:], holder)

    def number(bits: np.ndarray) -> np.ndarray:
        wide = f32_from_bf16(bits) if is_bf16 else np.ascontiguousarray(bits).view(np.float16)
        return wide.astype(np.float64)

    def apply(operands) -> np.ndarray:
        found = function(*map(number, operands))
        if has_relu:  # of NaN it is NaN
            found = np.where(found < 0, 0.0, found)
        if is_bf16:
            return bf16_from_f32(_odd(found))
        found = found.astype(np.float16)
        return np.where(np.isnan(found), np.uint16(0x7FFF), found.view(np.uint16))

    def step(r, group):
        if not is_pair:
            put(r[d], apply([r[x] for x in sources]), group)
            return
        lows, highs = zip(*(halves(r[x]) for x in sources))
        put(r[d], packed(apply(lows), apply(highs)), group)

    return step


def _odd(x: np.ndarray) -> np.ndarray:
    """fp64 to fp32, rounded to odd, so that rounding once more to 16 bits rounds as once."""
    near = x.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32)
    cut = np.where(np.abs(back) > np.abs(x), bits - np.uint32(1), bits)
    odd = np.where((back == x) | ~np.isfinite(near), bits, cut | np.uint32(1))
    return odd.astype(np.uint32).view(np.float32)


@instruction("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos")
def approximation(code: Program, one: Instruction) -> Step:
    """Of fp32."""
    *how, type_ = one.modifiers
    left = set(how) - {"approx", "ftz", "rn"}
    if left or type_ != "f32":
        raise unknown(one, *left, type_)
    d, a = code.slots.write(one.operands[0], "f32"), code.slots.read(one.operands[1], "f32")
    function = APPROXIMATIONS[one.opcode]
    if "ftz" not in how:
        return lambda r, group: put(r[d], function(r[a].astype(np.float64)), group)

    def step(r, group):
        found = function(flush(r[a]).astype(np.float64)).astype(np.float32)
        put(r[d], flush(found), group)

    return step


@instruction("testp")
def test_property(code: Program, one: Instruction) -> Step:
    """Whether a float is finite, infinite, or NaN."""
    how, type_ = one.modifiers
    tests = {"finite": np.isfinite, "infinite": np.isinf, "notanumber": np.isnan}
    if how not in tests:
        raise UnknownInstruction(f"{one}: the executor does not know .{how}")
    p, a = code.slots.write(one.operands[0], "pred"), code.slots.read(one.operands[1], type_)
    return lambda r, group: put(r[p], tests[how](r[a]), group)
