"""Registers of all lanes of a CTA, and the slots by which instructions name them.

A slot is an operand with a type: the same 32 bits are a slot as u32, as s32 and as f32. A group of
warps that runs together has one numpy view a slot, of its lanes. Constants are slots, too.
"""

import numpy as np

from .errors import UnknownInstruction
from .parse import Immediate, Name, Register

LANES = 32  # of a warp
POISON = 0xFFFBADFFFFFBADFF  # a NaN as f64, f32 and bf16, of a register that was not written
WIDTH = {"pred": 1}
for _bits in (8, 16, 32, 64, 128):
    WIDTH |= {f"{kind}{_bits}": _bits for kind in "busf"}
WIDTH |= {"bf16": 16, "f16x2": 32, "bf16x2": 32, "e4m3x2": 16, "e5m2x2": 16}
UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


def numpy_type(type_: str) -> type:
    """How a PTX type is held: floats that numpy lacks, and packed ones, as their bits."""
    if type_ in FLOATS:
        return FLOATS[type_]
    signed = type_[0] == "s" and type_[1:].isdigit()
    return (SIGNED if signed else UNSIGNED)[WIDTH[type_]]


class Slots:
    """The slots of a program."""

    def __init__(self, registers: dict[str, str], addresses: dict[str, int]) -> None:
        self.addresses = addresses  # of parameters and variables
        self.rows: dict[str, tuple[int, int]] = {}  # width and row of a register
        self.counts = dict.fromkeys(UNSIGNED, 1)  # row 0 is the sink `_`
        for name, type_ in registers.items():
            width = WIDTH[type_]
            self.rows[name] = width, self.counts[width]
            self.counts[width] += 1
        self.known: dict[tuple, int] = {}
        self.entries: list[tuple] = []  # (kind, what, numpy type)

    def width(self, operand: Register) -> int:
        """Bits of a register."""
        if operand.name not in self.rows:
            raise UnknownInstruction(f"the register {operand.name} is not declared")
        return self.rows[operand.name][0]

    def write(self, operand: Register | Name, type_: str) -> int:
        """The slot of a destination; `_` takes what is not read."""
        if isinstance(operand, Name) and operand.name == "_":
            return self._slot(("register", (WIDTH[type_], 0), numpy_type(type_)))
        return self._register(operand, type_)

    def read(self, operand: Register | Immediate | Name, type_: str) -> int:
        """The slot of a source."""
        if isinstance(operand, Immediate):
            return self.constant(bits_of(operand, type_), type_)
        if isinstance(operand, Name):
            if operand.name not in self.addresses:
                raise UnknownInstruction(f"nothing is called {operand.name}")
            return self.constant(self.addresses[operand.name], type_)
        if operand.name.startswith("%") and operand.name not in self.rows:
            return self._slot(("special", operand.name, numpy_type(type_)))
        return self._register(operand, type_)

    def constant(self, bits: int, type_: str) -> int:
        """The slot of a number, of which these are the bits."""
        return self._slot(("constant", bits % 2 ** max(WIDTH[type_], 8), numpy_type(type_)))

    def _register(self, operand: Register, type_: str) -> int:
        width = self.width(operand)
        if width != WIDTH[type_]:
            raise UnknownInstruction(f"{operand.name} has {width} bits, not the {type_} asked for")
        return self._slot(("register", self.rows[operand.name], numpy_type(type_)))

    def _slot(self, entry: tuple) -> int:
        if entry not in self.known:
            self.known[entry] = len(self.entries)
            self.entries.append(entry)
        return self.known[entry]


def bits_of(number: Immediate, type_: str) -> int:
    """An immediate's bits as a type has them."""
    if type_ == "pred":
        return int(number.value != 0)
    if type_ in FLOATS and not number.float_bits:
        return int(np.array(number.value, FLOATS[type_]).view(UNSIGNED[WIDTH[type_]]))
    if number.float_bits == 64 and type_ == "f32":
        value = np.array(number.value, np.uint64).view(np.float64)
        return int(value.astype(np.float32).view(np.uint32))
    return number.value


class _Views(dict):
    """Of a span of lanes: each is made when an instruction first asks for it."""

    def __init__(self, registers: "RegisterFile", span: slice) -> None:
        self.registers, self.span = registers, span

    def __missing__(self, slot: int) -> np.ndarray:
        entry = self.registers.slots.entries[slot]
        found = self[slot] = self.registers.view(*entry, self.span)
        return found


class RegisterFile:
    """The registers of a CTA's lanes."""

    def __init__(self, slots: Slots, lanes: int, special: dict[str, np.ndarray]) -> None:
        self.slots, self.special = slots, special
        self.arrays = {
            width: np.full((count, lanes), POISON & (2**width - 1), dtype=UNSIGNED[width])
            for width, count in slots.counts.items()
        }
        self._views: dict[tuple[int, int], _Views] = {}

    def views(self, first: int, stop: int) -> dict:
        """Of lanes [first, stop): an array for each slot."""
        if (first, stop) not in self._views:
            self._views[first, stop] = _Views(self, slice(first, stop))
        return self._views[first, stop]

    def view(self, kind: str, what, dtype: type, span: slice) -> np.ndarray:
        """What a slot is, of a span of lanes."""
        if kind == "constant":
            width = np.dtype(dtype).itemsize * 8
            holder = UNSIGNED[1 if dtype is np.bool_ else width]
            return np.array(what, dtype=holder).view(dtype)
        if kind == "special":
            if what not in self.special:
                raise UnknownInstruction(f"the special register {what}")
            return self.special[what][span].astype(dtype)
        width, row = what
        return self.arrays[width][row, span].view(dtype)
