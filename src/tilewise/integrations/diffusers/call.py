"""One call of ours, for tensors as diffusers has them: (batch, seqlen, nheads, headdim)."""

from __future__ import annotations

from typing import Any

import torch

from ...frontend.sdpa import with_lse

Tensor = torch.Tensor


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """One call: out and lse, (batch, seqlen, nheads, ...)."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = with_lse(q, k, value=v, attn_mask=mask, **options)
    return out.transpose(1, 2), lse.transpose(1, 2).contiguous()
