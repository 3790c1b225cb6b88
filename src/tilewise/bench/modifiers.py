"""What a shape's `modifier` asks: a mask, a score function, a bias of every pair or dropout.

Each name is one call that a figure is given for. Masks come to us as block masks and to
FlexAttention as predicates, written out once for each: a test holds them to be the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

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


class _Masked(NamedTuple):
    """A mask of one sequence of `seqlen` tokens: as ours, as a predicate of torch's operators, and
    how many pairs it keeps.
    """

    mask: Callable[[int, str], Mask]
    predicate: Callable[[int, str], Callable[..., Tensor]]
    pairs: Callable[[int], int]


def block_mask_of(shape: Shape, device: str):
    """The BlockMask of a shape, None for one without."""
    if shape.modifier not in MASKS:
        return None
    seqlen = shape.seqlen_q
    mask = MASKS[shape.modifier].mask(seqlen, device)
    return create_block_mask(mask, shape.batch, shape.nheads, seqlen, seqlen, device=device)


def predicate_of(shape: Shape, device: str) -> Callable[..., Tensor] | None:
    """The mask as FlexAttention takes it."""
    if shape.modifier not in MASKS:
        return None
    return MASKS[shape.modifier].predicate(shape.seqlen_q, device)


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


def bias_of(shape: Shape, device: str, generator: torch.Generator) -> Tensor | None:
    """The bias of a shape that has one; head by head, as its draws are larger than it is."""
    if shape.modifier not in BIASES:
        return None
    sizes = 1, shape.nheads, shape.seqlen_q, shape.seqlen_k
    bias = torch.empty(sizes, dtype=getattr(torch, shape.dtype), device=device)
    for head in bias[0]:
        head.copy_(torch.randn(sizes[2:], device=device, generator=generator))
    return bias


def bytes_of(shape: Shape) -> int:
    """Memory of a bias with its gradient, and of what checking one head of it in fp64 takes."""
    if shape.modifier not in BIASES:
        return 0
    pairs = shape.seqlen_q * shape.seqlen_k
    copies = 2 if shape.modifier == "learned-bias" else 1
    return pairs * (shape.nheads * getattr(torch, shape.dtype).itemsize * copies + 64)


def pairs_of(modifier: str, seqlen: int) -> int:
    """How many pairs of query and key are seen in one head of one sequence."""
    return MASKS[modifier].pairs(seqlen) if modifier in MASKS else seqlen * seqlen


def words_of(modifier: str) -> str:
    """How a shape names it."""
    return f"{modifier} mask" if modifier in MASKS else modifier


def _window(seqlen: int) -> int:
    """Sequences that are no longer than it have a quarter of their length."""
    return min(WINDOW, max(seqlen // 4, 1))


def _prefix(seqlen: int) -> int:
    return seqlen // 4


def _numbers(seqlen: int, device: str) -> Tensor:
    """Which document each position is in."""
    lengths = torch.tensor(documents(seqlen))
    numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)
    return numbers.to(device)


def _within_window(seqlen: int, device: str) -> Callable[..., Tensor]:
    size = _window(seqlen)
    return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (q_idx - kv_idx < size)


def _within_prefix(seqlen: int, device: str) -> Callable[..., Tensor]:
    size = _prefix(seqlen)
    return lambda b, h, q_idx, kv_idx: (kv_idx < size) | (kv_idx <= q_idx)


def _within_document(seqlen: int, device: str) -> Callable[..., Tensor]:
    numbers = _numbers(seqlen, device)
    return lambda b, h, q_idx, kv_idx: numbers[q_idx] == numbers[kv_idx]


def _behind_in_document(seqlen: int, device: str) -> Callable[..., Tensor]:
    numbers = _numbers(seqlen, device)
    return lambda b, h, q_idx, kv_idx: (numbers[q_idx] == numbers[kv_idx]) & (kv_idx <= q_idx)


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


MASKS = {
    "window": _Masked(
        lambda seqlen, device: mods.sliding_window(_window(seqlen) - 1, 0),
        _within_window,
        lambda seqlen: _triangle(_window(seqlen)) + (seqlen - _window(seqlen)) * _window(seqlen),
    ),
    "prefix": _Masked(
        lambda seqlen, device: mods.prefix_lm(_prefix(seqlen)),
        _within_prefix,
        lambda seqlen: _prefix(seqlen) ** 2 + _triangle(seqlen) - _triangle(_prefix(seqlen)),
    ),
    "causal": _Masked(
        lambda seqlen, device: mods.causal(),
        lambda seqlen, device: lambda b, h, q_idx, kv_idx: kv_idx <= q_idx,
        _triangle,
    ),
    "documents": _Masked(
        lambda seqlen, device: mods.document(_numbers(seqlen, device)),
        _within_document,
        lambda seqlen: sum(length**2 for length in documents(seqlen)),
    ),
    "causal-documents": _Masked(
        lambda seqlen, device: mods.document(_numbers(seqlen, device)) & mods.causal(),
        _behind_in_document,
        lambda seqlen: sum(_triangle(length) for length in documents(seqlen)),
    ),
}
