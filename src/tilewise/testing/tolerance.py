"""The error budget, in one place: what a kernel may be off by.

    max  |result - oracle| <= 2   * max  |plain - oracle| + 2 * max  band in the result's dtype
    mean |result - oracle| <= 1.1 * mean |plain - oracle| + 2 * mean band in fp32

`oracle` is fp64 `attention_reference`; `plain` is the same code run in the precision of the result,
so the budget follows the inputs and no tolerance is guessed. An algorithm that stores LSE and not P
has errors of its own: its plain run is a second one, whose errors add (`cases.recomputed`). `band`
is measured as well: what the oracle loses when it and its sum and difference with 0.3 of its size
are rounded, that is, the error of three more operations. Bounding the mean, too, keeps a drift from
hiding under one bad element; its band is that of fp32, in which kernels sum whatever the dtype, as
plain code rounds the result once, too. All must be finite but the -inf of the oracle, which are
matched exactly.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

Tensor = torch.Tensor
MAX_FACTOR = 2.0
MEAN_FACTOR = 1.1
FEW_ELEMENTS = 128  # up to so many elements the mean error is noise: only the maximum is bounded


class Verdict(NamedTuple):
    """Errors with their bounds; `ok` also requires that infinities are where they belong."""

    max_error: float
    max_bound: float
    mean_error: float
    mean_bound: float
    ok: bool

    def __str__(self) -> str:
        largest = f"max {self.max_error:.2e} of {self.max_bound:.2e}"
        return f"{largest}, mean {self.mean_error:.2e} of {self.mean_bound:.2e}"


def judge(result: Tensor, oracle: Tensor, *plain: Tensor) -> Verdict:
    """Judges a result by the error budget.

    Example:
        >>> import torch
        >>> oracle = torch.linspace(-1, 1, 100, dtype=torch.float64)
        >>> judge(oracle.bfloat16(), oracle, oracle.bfloat16()).ok
        True
        >>> judge(oracle.bfloat16() + 0.1, oracle, oracle.bfloat16()).ok
        False

    Args:
        result: in the dtype whose rounding is allowed.
        oracle: fp64, of the same shape.
        plain: results of plain code in the precision of `result`; the errors of several add,
            element by element.
    """
    dtype = plain[0].dtype
    if result.shape != oracle.shape or result.dtype != dtype:
        return Verdict(math.inf, 0.0, mean_error=math.inf, mean_bound=0.0, ok=False)
    oracle = oracle.double()
    is_finite = oracle.isfinite()
    infinities_match = torch.equal(result.double()[~is_finite], oracle[~is_finite])
    computed = [result, *plain]
    if not is_finite.all():  # which copies elements one by one
        oracle, *computed = (x[is_finite] for x in (oracle, *computed))
    error, *errors = ((x.double() - oracle).abs() for x in computed)
    allowed = functools.reduce(torch.add, errors)
    max_error, mean_error = _max(error), _mean(error)
    max_bound = MAX_FACTOR * _max(allowed) + 2 * _max(rounding_band(oracle, dtype))
    mean_bound = MEAN_FACTOR * _mean(allowed) + 2 * _mean(rounding_band(oracle, torch.float32))
    if oracle.count_nonzero() < FEW_ELEMENTS:
        mean_bound = max_bound
    within = max_error <= max_bound and mean_error <= mean_bound  # False for NaN
    return Verdict(max_error, max_bound, mean_error, mean_bound, within and infinities_match)


def rounding_band(oracle: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of three roundings to `dtype`, element by element."""
    c = 0.3 * oracle.square().mean().sqrt() if oracle.numel() else 0.0
    errors = ((x.to(dtype).double() - x).abs() for x in (oracle, oracle + c, oracle - c))
    return functools.reduce(torch.add, errors)


def assert_within(result: Tensor, oracle: Tensor, plain: Tensor, name: str = "result") -> None:
    """Asserts that a result is within the error budget.

    Args:
        result: in the dtype whose rounding is allowed.
        oracle: fp64, of the same shape.
        plain: the result of plain code in that precision.
        name: the name of the result in the message.

    Raises:
        AssertionError: it is not; the message has the figures.
    """
    verdict = judge(result, oracle, plain)
    if not verdict.ok:
        raise AssertionError(f"{name} is out of its budget: {verdict}{_misplaced(result, oracle)}")


def _misplaced(result: Tensor, oracle: Tensor) -> str:
    if result.shape != oracle.shape:
        return f"; its shape is {tuple(result.shape)}, the oracle's {tuple(oracle.shape)}"
    wrong = (result.isfinite() != oracle.isfinite()).nonzero()
    if len(wrong) == 0:
        return ""
    return (
        f"; {len(wrong)} elements are not finite where they should be, or are: {wrong[0].tolist()}"
    )


def _max(x: Tensor) -> float:
    """The largest element: NaN where there is one, 0 for none."""
    return x.max().item() if x.numel() else 0.0


def _mean(x: Tensor) -> float:
    return x.mean().item() if x.numel() else 0.0
