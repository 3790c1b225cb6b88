"""The numbers of a call: scale, softcap, window and bounds as users write them become what
`Scalars` holds, or an ArgumentError that names the culprit.
"""

from __future__ import annotations

import math

import torch

from .errors import ArgumentError
from .problem import OPEN

Tensor = torch.Tensor
Window = tuple[int | None, int | None] | None


def check_scale(scale: float | None, headdim: int) -> float:
    """The softmax scale: 1 / sqrt(headdim) unless given."""
    if scale is None:
        return headdim**-0.5
    _check_number("scale", scale)
    if not (scale > 0 and scale < math.inf):
        raise ArgumentError(
            f"scale={scale}: it must be positive and finite; to flip the sign of the scores negate "
            "q"
        )
    return float(scale)


def check_softcap(softcap: float | None) -> float:
    """The softcap: 0 means none."""
    if softcap is None:
        return 0.0
    _check_number("softcap", softcap)
    if not (softcap >= 0 and softcap < math.inf):
        raise ArgumentError(f"softcap={softcap}: it must be positive, or 0 or None for none")
    return float(softcap)


def _check_number(name: str, value) -> None:
    """What is neither a number nor counts as one, and what would be learned and has no gradient."""
    if isinstance(value, (str, list, tuple, dict)):
        raise ArgumentError(f"{name}={value!r}: it must be a number")
    if isinstance(value, Tensor) and (value.requires_grad or value.numel() != 1):
        raise ArgumentError(
            f"{name} is a tensor of shape {tuple(value.shape)} with requires_grad "
            f"{value.requires_grad}: it must be a number, without a gradient; scale q, or let a "
            "score_mod capture what is learned"
        )


def band(window: Window, is_causal: bool, name: str = "window") -> tuple[int, int]:
    """A window and a causal flag as (left, right), -1 for an open side. Causal closes the right
    side at 0.
    """
    left, right = check_window(window, name)
    if is_causal:
        right = 0
    return left, right


def check_window(window: Window, name: str) -> tuple[int, int]:
    """(left, right) with None and -1 as open sides."""
    if window is None:
        return OPEN, OPEN
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ArgumentError(
            f"{name}={window!r}: it must be a pair (left, right) of ints, each None or -1 for no "
            "limit"
        )
    sides = []
    for side in window:
        if side is not None and (
            not isinstance(side, (int, torch.SymInt)) or isinstance(side, bool)
        ):
            raise ArgumentError(
                f"{name}={tuple(window)!r}: its sides must be ints, None or -1 for no limit"
            )
        if side is not None and side < OPEN:
            raise ArgumentError(
                f"{name}={tuple(window)!r}: a side must be at least 0, or None or -1 for no limit"
            )
        sides.append(OPEN if side is None else side)
    return sides[0], sides[1]


def check_bounds(*bounds: int | Tensor | None) -> None:
    """max_seqlen_q and max_seqlen_k, which may be larger than any length."""
    for name, bound in zip(("max_seqlen_q", "max_seqlen_k"), bounds):
        if bound is not None and (
            not isinstance(bound, (int, torch.SymInt, torch.Tensor)) or isinstance(bound, bool)
        ):
            raise ArgumentError(f"{name}={bound!r}: it must be an int, or None to leave it out")
