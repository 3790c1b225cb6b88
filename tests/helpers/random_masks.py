"""Random mask predicates as text: for torch on whole tensors, and for tracing."""

from __future__ import annotations

from collections.abc import Callable

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
        ["doc[q]", "doc[k]", "docs[b, q]", "docs[b, k]", "docs[1, k]", "doc[k - 2]"]
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


def wrapping():
    """A hypothesis strategy of predicates as text whose integers come near 64 bits, and past."""
    from hypothesis import strategies as st

    near = [
        f"({sign}(1 << {n}) + {far})" for sign in "+-" for n in (31, 52, 62) for far in (-1, 0, 1)
    ]
    large = st.sampled_from(["2654435761", "1640531527", "(-(1 << 62) - (1 << 62))", *near])
    bits = st.sampled_from([1, 20, 22, 31, 32, 40, 41, 62, 63])

    def deeper(ints):
        return st.one_of(
            st.builds("({} {} {})".format, ints, st.sampled_from("+-*"), ints | large),
            st.builds("({} {} {})".format, ints, st.sampled_from(["<<", "<<", ">>"]), bits),
            st.builds("{}({})".format, st.sampled_from(["abs", "-", "~"]), ints),
            st.builds("{}({}, {})".format, st.sampled_from(["minimum", "maximum"]), ints, large),
            st.builds("({} {} {})".format, ints, st.sampled_from("&|^"), large),
            st.builds("({} {} {})".format, ints, st.sampled_from(["//", "%"]), large),
            st.builds("where({} < 3, {}, {})".format, ints, ints, ints),
        )

    index = st.sampled_from(["q", "k", "(q - 20)", "(k - q)", "(q * k)", "(k + 0 * q)"])
    compared = st.sampled_from(["<", "<=", ">", "==", "!="])
    return st.builds(
        "({} {} {})".format, st.recursive(index, deeper), compared, large | st.just("0")
    )


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
