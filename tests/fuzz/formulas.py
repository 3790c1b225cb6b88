"""Masks and score functions as torch computes them on whole tensors: the oracle's half of each pair
in `functions.py`, written from what the documentation says and with no help of the library.
"""

from __future__ import annotations

import math

import torch


def _relative(t, s, b, h, i, j):
    table = t["table"]
    reach = (table.shape[1] - 1) // 2
    return s + table[h, torch.clamp(j - i, -reach, reach) + reach]


SCORES = {
    "tilted": lambda t, s, b, h, i, j: s + ((j - i) * (h + 1)).to(s.dtype) / 100,
    "alibi": lambda t, s, b, h, i, j: s - t["slopes"][h] * (i - j),
    "relative": _relative,
    "softcapped": lambda t, s, b, h, i, j: 5.0 * torch.tanh(s / 5.0),
    "by-key": lambda t, s, b, h, i, j: s + 0.1 * s * t["table"][h, j % 32],
    "by-row": lambda t, s, b, h, i, j: s + t["rows"][b, i],
    "softsign": lambda t, s, b, h, i, j: 8 * s / (8 + s.abs()),
    "sigmoid": lambda t, s, b, h, i, j: 4 / (1 + torch.exp(-s)),
    "logarithm": lambda t, s, b, h, i, j: torch.log1p(s * s),
    "rectified": lambda t, s, b, h, i, j: s * (s > -0.5) - 0.5 * (s <= -0.5),
    # Less torch's softplus, which is s itself above 20
    "gelu": lambda t, s, b, h, i, j: (
        s * (1 + torch.erf(s / math.sqrt(2)))
        - torch.where(s > 20, s, torch.log(1 + torch.exp(s.clamp(max=20))))
    ),
    "clamped": lambda t, s, b, h, i, j: torch.where(
        torch.remainder(torch.div(i, 3, rounding_mode="floor"), 2) == 1, 0.5, s.clamp(-1.5, 4)
    ),
    "wave": lambda t, s, b, h, i, j: s.sin() + (i - j).abs() / (16 * torch.exp2(h.to(s.dtype))),
    "hiding": lambda t, s, b, h, i, j: s.masked_fill(j > i + 7, -math.inf),
}

MASKS = {
    "causal": lambda t, b, h, i, j: j - i <= 2,
    "window": lambda t, b, h, i, j: ((i - j) <= 20) & ((j - i) <= 9),
    "prefix": lambda t, b, h, i, j: (j < 11) | (j <= i),
    "prefixes": lambda t, b, h, i, j: (j < t["prefix"][b]) | (j <= i),
    "documents": lambda t, b, h, i, j: t["ids"][i.clamp(min=0)] == t["ids"][j],
    "documents of rows": lambda t, b, h, i, j: t["row_ids"][b][i] == t["row_ids"][b][j],
    "chunks": lambda t, b, h, i, j: (
        torch.div(i, 24, rounding_mode="floor") == torch.div(j, 24, rounding_mode="floor")
    ),
    "turns": lambda t, b, h, i, j: (
        (torch.remainder(i, 5) >= torch.remainder(j, 4))
        | (torch.div(i, 7, rounding_mode="floor") == j)
    ),
    "dilated": lambda t, b, h, i, j: torch.remainder(i - j, 3) == 0,
    "pairs": lambda t, b, h, i, j: t["pairs"][i.clamp(min=0), j],
    "pairs of heads": lambda t, b, h, i, j: t["head_pairs"][h, i, j],
    "keys of rows": lambda t, b, h, i, j: t["flags"][b][j],
    "joined": lambda t, b, h, i, j: ((j <= i) & ((i - j) <= 30)) | ((j % 7) == (h % 7)),
    "holes": lambda t, b, h, i, j: ((i // 40) % 2 == 0) & ((j // 40) % 2 == 1),
    "nothing": lambda t, b, h, i, j: (j < 0) & (i >= 0),
}
