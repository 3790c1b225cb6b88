"""One call of ours, for tensors as diffusers has them: (batch, seqlen, nheads, headdim)."""

from __future__ import annotations

import torch

from ...frontend.sdpa import with_lse

Tensor = torch.Tensor


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *flags
) -> tuple[Tensor, Tensor]:
    """One call: out, and lse as (batch, nheads, seqlen)."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, lse = with_lse(q, k, v, mask, *flags)
    return out.transpose(1, 2), lse


def by_query(lse: Tensor) -> Tensor:
    """lse as diffusers has it, (batch, seqlen, nheads)."""
    return lse.transpose(1, 2).contiguous()
