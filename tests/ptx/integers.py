"""Arithmetic of integers."""

import numpy as np

from .moves import put
from .parse import Instruction
from .program import Program, Step, instruction, unknown
from .registers import WIDTH, numpy_type

BINARY = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}


def of_ufunc(code: Program, one: Instruction, function: np.ufunc, type_: str) -> Step:
    """d = function(a, ...)"""
    d = code.slots.write(one.operands[0], type_)
    sources = code.sources(one.operands[1:], type_)
    if len(sources) == 1:
        (a,) = sources
        return lambda r, group: function(r[a], out=r[d], where=group.where)
    a, b = sources
    return lambda r, group: function(r[a], r[b], out=r[d], where=group.where)


@instruction("add", "sub", "min", "max", of_floats=False)
def binary(code: Program, one: Instruction) -> Step:
    """add, sub, min and max of integers."""
    *relu, type_ = one.modifiers
    if relu not in ([], ["relu"]):
        raise unknown(one, *relu)
    step = of_ufunc(code, one, BINARY[one.opcode], type_)
    if not relu:
        return step
    d = code.slots.write(one.operands[0], type_)

    def with_relu(r, group):
        step(r, group)
        np.maximum(r[d], 0, out=r[d], where=group.where)

    return with_relu


@instruction("neg", "abs", of_floats=False)
def negative(code: Program, one: Instruction) -> Step:
    """neg and abs of integers, which wrap."""
    (type_,) = one.modifiers
    return of_ufunc(code, one, np.negative if one.opcode == "neg" else np.abs, type_)


@instruction("mul", "mad", of_floats=False)
def product(code: Program, one: Instruction) -> Step:
    """mul and mad: .lo of the same width, .hi, or .wide."""
    how, type_ = one.modifiers
    wide = f"{type_[0]}{2 * WIDTH[type_]}" if how == "wide" else type_
    d, (a, b) = code.slots.write(one.operands[0], wide), code.sources(one.operands[1:3], type_)
    c = code.slots.read(one.operands[3], wide) if one.opcode == "mad" else None
    double, shift = numpy_type(f"{type_[0]}{min(2 * WIDTH[type_], 64)}"), WIDTH[type_]
    if how == "hi" and shift == 64:
        raise unknown(one, "hi", type_)

    def step(r, group):
        found = np.multiply(r[a], r[b], dtype=None if how == "lo" else double)
        if how == "hi":
            found = (found >> shift).astype(numpy_type(type_))
        put(r[d], found if c is None else found + r[c], group)

    return step


@instruction("div", "rem", of_floats=False)
def quotient(code: Program, one: Instruction) -> Step:
    """div and rem of integers, towards zero."""
    (type_,) = one.modifiers
    d, (a, b) = code.slots.write(one.operands[0], type_), code.sources(one.operands[1:], type_)
    is_rem = one.opcode == "rem"

    def step(r, group):
        divisor = np.where(r[b] == 0, 1, r[b])
        rest = np.fmod(r[a], divisor)  # of the sign of a
        found = rest if is_rem else (r[a] - rest) // divisor
        put(r[d], np.where(r[b] == 0, -1 if type_[0] == "s" else ~r[b], found), group)

    return step
