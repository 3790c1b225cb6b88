"""Random mask predicates as text: for torch on whole tensors, for tracing, for what is printed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tilewise import mods
from tilewise.mods import Mask

Tensor = torch.Tensor
LENGTH, BATCH = 80, 2  # of the tensors that predicates capture


def tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    """What predicates capture: documents of all and of each sequence, and flags."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.rand(BATCH, LENGTH, generator=generator) < 0.1
    return {
        "doc": torch.arange(LENGTH, dtype=dtype) // 9,
        "docs": starts.cumsum(1).to(dtype),
        "flags": torch.rand(LENGTH, generator=generator) < 0.8,
    }


def predicates(leaves: int = 12):
    """A hypothesis strategy of predicates as text over b, h, q, k."""
    from hypothesis import strategies as st

    small, positive = st.integers(-9, 40).map(str), st.integers(1, 12).map(str)
    load = st.sampled_from(
        ["doc[q]", "doc[k]", "docs[b, q]", "docs[b, k]", "docs[1, k]", "doc[k + 2]"]
        + ["doc[maximum(q - 3, 0)]", "doc[q // 2]", "doc[h]"]
    )
    index = st.sampled_from(["q", "k", "q", "k", "(q - k)", "b", "h"])

    def deeper(ints):
        operand = ints | small
        return st.one_of(
            st.builds("({} {} {})".format, ints, st.sampled_from("+-*&|^"), operand),
            st.builds("({} {} {})".format, ints, st.sampled_from(["//", "%"]), positive),
            st.builds("({} // (abs({}) + 1))".format, ints, ints),
            st.builds("({} % (-1 - abs({})))".format, ints, ints),
            st.builds("({} {} {})".format, ints, st.sampled_from(["<<", ">>"]), st.integers(0, 3)),
            st.builds("{}({}, {})".format, st.sampled_from(["minimum", "maximum"]), ints, operand),
            st.builds("{}({})".format, st.sampled_from(["abs", "~", "-"]), ints),
            st.builds("where({} < {}, {}, {})".format, ints, operand, ints, operand),
        )

    ints = st.recursive(index | load, deeper, max_leaves=4)
    compared = st.builds(
        "({} {} {})".format, ints, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), ints | small
    )

    def joined(bools):
        return st.one_of(
            st.builds("({} {} {})".format, bools, st.sampled_from(["&", "|", "^", "=="]), bools),
            st.builds("(~{})".format, bools),
            st.builds("where({}, {}, {})".format, bools, bools, bools),
        )

    flags = st.sampled_from(["flags[q]", "flags[k]", "(q >= k)", "(doc[q] == doc[k])"])
    return st.recursive(compared | flags, joined, max_leaves=leaves)


def predicate(text: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The text as a function; integers it captures are of this dtype."""
    known = {"where": mods.where, "minimum": mods.minimum, "maximum": mods.maximum}
    return eval(f"lambda b, h, q, k: {text}", known | tensors(dtype))


def traced(text: str) -> Mask:
    """The text as a mask."""
    return mods.mask(predicate(text, torch.int32))


def truth(text: str, batch: int, nheads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """What torch says of the text on whole tensors."""
    shape = (batch, nheads, seqlen_q, seqlen_k)
    b, h, q, k = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
    return predicate(text, torch.int64)(b, h, q, k)


class Register(int):
    """An integer that divides as a kernel's do, towards zero; ~ of its comparisons negates."""

    def __floordiv__(self, other):
        size = abs(int(self)) // abs(int(other))
        return Register(size if (self < 0) == (other < 0) else -size)

    def __mod__(self, other):
        return Register(int(self) - int(self // other) * int(other))

    def __rfloordiv__(self, other):
        return Register(other) // self

    def __rmod__(self, other):
        return Register(other) % self


def _wrap(name: str, kind: Callable) -> Callable:
    return lambda self, *others: kind(getattr(int, name)(self, *others))


_BINARY = ("add", "sub", "mul", "and", "or", "xor", "lshift", "rshift")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), "neg", "invert"):
    setattr(Register, f"__{_name}__", _wrap(f"__{_name}__", Register))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Register, f"__{_name}__", _wrap(f"__{_name}__", np.bool_))


class Language:
    """`triton.language`, as far as printed masks go, on single numbers."""

    abs = staticmethod(lambda x: Register(abs(x)))
    minimum = staticmethod(lambda x, y: Register(min(x, y)))
    maximum = staticmethod(lambda x, y: Register(max(x, y)))

    @staticmethod
    def where(condition, x, y):
        value = x if condition else y
        return Register(value) if type(value) is int else value

    @staticmethod
    def load(pointer: Pointer):
        value = pointer.x.reshape(-1)[pointer.at]
        return np.bool_(value) if value.dtype == torch.bool else Register(value)


class Pointer:
    """An address in a contiguous tensor."""

    def __init__(self, x: Tensor, at: int = 0):
        self.x, self.at = x, at

    def __add__(self, offset: int) -> Pointer:
        if not 0 <= self.at + offset < self.x.numel():
            raise IndexError(f"reads element {self.at + offset} of {tuple(self.x.shape)}")
        return Pointer(self.x, self.at + offset)


def run_line(line: str, at: tuple[int, int, int, int], captured: tuple[Tensor, ...]) -> bool:
    """What `tilewise.mods.source` printed, for one pair."""
    names = dict(zip(("b", "h", "q_idx", "k_idx"), map(Register, at)))
    for slot, x in enumerate(captured):
        names[f"t{slot}"] = Pointer(x)
        for d in range(x.ndim):
            names[f"t{slot}_size{d}"] = Register(x.shape[d])
            names[f"t{slot}_stride{d}"] = Register(x.stride(d))
    return eval(line, {"tl": Language} | names)
