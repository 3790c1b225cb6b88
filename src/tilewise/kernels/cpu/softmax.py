"""What the softmax of all CPU paths has in common: caps of scores, sinks, and merges by LSE.

A sink is a key without a value: a softmax may start at m = sink, l = 1, or be joined by it at the
end. It scales out and adds to LSE. Its own P is exp(sink - LSE) and its dP is 0, so that its dS is
-P delta.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ...problem import Extras, Grads, Scalars
from ...tile.split_kv import SplitState, finish, fold, key_without_value
from .row_products import weighted_sums
from .tiles import Chunk

Tensor = torch.Tensor


def cap(s: Tensor, scalars: Scalars, factors: list[Tensor] | None = None) -> None:
    """softcap * tanh(s / softcap) in place; `factors` gets the derivative."""
    if scalars.softcap:
        s.div_(scalars.softcap).tanh_()
        if factors is not None:
            factors.append(1 - s * s)
        s.mul_(scalars.softcap)


def share(lse: Tensor, other: Tensor) -> Tensor:
    """exp(lse) / (exp(lse) + exp(other)): of a large lse, as exact as of a small one.

    exp(lse - log_add(lse, other)) would be off by the last bit of lse, which is no small part of 1.
    """
    return torch.exp(other - lse).add_(1).reciprocal_()


def log_add(x: Tensor, y: Tensor) -> Tensor:
    """log(exp(x) + exp(y)).

    torch.logaddexp and torch.sigmoid give a last bit that depends on where in memory an element
    lies (torch 2.13), so that a row's result would depend on its place in the batch.
    """
    larger = torch.maximum(x, y)
    larger = larger.masked_fill(larger == -math.inf, 0)
    return larger + torch.log(torch.exp(x - larger) + torch.exp(y - larger))


def merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Two results over disjoint keys, where each row sees keys of both."""
    out = torch.lerp(out1.to(lse1.dtype), out2.to(lse2.dtype), share(lse2, lse1).unsqueeze(-1))
    return out.to(out1.dtype), log_add(lse1, lse2)


def fold_spans(state: SplitState) -> SplitState:
    """The states of spans (spans, nheads_k, rows, ...) as one."""
    m_i = state.m_i.amax(0)
    shift = m_i.clamp_min(torch.finfo(m_i.dtype).min)  # -inf: the row sees no key
    spans, nheads_k, rows, _ = state.m_i.shape
    weights = (state.m_i - shift).exp_().view(spans, -1).T.contiguous()
    columns = torch.arange(weights.numel(), dtype=torch.int32, device="cpu")
    columns = columns.view(spans, -1).T.contiguous()
    x = torch.cat((state.acc_o, state.l_i), -1).flatten(0, 2)
    sums = weighted_sums(weights, x, columns=columns).view(nheads_k, rows, -1)
    return SplitState(sums[..., :-1], m_i, l_i=sums[..., -1:])


# sinks


def first_state(chunk: Chunk, q: Tensor) -> tuple[Tensor, Tensor]:
    """m and l of a block of queries (heads, group * rows, headdim) that has seen no key."""
    heads, nrows, _ = q.shape
    if chunk.extras.sinks is None:
        return q.new_full((heads, nrows, 1), -math.inf), q.new_zeros(heads, nrows, 1)
    m_i = chunk.extras.sinks.expand(-1, -1, nrows // chunk.group, -1).reshape(heads, nrows, 1)
    return m_i, (m_i > -math.inf).to(q.dtype)


def finish_tile(state: SplitState, extras: Extras, tokens: int) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of rows (group, tokens) after all keys; extras are those of heads."""
    if extras.sinks is not None:
        scores = extras.sinks.squeeze(-1).repeat_interleave(tokens, 1)
        state = fold(state, key_without_value(scores, like=state.acc_o))
    return finish(state)


def finish_rows(out: Tensor, lse: Tensor, extras: Extras, hidden: int) -> tuple[Tensor, Tensor]:
    """`out` and `lse` (batch, nheads, rows, ...) with the sinks, which join at the end, and behind
    as many rows as see no key.
    """
    sinks = None if extras.sinks is None else extras.sinks.to(lse.dtype).unsqueeze(1)
    if sinks is not None:
        out = (out * share(lse, sinks).unsqueeze(-1)).to(out.dtype)
    if hidden:
        out, lse = F.pad(out, (0, 0, hidden, 0)), F.pad(lse, (hidden, 0), value=-math.inf)
    return out, lse if sinks is None else log_add(lse, sinks)


def add_gradient(grads: Grads, extras: Extras, dout: Tensor, out: Tensor, lse: Tensor) -> None:
    """Adds the gradient of the sinks in rows (batch, nheads, rows, ...)."""
    if extras.sinks is not None and grads.dsinks is not None:
        p = torch.exp(extras.sinks.to(lse.dtype).unsqueeze(1) - lse)
        grads.dsinks.sub_((p * (dout * out).sum(-1)).sum((0, 2)))


def add_gradient_of_tile(
    grads: Grads, chunk: Chunk, delta: Tensor, lse: Tensor, log_l: Tensor | None
) -> None:
    """Adds the gradient of the sinks in a block of queries (heads, group * rows, 1)."""
    sinks = chunk.extras.sinks
    if sinks is not None and grads.dsinks is not None:
        by_head = (sinks.shape[0], chunk.group, -1, 1)
        s = sinks - lse.view(by_head)
        if log_l is not None:
            s = s - log_l.view(by_head)
        ds = torch.exp(s) * delta.view(by_head)
        target = grads.dsinks.unflatten(0, (-1, chunk.group))[chunk.heads]
        target.sub_(ds.sum((2, 3)).view((-1, *target.shape)).sum(0))
