"""What a shape's `modifier` asks: a mask, a score function, a bias of every pair or dropout.

Each name is one call that a figure is given for. Masks are block masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from .. import mods
from ..mods import Mask
from .lengths import documents

Tensor = torch.Tensor
WINDOW = 1024  # keys that a query of `window` sees, its own among them
DROPOUT_P = 0.1
RNG = (1 << 40, 3)  # seed and offset of dropout: which pairs are kept is the same in every call
BIASES = ("bias", "learned-bias")  # (1, nheads, seqlen, seqlen); the second wants its gradient
NAMES = *"window prefix causal documents causal-documents score dropout".split(), *BIASES


def pairs_of(modifier: str, seqlen: int) -> int:
    """How many pairs of query and key are seen in one head of one sequence."""
    return PAIRS[modifier](seqlen) if modifier in PAIRS else seqlen * seqlen


def words_of(modifier: str) -> str:
    """How a shape names it."""
    return f"{modifier} mask" if modifier in MASKS else modifier


def window_size(seqlen: int) -> int:
    """Sequences that are no longer than it have a quarter of their length."""
    return min(WINDOW, max(seqlen // 4, 1))


def prefix_size(seqlen: int) -> int:
    return seqlen // 4


def document_numbers(seqlen: int, device: str) -> Tensor:
    """Which document each position is in."""
    lengths = torch.tensor(documents(seqlen))
    numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)
    return numbers.to(device)


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


def _band(seqlen: int, size: int) -> int:
    """Pairs of queries with up to `size` keys, their own and those before it."""
    return _triangle(size) + (seqlen - size) * size


# Of one sequence of so many tokens: its mask on a device, and how many pairs it keeps
MASKS: dict[str, Callable[[int, str], Mask]] = {
    "window": lambda seqlen, device: mods.sliding_window(window_size(seqlen) - 1, 0),
    "prefix": lambda seqlen, device: mods.prefix_lm(prefix_size(seqlen)),
    "causal": lambda seqlen, device: mods.causal(),
    "documents": lambda seqlen, device: mods.document(document_numbers(seqlen, device)),
    "causal-documents": lambda seqlen, device: (
        mods.document(document_numbers(seqlen, device)) & mods.causal()
    ),
}
PAIRS: dict[str, Callable[[int], int]] = {
    "window": lambda seqlen: _band(seqlen, window_size(seqlen)),
    "prefix": lambda seqlen: _triangle(seqlen) + math.comb(prefix_size(seqlen), 2),
    "causal": _triangle,
    "documents": lambda seqlen: sum(length**2 for length in documents(seqlen)),
    "causal-documents": lambda seqlen: sum(map(_triangle, documents(seqlen))),
}
