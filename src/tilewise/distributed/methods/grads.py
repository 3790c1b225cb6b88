"""Gradients of a rank's queries and its part of that of the sinks, which all ranks share; and how a
sink joins results of keys that were merged without it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...problem import INPUTS, Extras, Grads

Tensor = torch.Tensor
# The name of the optional tensor that has a gradient: methods support no bias
LEARNED = Grads._fields[INPUTS].removeprefix("d")


class QueryGrads(NamedTuple):
    """Gradients of a rank's queries, and this rank's part of that of the learned tensor."""

    dq: Tensor
    dlearned: Tensor | None

    @classmethod
    def of(cls, grads: Grads, rows: int | None = None) -> QueryGrads:
        """Takes the gradients of a call's first rows."""
        return cls(grads.dq[:, :rows], grads.dsinks)

    def with_keys(self, dk: Tensor, dv: Tensor, extras: Extras) -> Grads:
        """All gradients, each in the dtype of its tensor."""
        dsinks = self.dlearned
        if dsinks is not None and extras.sinks is not None:
            dsinks = dsinks.to(extras.sinks.dtype)
        return Grads(self.dq.to(dk.dtype), dk, dv=dv, dsinks=dsinks)


def joined(groups: list[QueryGrads]) -> QueryGrads:
    """Joins the gradients of groups of heads."""
    if len(groups) == 1:
        return groups[0]
    sinks = [x.dlearned for x in groups if x.dlearned is not None]
    return QueryGrads(torch.cat([x.dq for x in groups], 2), torch.cat(sinks) if sinks else None)


class LearnedSum:
    """The gradient of the learned tensor, added up from parts; None where there is no tensor."""

    def __init__(self, extras: Extras, dtype: torch.dtype | None = None) -> None:
        sinks = extras.sinks
        self.total = None if sinks is None else torch.zeros_like(sinks, dtype=dtype)

    def add(self, grads: Grads, heads: slice = slice(None)) -> None:
        """Adds a part, of some heads."""
        if self.total is not None and grads.dsinks is not None:
            self.total[heads].add_(grads.dsinks)


def join_sink(out: Tensor, lse: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
    """Joins the sinks to `out` and `lse` of all keys, in place; both may be -inf."""
    if extras.sinks is None:
        return out, lse
    whole = torch.logaddexp(lse, extras.sinks.to(lse.dtype).unsqueeze(1))
    out *= torch.exp(lse - whole).masked_fill(lse == -torch.inf, 0).transpose(1, 2).unsqueeze(-1)
    return out, whole


def gradient_of_sink(
    extras: Extras, dout: Tensor, *, out: Tensor, lse: Tensor, dlse: Tensor | None
) -> Tensor | None:
    """Computes -P delta, which is dS as dP is 0; a sink's P is exp(sink - LSE)."""
    if extras.sinks is None:
        return None
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    delta = delta if dlse is None else delta - dlse
    p = torch.exp(extras.sinks.to(lse.dtype).unsqueeze(1) - lse).masked_fill(lse == -torch.inf, 0)
    return -(p * delta).sum((0, 2))
