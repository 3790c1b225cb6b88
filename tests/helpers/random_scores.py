"""Random score functions as text: for torch on whole tensors, and for tracing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewise import mods
from tilewise.scores import ScoreMod

Tensor = torch.Tensor
BATCH, NHEADS, SEQLEN_Q, SEQLEN_K = SHAPE = (2, 3, 6, 5)
FUNCTIONS = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "tanh", "sigmoid")


def tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    """What functions capture: a slope a head, a bias a pair, a number, and documents."""
    bias = torch.linspace(-2, 2, SEQLEN_Q * SEQLEN_K, dtype=torch.float32).sin()
    return {
        "slopes": torch.tensor([0.5, 0.3, 0.2], dtype=torch.float32).to(dtype),
        "bias": bias.to(dtype).view(SEQLEN_Q, SEQLEN_K),
        "scale": torch.tensor(0.75, dtype=dtype),
        "doc": torch.tensor([0, 0, 1, 1, 2, 2, 2]),
    }


def functions(leaves: int = 6, smooth: bool = False):
    """A hypothesis strategy of score functions as text over score, b, h, q, k, whose values stay
    small and in the domain of every function; smooth ones compare no scores that were rounded.
    """
    from hypothesis import strategies as st

    floats = st.sampled_from(["score", "score", "score", "slopes[h]", "bias[q, k]", "(q - k) / 4"])
    plain = st.sampled_from(["q", "k", "(q - k)", "h", "(q // 2)", "doc[q]", "scale", "2", "-1.5"])
    asked = st.sampled_from(["q < k", "doc[q] == doc[k]", "(b == 1) | (k > 2)", "score < 0.25"])

    def deeper(x):
        operand = x | plain
        compared = asked if smooth else asked | st.builds("{} < {}".format, x, operand)
        return st.one_of(
            st.builds("({} {} {})".format, x, st.sampled_from("+-*"), operand),
            st.builds("({} {} {})".format, plain, st.sampled_from("+-*"), x),
            st.builds("({} / (1 + abs({})))".format, operand, x),
            st.builds("({} / {})".format, x, st.sampled_from(["3", "-0.5", "(q + 1)"])),
            st.builds("{}({}, {})".format, st.sampled_from(["minimum", "maximum"]), x, operand),
            st.builds("{}({})".format, st.sampled_from(["tanh", "sigmoid", "abs", "-"]), x),
            st.builds("{}(-abs({}))".format, st.sampled_from(["exp", "exp2"]), x),
            st.builds(
                "{}({x} * {x} + 1)".format,
                st.sampled_from(["log", "log2", "sqrt", "rsqrt"]),
                x=x,
            ),
            st.builds("where({}, {}, {})".format, compared, x, operand),
        )

    return st.recursive(floats, deeper, max_leaves=leaves).map("({} + 0.0)".format)


def function(text: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The text as a function; floats it captures are of this dtype."""
    known = {name: getattr(torch, name) for name in FUNCTIONS}
    known |= {"where": mods.where, "minimum": mods.minimum, "maximum": mods.maximum}
    return eval(f"lambda score, b, h, q, k: {text}", known | tensors(dtype))


def traced(text: str) -> ScoreMod:
    """The text as a ScoreMod."""
    return mods.score(function(text, torch.float32))


def grid() -> list[Tensor]:
    """b, h, q, k of every pair."""
    return torch.meshgrid(*(torch.arange(n) for n in SHAPE), indexing="ij")


def truth(text: str, score: Tensor) -> Tensor:
    """What torch says of the text on whole tensors, in the score's precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(score.dtype)  # what integers divide to
    try:
        return function(text, score.dtype)(score, *grid()).expand(SHAPE).to(score.dtype)
    finally:
        torch.set_default_dtype(before)
