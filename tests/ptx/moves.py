"""Comparisons, selections and moves."""

import numpy as np

from .formats import f32_from_bf16
from .parse import Instruction, Pair, Register, Vector
from .program import Program, Step, instruction, unknown, without
from .registers import UNSIGNED, WIDTH

COMPARISONS = {
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal},
    **{"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal},
}


def put(target: np.ndarray, value: np.ndarray, group) -> None:
    """Writes the active lanes of a register."""
    np.copyto(target, value, where=group.where, casting="unsafe")


@instruction("setp")
def set_predicate(code: Program, one: Instruction) -> Step:
    """p = a < b, with .and, .or or .xor of another predicate."""
    how, *join, type_ = without(one, "ftz")
    p, q = _two_predicates(code, one.operands[0])
    a, b = code.sources(one.operands[1:3], type_)
    if type_.endswith("x2"):
        raise unknown(one, type_)
    compare = _of_bf16(one, how) if type_ == "bf16" else _comparison(one, how, type_)
    if not join and q is None:
        if isinstance(compare, np.ufunc):
            return lambda r, group: compare(r[a], r[b], out=r[p], where=group.where)
        return lambda r, group: put(r[p], compare(r[a], r[b]), group)
    if join:
        other = one.operands[3]
        c, is_negated = code.slots.read(Register(other.name), "pred"), other.is_negated
        joined = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[join[0]]

    def step(r, group):
        found = compare(r[a], r[b])
        opposite = ~found
        if join:
            with_ = r[c] != is_negated
            found, opposite = joined(found, with_), joined(opposite, with_)
        put(r[p], found, group)
        if q is not None:
            put(r[q], opposite, group)

    return step


def _two_predicates(code: Program, target: Register | Pair) -> tuple[int, int | None]:
    if isinstance(target, Pair):
        return code.slots.write(target.first, "pred"), code.slots.write(target.second, "pred")
    return code.slots.write(target, "pred"), None


def _of_bf16(one: Instruction, how: str):
    compare = _comparison(one, how, "f32")
    return lambda a, b: compare(f32_from_bf16(a), f32_from_bf16(b))


def _comparison(one: Instruction, how: str, type_: str):
    """Of floats, a comparison is false of NaN, and one that ends in u is true."""
    if how in ("num", "nan"):
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == (how == "nan")
    if how in COMPARISONS and not (type_[0] == "f" and how == "ne"):
        return COMPARISONS[how]
    if type_[0] == "f" and how == "ne":
        return lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b)
    if type_[0] == "f" and how.endswith("u") and how[:-1] in COMPARISONS:
        compare = COMPARISONS[how[:-1]]
        return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)
    raise unknown(one, how)


@instruction("selp")
def select(code: Program, one: Instruction) -> Step:
    """d = p ? a : b"""
    (type_,) = one.modifiers
    d, (a, b) = code.slots.write(one.operands[0], type_), code.sources(one.operands[1:3], type_)
    p = code.slots.read(one.operands[3], "pred")
    return lambda r, group: put(r[d], np.where(r[p], r[a], r[b]), group)


@instruction("mov")
def move(code: Program, one: Instruction) -> Step:
    """Of a register, a number or an address, or to and from packed parts."""
    (type_,) = one.modifiers
    target, source = one.operands
    if isinstance(target, Vector):
        return _unpack(code, target, source, type_)
    if isinstance(source, Vector):
        return _pack(code, target, source, type_)
    d, a = code.slots.write(target, type_), code.slots.read(source, type_)
    if isinstance(source, Register) and source.name in ("%globaltimer", "%clock64", "%clock"):
        return lambda r, group: put(r[d], np.array(group.cta.machine.clock(), r[d].dtype), group)
    return lambda r, group: put(r[d], r[a], group)


def _unpack(code: Program, target: Vector, source: Register, type_: str) -> Step:
    """{low, ...} = a"""
    part = WIDTH[type_] // len(target.items)
    a = code.slots.read(source, f"b{WIDTH[type_]}")
    parts = [code.slots.write(x, f"b{part}") for x in target.items]

    def step(r, group):
        found = np.array(r[a], ndmin=1).view(UNSIGNED[part]).reshape(-1, len(parts))
        for n, d in enumerate(parts):
            put(r[d], found[:, n], group)

    return step


def _pack(code: Program, target: Register, source: Vector, type_: str) -> Step:
    """d = {low, ...}"""
    part = WIDTH[type_] // len(source.items)
    d = code.slots.write(target, f"b{WIDTH[type_]}")
    parts = code.sources(source.items, f"b{part}")

    def step(r, group):
        whole = np.stack(np.broadcast_arrays(*(r[x] for x in parts)), -1)
        put(r[d], np.ascontiguousarray(whole).view(r[d].dtype)[..., 0], group)

    return step


@instruction("cvta")
def to_generic(code: Program, one: Instruction) -> Step:
    """Addresses are the same in all windows here."""
    d, a = code.slots.write(one.operands[0], "u64"), code.slots.read(one.operands[1], "u64")
    return lambda r, group: put(r[d], r[a], group)
