"""Masks and score functions of the matrix, by name; each takes the sizes of a call, and captures
tensors on its device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..mods import causal, document, maximum, minimum, prefix_lm
from ..sparse import create_block_mask
from .cases import Features, Sizes


def modifiers(
    sizes: Sizes,
    features: Features,
    device: str | torch.device,
    learned: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The arguments that modify scores; `learned` is a captured tensor that wants a gradient."""
    arguments = {}
    if learned is not None:
        arguments["score_mod"] = LEARNED[features.score](learned)
    elif features.score:
        arguments["score_mod"] = SCORES[features.score](sizes, device)
    if features.mask:
        mask = MASKS[features.mask](sizes, device)
        arguments["mask_mod"] = mask
        if features.blocks:
            batch, seqlen_q, seqlen_k, nheads, *_ = sizes
            how: dict[str, Any] = dict(device=device, block=features.blocks)
            blocks = create_block_mask(mask, batch, nheads, seqlen_q, seqlen_k, **how)
            arguments = {**arguments, "mask_mod": None, "block_mask": blocks}
    if features.dropout:
        arguments["dropout_p"] = features.dropout
        arguments["dropout_rng"] = torch.tensor([1 << 40, 3], device=device)
    return arguments


def _documents(sizes: Sizes, device) -> Callable:
    """Documents of uneven lengths, others in each row of the batch."""
    longest = max(sizes.seqlen_q, sizes.seqlen_k)
    numbers = torch.arange(longest, device=device) // torch.tensor([[29], [50]], device=device)
    return document(numbers[torch.arange(sizes.batch) % 2].int())


def _by_head(sizes: Sizes, device) -> Callable:
    """Another pattern for each head and row of the batch."""
    return lambda b, h, q_idx, kv_idx: (q_idx + 2 * h) % 3 != (kv_idx + b) % 3


def _holes(sizes: Sizes, device) -> Callable:
    """Queries without keys, and keys without queries."""
    return lambda b, h, q_idx, kv_idx: ((q_idx // 40) % 2 == 0) & ((kv_idx // 40) % 2 == 1)


MASKS: dict[str, Callable] = {
    "causal": lambda sizes, device: causal(sizes.seqlen_k - sizes.seqlen_q),
    "documents": _documents,
    "prefix": lambda sizes, device: prefix_lm(20),
    "by-head": _by_head,
    "holes": _holes,
}


def _tilted(sizes: Sizes, device) -> Callable:
    return lambda score, b, h, q_idx, kv_idx: score + 0.01 * (kv_idx - q_idx) * (h + 1)


def _table(sizes: Sizes, device) -> Callable:
    """A bias by distance, from a table: relative positions."""
    return _relative(_distances(sizes, device))


def _distances(sizes: Sizes, device) -> torch.Tensor:
    """A number for each head and distance."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(sizes.nheads, 33, generator=generator).to(device)


def _relative(table: torch.Tensor) -> Callable:
    def relative(score, b, h, q_idx, kv_idx):
        return score + table[h, minimum(maximum(kv_idx - q_idx + 16, 0), 32)]

    return relative


def _by_key(table: torch.Tensor) -> Callable:
    """A factor of each score, by head and key, and a tilt by head."""

    def by_key(score, b, h, q_idx, kv_idx):
        return score * (1 + 0.1 * table[h, kv_idx % 32]) + 0.01 * table[h, 32] * (kv_idx - q_idx)

    return by_key


def _nonlinear(sizes: Sizes, device) -> Callable:
    return lambda score, b, h, q_idx, kv_idx: 3 * torch.tanh(score / 3) + 0.1 * score * score


def _hiding(sizes: Sizes, device) -> Callable:
    """FlexAttention's other way to mask."""
    return lambda score, b, h, q_idx, kv_idx: torch.where(kv_idx <= q_idx + 7, score, -float("inf"))


SCORES: dict[str, Callable] = {
    "tilted": _tilted,
    "table": _table,
    "by-key": lambda sizes, device: _by_key(_distances(sizes, device)),
    "nonlinear": _nonlinear,
    "hiding": _hiding,
}
LEARNED: dict[str, Callable] = {"table": _relative, "by-key": _by_key}
