"""Validation of a call's numbers: scale, softcap, window and bounds become `Scalars`, or an
ArgumentError that names the argument.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import torch

from ..errors import OURS, ArgumentError, Words
from ..mods.compilers import holds
from ..problem import LONG_SEQLEN, OPEN, Scalars
from ..tile.dropout_numbers import check_dropout

Tensor = torch.Tensor
REAL = numbers.Real, torch.SymFloat, torch.SymInt
Window = tuple[int | None, int | None] | None
PACKED = "sequences are (total, nheads, headdim)"
INTEGERS = torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8


class Numbers(NamedTuple):
    """The numbers that a caller wrote: those of scores, and which keys a query sees."""

    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0  # not 0.0: a compiler takes that for a variable
    causal: bool | str = False
    window: Window = None

    @property
    def are_fixed(self) -> bool:
        """Whether they cannot change: none is a tensor or a symbol."""
        are_floats = all(x is None or type(x) is float for x in (self.scale, self.softcap))
        return are_floats and type(self.dropout_p) in (int, float)

    def sides(self, name: str = "window") -> tuple[int, int]:
        """The keys left and right of its diagonal that a query sees, -1 for no limit."""
        return band(self.window, self.causal is not False, name=name)


def check_numbers(numbers: Numbers, q: Tensor, words: Words = OURS) -> Scalars:
    """The numbers of a call with this q: the softmax scale, 1 / sqrt(headdim) unless given, the
    softcap, 0 for none, and the band.
    """
    scale, softcap = numbers.scale, numbers.softcap
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    factor = q.shape[-1] ** -0.5 if scale is None else check_scale(scale, words)
    cap = 0.0 if softcap is None else check_softcap(softcap)
    if scale is not None:
        _check_range(words.scale, factor, exact=exact, remedy=f"multiply {words.q} instead")
    if cap:
        _check_range("softcap", cap, exact=exact, remedy="leave it out")
        # One of few digits, or 0, moves a score by no more than a part of the cap
        few = torch.finfo(exact).tiny if cap > 1e20 else 0.0
        name = f"{words.scale} / softcap"
        _check_range(name, factor / cap, exact=exact, remedy="bring them closer", least=few)
    left, right = numbers.sides(words.window)
    dropout_p = check_dropout(numbers.dropout_p)
    return Scalars(factor, cap, left=left, right=right, dropout_p=dropout_p)


def check_scale(scale: float, words: Words = OURS) -> float:
    """A positive number."""
    remedy = f"multiply {words.q} by it, or let a score_mod capture it"
    number = check_number(words.scale, scale, remedy=remedy)
    if not (number > 0 and number < math.inf):
        raise ArgumentError(
            f"{words.scale}={scale}: it must be positive and finite; to flip the sign of the "
            f"scores negate {words.q}"
        )
    return number


def check_softcap(softcap: float) -> float:
    """A positive number, or 0 for none."""
    number = check_number("softcap", softcap, remedy="let a score_mod capture it")
    if not (number >= 0 and number < math.inf):
        raise ArgumentError(f"softcap={softcap}: it must be positive and finite, or 0 or None")
    return number


def has_numbers(x: Any) -> bool:
    """Whether it is a tensor whose numbers may be read: neither nested, sparse nor without any."""
    is_dense = isinstance(x, Tensor) and not x.is_nested and x.layout == torch.strided
    return is_dense and x.device.type != "meta"


def check_number(name: str, value: Any, remedy: str) -> float:
    """What is a number or counts as one; not what would be learned, as it gets no gradient."""
    if has_numbers(value) and not value.is_complex():
        if value.requires_grad or value.numel() != 1:
            raise ArgumentError(
                f"{name} is a tensor of shape {tuple(value.shape)} with requires_grad "
                f"{value.requires_grad}: it must be a number, without a gradient; {remedy}"
            )
    elif isinstance(value, bool) or not isinstance(value, REAL):
        raise ArgumentError(f"{name}={value!r}: it must be a real number")
    try:
        return float(value)
    except OverflowError:  # an int past all floats
        return -math.inf if value < 0 else math.inf


def _check_range(
    name: str, number: float, exact: torch.dtype, remedy: str, least: float | None = None
) -> None:
    """A number that is neither 0 nor inf where kernels have it in `exact`, also times log2(e)."""
    limits = torch.finfo(exact)
    # A compiler takes a global float for a variable
    least = limits.tiny * limits.eps if least is None else least  # the smallest of all
    most = limits.max / 1.4426950408889634
    if not (number >= least and number <= most):
        raise ArgumentError(
            f"{name}={number}: scores are computed in {exact}, so it must lie between {least:.3g} "
            f"and {most:.3g}; {remedy}"
        )


def check_flag(name: str, value: Any, remark: str = "") -> bool:
    """A bool, or what equals one: 0, 1 and numpy's."""
    if value is True or value is False:
        return value
    is_numpy = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    if not is_numpy and (not isinstance(value, int) or value not in (0, 1)):
        raise ArgumentError(f"{name}={value!r}: it must be False or True{remark}")
    return bool(value)


