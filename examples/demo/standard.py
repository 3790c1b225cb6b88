"""Standard attention: the formula, with its score matrix in memory."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def standard_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """softmax(Q K^T / sqrt(D)) V of (B, S, H, D) tensors, as every framework computed it before
    tiling.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if (group := q.shape[1] // k.shape[1]) > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    s = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if causal:
        after = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s = s.masked_fill(after, float("-inf"))
    return (s.softmax(-1) @ v).transpose(1, 2)
