"""cvt: between integers, floats, and pairs of small ones."""

import numpy as np

from .formats import E4M3, E5M2, bf16_from_f32, f32_from_bf16, flush, halves, packed
from .moves import put
from .parse import Instruction, Register
from .program import Program, Step, instruction, unknown
from .registers import FLOATS, WIDTH, numpy_type

ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
SMALL = {"e4m3x2": E4M3, "e5m2x2": E5M2}
PAIRS = (*SMALL, "f16x2", "bf16x2")


@instruction("cvt")
def convert(code: Program, one: Instruction) -> Step:
    """d = a in another type; a pair of d is made of two numbers, the first above the second."""
    *how, to, from_ = one.modifiers
    left = set(how) - {"rn", "rz", "ftz", "satfinite", "relu", *ROUNDINGS}
    if left:
        raise unknown(one, *left)
    if to in PAIRS:
        return _to_pair(code, one, how, to, from_)
    if "relu" in how or "satfinite" in how:
        raise unknown(one, *how)
    a = _source(code, one.operands[1], from_)
    d = code.slots.write(one.operands[0], _holder(code, one.operands[0], to))
    change = _number_from(to, from_, how, one)

    def step(r, group):
        put(r[d], change(_narrow(r[a], from_)), group)

    return step


def _holder(code: Program, target: Register, type_: str) -> str:
    """A register may be wider than an integer that is put there, and is then extended."""
    if type_ in FLOATS:
        return type_
    return f"{'s' if type_[0] == 's' else 'b'}{code.slots.width(target)}"


def _source(code: Program, source: Register, type_: str) -> int:
    """A register may be wider than the integer that is read of it."""
    width = code.slots.rows.get(source.name, (WIDTH[type_],))[0]
    return code.slots.read(source, type_ if width == WIDTH[type_] else f"b{width}")


def _narrow(x: np.ndarray, type_: str) -> np.ndarray:
    """The low bits of a wider register."""
    return x if type_ in FLOATS else x.astype(numpy_type(type_), copy=False)


def _number_from(to: str, from_: str, how: list[str], one: Instruction):
    """A function of numbers; bf16 is its bits."""
    is_from_float = from_ in FLOATS or from_ == "bf16"
    is_to_float = to in FLOATS or to == "bf16"
    rounding = next((x for x in how if x in ROUNDINGS), None)

    def value(x: np.ndarray) -> np.ndarray:
        x = f32_from_bf16(x) if from_ == "bf16" else x
        return flush(x) if "ftz" in how and from_ == "f32" else x

    if not is_from_float and not is_to_float:
        return lambda x: x.astype(numpy_type(to))
    if is_from_float and not is_to_float:
        if rounding is None:
            raise unknown(one, *how)
        return lambda x: _to_integer(ROUNDINGS[rounding](value(x)), numpy_type(to))
    if rounding is not None or "rz" in how:
        if to == from_ and rounding is not None:
            return lambda x: ROUNDINGS[rounding](value(x))
        raise unknown(one, *how)
    if to == "bf16":
        return lambda x: bf16_from_f32(value(x).astype(np.float32))
    return lambda x: value(x).astype(FLOATS[to])


def _to_integer(x: np.ndarray, kind: type) -> np.ndarray:
    """Saturates; NaN is 0, or the highest bit of 64."""
    limits = np.iinfo(kind)
    wide = np.clip(x.astype(np.longdouble), limits.min, limits.max)
    found = np.where(np.isnan(x), 0, wide).astype(kind)
    return found if limits.bits < 64 else np.where(np.isnan(x), limits.min or 1 << 63, found)


def _to_pair(code: Program, one: Instruction, how: list[str], to: str, from_: str) -> Step:
    d = code.slots.write(one.operands[0], "b16" if to in SMALL else "b32")
    if from_ in SMALL:
        if to != "f16x2":
            raise unknown(one, to, from_)
        a, small = code.slots.read(one.operands[1], "b16"), SMALL[from_]

        def widen(r, group):
            pair = (small.decode(x).astype(np.float16).view(np.uint16) for x in halves(r[a]))
            put(r[d], packed(*pair), group)

        return widen
    if from_ != "f32" or "rn" not in how or (to in SMALL) != ("satfinite" in how):
        raise unknown(one, *how, to, from_)
    high, low = code.sources(one.operands[1:], "f32")

    def narrow(x: np.ndarray) -> np.ndarray:
        if "relu" in how:
            x = np.where(x < 0, np.float32(0), x)
        if to in SMALL:
            return SMALL[to].encode_satfinite(x)
        if to == "bf16x2":
            return bf16_from_f32(x)
        return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))

    return lambda r, group: put(r[d], packed(narrow(r[low]), narrow(r[high])), group)
