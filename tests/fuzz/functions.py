"""Masks and score functions as users write them: the library's half of each pair, by the names that
`formulas.py` has, and the tensors that both read.
"""

from __future__ import annotations

import math

import torch

from tilewise import mods, scores

Tensor = torch.Tensor

SCORES = {
    "tilted": lambda t: lambda s, b, h, q, k: s + 0.01 * (k - q) * (h + 1),
    "alibi": lambda t: scores.alibi(t["slopes"]),
    "relative": lambda t: scores.relative_bias(t["table"]),
    "softcapped": lambda t: scores.softcapped(5.0),
    "by-key": lambda t: lambda s, b, h, q, k: s * (1 + 0.1 * t["table"][h, k % 32]),
    "by-row": lambda t: lambda s, b, h, q, k: s + t["rows"][b, q],
    "softsign": lambda t: lambda s, b, h, q, k: s / (1 + abs(s) / 8),
    "sigmoid": lambda t: lambda s, b, h, q, k: 4 * torch.sigmoid(s),
    "logarithm": lambda t: lambda s, b, h, q, k: torch.log(1 + s * s),
    "rectified": lambda t: lambda s, b, h, q, k: mods.maximum(s, -0.5),
    "gelu": lambda t: lambda s, b, h, q, k: 2 * torch.nn.functional.gelu(s) - s.softplus(),
    "clamped": lambda t: lambda s, b, h, q, k: s.clamp(-1.5, 4).masked_fill(q // 3 % 2 == 1, 0.5),
    "wave": lambda t: lambda s, b, h, q, k: torch.sin(s) + (q - k).abs().float() * 2.0 ** (-h - 4),
    "hiding": lambda t: lambda s, b, h, q, k: torch.where(k <= q + 7, s, -math.inf),
}

MASKS = {
    "causal": lambda t: mods.causal(diagonal=2),
    "window": lambda t: mods.sliding_window(20, 9),
    "prefix": lambda t: mods.prefix_lm(11),
    "prefixes": lambda t: mods.prefix_lm(t["prefix"]),
    "documents": lambda t: mods.document(t["ids"]),
    "documents of rows": lambda t: mods.document(t["row_ids"]),
    "chunks": lambda t: mods.chunked(24),
    "turns": lambda t: lambda b, h, q, k: (q % 5 >= k % 4) | (q // 7 == k),
    "dilated": lambda t: mods.dilated(3),
    "pairs": lambda t: lambda b, h, q, k: t["pairs"][q, k],
    "pairs of heads": lambda t: lambda b, h, q, k: t["head_pairs"][h, q, k],
    "keys of rows": lambda t: lambda b, h, q, k: t["flags"][b, k],
    "joined": lambda t: (
        (mods.causal() & mods.sliding_window(30)) | (lambda b, h, q, k: k % 7 == h % 7)
    ),
    "holes": lambda t: lambda b, h, q, k: (q // 40 % 2 == 0) & (k // 40 % 2 == 1),
    "nothing": lambda t: lambda b, h, q, k: k < 0,
}

# What each reads, and which of it may want a gradient.
READS = {
    "alibi": "slopes",
    "relative": "table",
    "by-key": "table",
    "by-row": "rows",
    "prefixes": "prefix",
    "documents": "ids",
    "documents of rows": "row_ids",
    "pairs": "pairs",
    "pairs of heads": "head_pairs",
    "keys of rows": "flags",
}
LEARNED = ("alibi", "relative", "by-key", "by-row")


def captured(
    names: tuple[str, ...], batch: int, nheads: int, longest: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """The tensors that masks and score functions of these names read, on the CPU."""
    batch, longest = max(batch, 1), max(longest, 1)

    def some(share: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < share

    makers = {
        "slopes": lambda: torch.rand(nheads, generator=generator),
        "table": lambda: torch.randn(nheads, 33, generator=generator),
        "rows": lambda: torch.randn(batch, longest, generator=generator),
        "prefix": lambda: torch.randint(0, longest + 1, (batch,), generator=generator).int(),
        "ids": lambda: some(0.1, longest).cumsum(0).int(),
        "row_ids": lambda: some(0.1, batch, longest).cumsum(1).int(),
        "pairs": lambda: some(0.6, longest, longest),
        "head_pairs": lambda: some(0.3, nheads, longest, longest),
        "flags": lambda: some(0.7, batch, longest),
    }
    wanted = dict.fromkeys(READS[name] for name in names if name in READS)
    return {name: makers[name]() for name in wanted}
