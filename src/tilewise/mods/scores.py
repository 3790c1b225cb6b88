"""What becomes of a score before the softmax: functions of the score and of positions."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar

import torch

from ..errors import ArgumentError, a_type
from .derivative import derivative as derive
from .expressions import Node
from .function import TracedFunction, check_tensor
from .symbols import Symbol
from .trace import SCORE_FUNCTION, maximum, minimum, trace
from .trace_cache import trace_once

Tensor = torch.Tensor
ScoreFunction = Callable[..., Tensor | Symbol | float]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ScoreMod(TracedFunction):
    """A score function: its expression as a tree, and the tensors that it captured; made by `score`
    and named ones.

    Example:
        >>> halved = score(lambda score, b, h, q_idx, kv_idx: score / 2 + (kv_idx - q_idx))
        >>> halved, halved.derivative
        (ScoreMod(((score / 2) + (k_idx - q_idx))), ScoreMod(0.5))
        >>> halved(torch.ones(2, 2), 0, 0, torch.arange(2)[:, None], torch.arange(2))
        tensor([[ 0.5000,  1.5000],
                [-0.5000,  0.5000]])
    """

    KIND: ClassVar[str] = "score function"

    slope: Node | None = None  # the derivative, where it is not derived from expr

    def __call__(self, score, b, h, q_idx, kv_idx):
        """Evaluates the function; inside another score function, a part of that function.

        Args:
            score: float tensor; it and the indices broadcast against each other.
            b: batch index, int or integer tensor.
            h: query head index.
            q_idx: position of the query.
            kv_idx: position of the key.

        Returns:
            The new score, fp32, or fp64 if the score is.
        """
        return self._value(b, h, q_idx, kv_idx, score)

    @functools.cached_property
    def derivative(self) -> ScoreMod:
        """The derivative by `score`, over the same tensors."""
        return ScoreMod(derive(self.expr) if self.slope is None else self.slope, self.tensors)

    @property
    def trees(self) -> tuple[Node, ...]:
        """The function's, and the derivative's if it was given."""
        return (self.expr,) if self.slope is None else (self.expr, self.slope)


def score(function: ScoreFunction, derivative: ScoreFunction | None = None) -> ScoreMod:
    """Makes a score function from any function of (score, b, h, q_idx, kv_idx).

    Example:
        >>> bias = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
        >>> score(lambda score, b, h, q_idx, kv_idx: score + bias[q_idx, kv_idx])
        ScoreMod((score + t0[q_idx, k_idx]))

    Args:
        function: it may use what `tilewise.mods.trace` lists.
        derivative: its derivative by score, a function of the same arguments; found from the tree
            by default.

    Raises:
        ArgumentError: a function cannot be traced, or has no known derivative.

    FlexAttention (Dong et al. 2024, arXiv 2412.05496).
    """
    if isinstance(function, ScoreMod) and derivative is None:
        return function
    for name, value in (("score_mod", function), ("derivative", derivative)):
        if not callable(value) and (name == "score_mod" or value is not None):
            raise ArgumentError(
                f"{name} is {a_type(value)}: it must be a function of (score, b, h, q_idx, kv_idx)"
            )
    if derivative is None:
        return trace_once(function, _derived)
    expr, tensors = trace(function, SCORE_FUNCTION)
    slope, tensors = trace(derivative, SCORE_FUNCTION, tensors=tensors)
    return ScoreMod(expr, tensors, slope=slope)


def _derived(function: ScoreFunction) -> ScoreMod:
    expr, tensors = trace(function, SCORE_FUNCTION)
    score_mod = ScoreMod(expr, tensors)
    _ = score_mod.derivative  # found now: a compiler that meets the function can derive nothing
    return score_mod


def alibi(slopes: Tensor) -> ScoreMod:
    """ALiBi: subtracts a head's slope times the distance from the query back to the key.

    Example:
        >>> near = alibi(torch.tensor([1.0, 0.5]))
        >>> near(torch.zeros(1, 1), 0, 1, torch.arange(2)[:, None], torch.arange(2))
        tensor([[ 0.0000,  0.5000],
                [-0.5000,  0.0000]])

    Keys after the query gain, so use it with a causal mask.

    Args:
        slopes: float (nheads,).

    Press et al. 2022, arXiv 2108.12409.
    """
    check_tensor("slopes", slopes, ranks=(1,), shapes="(nheads,)", is_float=True)
    return score(lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx))


def softcapped(cap: float) -> ScoreMod:
    """Softcap: cap * tanh(score / cap), as in Gemma 2.

    Example:
        >>> softcapped(30.0)(torch.tensor([0.0, 1000.0]), 0, 0, 0, 0)
        tensor([ 0., 30.])

    Args:
        cap: positive.
    """
    if isinstance(cap, bool) or not isinstance(cap, (int, float)):
        raise ArgumentError(f"cap is {a_type(cap)}: it must be a number")
    if not 0 < cap < math.inf:
        raise ArgumentError(f"cap={cap}: it must be positive and finite")
    return score(lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap))


def relative_bias(table: Tensor) -> ScoreMod:
    """A learned bias for each distance from query to key, clamped at the table's ends.

    Example:
        >>> table = torch.tensor([[-1.0, 0.0, 1.0]])  # reach 1
        >>> relative_bias(table)(torch.zeros(1, 1), 0, 0, torch.arange(3)[:, None], torch.arange(3))
        tensor([[ 0.,  1.,  1.],
                [-1.,  0.,  1.],
                [-1., -1.,  0.]])

    Args:
        table: float (nheads, 2 * reach + 1), the middle for distance 0.

    Shaw et al. 2018, arXiv 1803.02155.
    """
    shapes = "(nheads, 2 * reach + 1)"
    check_tensor("table", table, ranks=(2,), shapes=shapes, is_float=True)
    if table.shape[1] % 2 == 0:
        raise ArgumentError(
            f"table has shape {tuple(table.shape)}: it must be {shapes}, with as many "
            "distances before the diagonal as after it"
        )
    reach = table.shape[1] // 2

    def biased(score, b, h, q_idx, kv_idx):
        return score + table[h, minimum(maximum(kv_idx - q_idx + reach, 0), 2 * reach)]

    return score(biased)
