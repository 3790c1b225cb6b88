"""Instructions of bits and predicates."""

import numpy as np

from .integers import of_ufunc
from .moves import put
from .parse import Instruction
from .program import Program, Step, instruction, unknown
from .registers import WIDTH, numpy_type

BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@instruction("and", "or", "xor", "not")
def bitwise(code: Program, one: Instruction) -> Step:
    """Of bits and of predicates."""
    (type_,) = one.modifiers
    return of_ufunc(code, one, BITWISE.get(one.opcode, np.invert), type_)


@instruction("shl", "shr")
def shift(code: Program, one: Instruction) -> Step:
    """Amounts past the width give zeros, or the sign."""
    (type_,) = one.modifiers
    d, a = code.slots.write(one.operands[0], type_), code.slots.read(one.operands[1], type_)
    amount = code.slots.read(one.operands[2], "u32")
    width, kind = WIDTH[type_], numpy_type(type_)
    is_left, is_signed = one.opcode == "shl", type_[0] == "s"

    def step(r, group):
        by = np.minimum(r[amount], width - 1).astype(kind)
        found = r[a] << by if is_left else r[a] >> by
        if not is_signed:
            found = np.where(r[amount] >= width, kind(0), found)
        put(r[d], found, group)

    return step


@instruction("shf")
def funnel_shift(code: Program, one: Instruction) -> Step:
    """A word of the 64 bits of b:a, shifted."""
    way, how, _ = one.modifiers
    d = code.slots.write(one.operands[0], "u32")
    a, b, c = code.sources(one.operands[1:], "u32")

    def step(r, group):
        by = r[c] & 31 if how == "wrap" else np.minimum(r[c], 32)
        both = (r[b].astype(np.uint64) << np.uint64(32)) | r[a]
        by = by.astype(np.uint64)
        put(r[d], (both << by) >> np.uint64(32) if way == "l" else both >> by, group)

    return step


@instruction("bfe")
def bit_field_extract(code: Program, one: Instruction) -> Step:
    """len bits of a from pos on, extended by zeros or by the field's highest bit."""
    (type_,) = one.modifiers
    d, a = code.slots.write(one.operands[0], type_), code.slots.read(one.operands[1], type_)
    pos, length = code.sources(one.operands[2:], "u32")
    kind = numpy_type(f"{type_[0]}64")

    def step(r, group):
        field = r[a].astype(kind) >> np.minimum(r[pos] & 255, 63).astype(kind)
        count = np.minimum(r[length] & 255, 64)
        above = (64 - count).astype(kind) & kind(63)
        put(r[d], np.where(count == 0, kind(0), (field << above) >> above), group)

    return step


@instruction("bfi")
def bit_field_insert(code: Program, one: Instruction) -> Step:
    """len bits of a into b at pos."""
    if one.modifiers != ("b32",):
        raise unknown(one, *one.modifiers)
    d, (a, b) = code.slots.write(one.operands[0], "b32"), code.sources(one.operands[1:3], "b32")
    pos, length = code.sources(one.operands[3:], "u32")

    def step(r, group):
        first = np.minimum(r[pos] & 255, 32).astype(np.uint64)
        count = np.minimum(r[length] & 255, 32).astype(np.uint64)
        mask = ((np.uint64(1) << count) - np.uint64(1)) << first
        put(r[d], (r[b] & ~mask) | ((r[a].astype(np.uint64) << first) & mask), group)

    return step


@instruction("lop3")
def three_inputs(code: Program, one: Instruction) -> Step:
    """Bit by bit, the table of 8 answers that the last operand is."""
    d, (a, b, c) = (
        code.slots.write(one.operands[0], "b32"),
        code.sources(one.operands[1:4], "b32"),
    )
    table = one.operands[4].value

    def step(r, group):
        found = np.zeros_like(r[d])
        for n in range(8):
            if table >> n & 1:
                term = r[a] if n & 4 else ~r[a]
                term = term & (r[b] if n & 2 else ~r[b])
                found |= term & (r[c] if n & 1 else ~r[c])
        put(r[d], found, group)

    return step


@instruction("prmt")
def permute(code: Program, one: Instruction) -> Step:
    """Four of the eight bytes of b:a, by nibbles of the selector; bit 3 replicates the sign."""
    if one.modifiers != ("b32",):
        raise unknown(one, *one.modifiers)
    d, (a, b, c) = code.slots.write(one.operands[0], "b32"), code.sources(one.operands[1:], "b32")

    def step(r, group):
        both = (r[b].astype(np.uint64) << np.uint64(32)) | r[a]
        found = np.uint32(0)
        for n in range(4):
            selector = (r[c] >> np.uint32(4 * n)) & np.uint32(15)
            places = (selector & np.uint32(7)).astype(np.uint64) * np.uint64(8)
            byte = ((both >> places) & np.uint64(255)).astype(np.uint32)
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            byte = np.where(selector & np.uint32(8), sign, byte)
            found = found | byte << np.uint32(8 * n)
        put(r[d], found, group)

    return step


@instruction("clz", "popc", "brev")
def count_bits(code: Program, one: Instruction) -> Step:
    """clz, popc, brev of 32 bits."""
    if one.modifiers != ("b32",):
        raise unknown(one, *one.modifiers)
    d, a = code.slots.write(one.operands[0], "b32"), code.slots.read(one.operands[1], "b32")
    words = {
        "clz": lambda x: 32 - x.bit_length(),
        "popc": lambda x: x.bit_count(),
        "brev": lambda x: int(f"{x:032b}"[::-1], 2),
    }[one.opcode]
    each = np.frompyfunc(lambda x: words(int(x)), 1, 1)
    return lambda r, group: put(r[d], each(r[a]).astype(np.uint32), group)
