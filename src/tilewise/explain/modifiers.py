"""What a shape's `modifier` asks: a mask, a score function, a bias of every pair or dropout.

Each name is one call that a figure is given for. Masks are block masks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .. import mods, scores
from ..mods import Mask
from ..sparse import create_block_mask
from .lengths import documents

if TYPE_CHECKING:
    from .shapes import Shape

Tensor = torch.Tensor
WINDOW = 1024  # keys that a query of `window` sees, its own among them
DROPOUT_P = 0.1
RNG = (1 << 40, 3)  # seed and offset of dropout: which pairs are kept is the same in every call
BIASES = ("bias", "learned-bias")  # (1, nheads, seqlen, seqlen); the second wants its gradient
NAMES = (
    *("window", "prefix", "causal", "documents", "causal-documents"),
    *("score", "dropout", *BIASES),
)


def block_mask_of(shape: Shape, device: str):
    """The BlockMask of a shape, None for one without."""
    if shape.modifier not in MASKS:
        return None
    seqlen = shape.seqlen_q
    mask = MASKS[shape.modifier](seqlen, device)
    return create_block_mask(mask, shape.batch, shape.nheads, seqlen, seqlen, device=device)


def score_of(shape: Shape, device: str) -> Callable[..., Tensor] | None:
    """The score function of a shape: a slope a head times the distance to the key."""
    if shape.modifier != "score":
        return None
    heads = torch.arange(1, shape.nheads + 1, dtype=torch.float32, device=device)
    slopes = torch.exp2(-8 * heads / shape.nheads)
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx)


def arguments_of(shape: Shape, device: str) -> dict[str, Any]:
    """What `attention` is called with, nothing for a shape without; a bias is an input."""
    if shape.modifier in MASKS:
        return {"block_mask": block_mask_of(shape, device)}
    if (score := score_of(shape, device)) is not None:
        return {"score_mod": scores.score(score)}
    if shape.modifier == "dropout":
        return {"dropout_p": DROPOUT_P, "dropout_rng": torch.tensor(RNG, device=device)}
    return {}


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