def check_causal(causal: bool | str) -> str:
    """Where the diagonal ends. `causal is not False` says whether the band is closed."""
    if causal is True or causal is False:
        return "bottom_right"
    if isinstance(causal, str) and causal in ("bottom_right", "top_left"):
        return causal
    if isinstance(causal, Tensor) and not causal.is_nested:
        raise NotImplementedError(
            f"causal is a tensor of shape {tuple(causal.shape)}: one call is causal for all of its "
            "sequences or for none, so call once for each of the two kinds"
        )
    raise ArgumentError(
        f"causal={causal!r}: it must be False, True, 'bottom_right' (what True means) or 'top_left'"
    )


def check_layout(layout: str, name: str = "layout", packed: str = "") -> None:
    """Refuses an unknown order of dimensions, and any but the first of tensors that are `packed`,
    which says how.
    """
    if not isinstance(layout, str) or layout not in ("bshd", "bhsd"):
        raise ArgumentError(f"{name}={layout!r}: it must be 'bshd' or 'bhsd'")
    if packed and layout != "bshd":
        raise ArgumentError(f"{name}={layout!r}: packed {packed}, so leave it out")


def band(window: Window, is_causal: bool, name: str = "window") -> tuple[int, int]:
    """A window and a causal flag as (left, right), -1 for an open side. Causal closes the right
    side at 0.
    """
    left, right = check_window(window, name)
    return left, 0 if is_causal else right


def check_window(window: Any, name: str) -> tuple[int, int]:
    """(left, right) with None and -1 as open sides."""
    if window is None:
        return OPEN, OPEN
    pair = window
    if (isinstance(window, Tensor) and has_numbers(window)) or type(window).__module__ == "numpy":
        pair = window.tolist()
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ArgumentError(
            f"{name}={window!r}: it must be a pair (left, right) of ints, each None or -1 for no "
            "limit"
        )
    left, right = (OPEN if n is None else as_int(n) for n in pair)
    if left is None or right is None:
        raise ArgumentError(
            f"{name}={tuple(pair)!r}: its sides must be ints, None or -1 for no limit"
        )
    if left < OPEN or right < OPEN:
        raise ArgumentError(
            f"{name}={tuple(pair)!r}: a side must be at least 0, or None or -1 for no limit"
        )
    return left, right


def as_int(value: Any) -> int | None:
    """An integer, also of numpy or in a tensor of one, whose device is waited for; else None."""
    if type(value) in (int, torch.SymInt):
        return value
    if isinstance(value, Tensor):
        is_one = has_numbers(value) and value.numel() == 1 and value.dtype in INTEGERS
        return value.item() if is_one else None  # pyright: ignore[reportReturnType]  # an int
    return int(value) if isinstance(value, numbers.Integral) and type(value) is not bool else None


def check_size(name: str, value: Any, least: int = 0) -> int:
    """A number of things, as an int."""
    number = as_int(value)
    if number is None or number < least:
        raise ArgumentError(f"{name}={value!r}: it must be an int, at least {least}")
    return number


def check_bounds(*bounds: int | Tensor | None) -> None:
    """max_seqlen_q and max_seqlen_k, which may be larger than any length."""
    for name, bound in zip(("max_seqlen_q", "max_seqlen_k"), bounds):
        if isinstance(bound, Tensor):  # its number is on its device, and not waited for
            is_right = bound.numel() == 1 and not bound.dtype.is_floating_point
        else:
            number = as_int(bound)
            is_right = bound is None or (number is not None and not holds(number < 0, False))
        if not is_right:
            raise ArgumentError(
                f"{name}={bound!r}: it must be an int, at least 0, or None to leave it out"
            )


def as_bound(bound: int | Tensor | None) -> bool | int | Tensor | None:
    """The part of a bound on lengths that is in the cache key: whether it is long, where it is
    valid.
    """
    return bound > LONG_SEQLEN if type(bound) is int and bound >= 0 else bound


def step_bound(bound: int | Tensor | None) -> Any:
    """`as_bound` of queries with a KV cache."""
    return 1 << bound.bit_length() >> 1 if type(bound) is int and bound >= 0 else bound


def longest_of(max_seqlen_q: int | Tensor | None) -> int:
    """The greatest power of two that a bound on lengths reaches; 0 where it is not known here."""
    return step_bound(max_seqlen_q) if type(max_seqlen_q) is int and max_seqlen_q > 0 else 0


def is_long(max_seqlen_q: int | Tensor | None) -> bool:
    """Whether packed sequences may be long. A tensor's number is on its device, and nothing here is
    worth a wait.
    """
    is_known = isinstance(max_seqlen_q, (numbers.Integral, torch.SymInt))
    return is_known and holds(max_seqlen_q > LONG_SEQLEN, False)
