"""Attention written from its formulas, sequence by sequence, for the fuzzer alone. It shares no
code with the library, not even a constant, so that no error can be in both.

For one sequence and one head, i a query and j a key, both counted from 0 in their sequence:

    s  = scale * q_i . k_j
    s  = cap * tanh(s / cap)                                        softcap
    s  = f(s, b, h, i, j)                                           score function
    s  = s - slope * |i + diagonal - j|                             ALiBi
    s  = s + bias
    hidden unless  diagonal + i - left <= j <= diagonal + i + right, and the mask says so
    lse = log(sum_j exp s + exp sink),   p = exp(s - lse),   out = sum_j p v_j
    dropout: p where the pair is kept times 256 / (256 - threshold), else 0

with diagonal = keys - queries (bottom right) or 0 (top left). Gradients are autograd's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from .philox import kept, threshold

Tensor = torch.Tensor


class Span(NamedTuple):
    """A sequence: its number, and which rows of all queries and of all keys are its own."""

    number: int
    first_q: int
    queries: int
    first_k: int
    keys: int


class Terms(NamedTuple):
    """What a call asks beside tensors."""

    scale: float
    top_left: bool = False
    left: int | None = None
    right: int | None = None
    softcap: float | None = None
    score: Callable | None = None  # (captured, s, b, h, i, j) -> s
    mask: Callable | None = None  # (captured, b, h, i, j) -> bool
    dropout_p: float = 0.0
    rng: Tensor | None = None


class Steps(NamedTuple):
    """What lies between inputs and results of a sequence, for those who measure."""

    span: Span
    products: Tensor  # scale * q k, (nheads, queries, keys)
    scores: Tensor  # what the softmax takes, before anything is hidden
    sinks: Tensor | None  # (nheads, queries)
    weights: Tensor  # p, dropped
    seen: Tensor  # bool, as scores


class Result(NamedTuple):
    out: Tensor  # (rows, nheads, headdim_v)
    lse: Tensor  # (nheads, rows)
    steps: list[Steps]


def attention(tensors: dict[str, Tensor], spans: list[Span], terms: Terms) -> Result:
    """q, k and v are (rows, heads, headdim), rows of all sequences end to end; `tensors` may have
    slopes (nheads,) or (batch, nheads), sinks, bias and `captured.` ones.

    In fp64 it is the oracle. In another dtype it is plain code of that precision: sums in fp32, and
    p and the gradient of s rounded to the dtype, since matrix products take them.
    """
    dtype = tensors["q"].dtype
    exact = torch.promote_types(dtype, torch.float32)
    wide = {name: x.to(exact) if x.is_floating_point() else x for name, x in tensors.items()}
    q, k, v = wide["q"], wide["k"], wide["v"]
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf)
    steps = []
    for span in spans:
        rows = slice(span.first_q, span.first_q + span.queries)
        columns = slice(span.first_k, span.first_k + span.keys)
        found, lse_found, step = _sequence(
            q[rows].transpose(0, 1),
            *(_per_query_head(x[columns], q.shape[1]) for x in (k, v)),
            *(span, terms, wide, dtype),
        )
        out[rows], lse[:, rows] = found.transpose(0, 1), lse_found
        steps.append(step)
    return Result(out.to(dtype), lse, steps)


def _sequence(q, k, v, span: Span, terms: Terms, tensors: dict, dtype) -> tuple:
    """out and lse of one sequence: (nheads, queries, headdim_v) and (nheads, queries)."""
    i = torch.arange(span.queries, device=q.device).view(1, -1, 1)
    j = torch.arange(span.keys, device=q.device).view(1, 1, -1)
    h = torch.arange(q.shape[0], device=q.device).view(-1, 1, 1)
    captured = {n.partition(".")[2]: x for n, x in tensors.items() if n.startswith("captured.")}
    diagonal = 0 if terms.top_left else span.keys - span.queries
    products = _RoundGradient.apply(terms.scale * (q @ k.transpose(1, 2)), dtype)
    s = products
    if terms.softcap:
        s = terms.softcap * torch.tanh(s / terms.softcap)
    if terms.score is not None:
        s = terms.score(captured, s, span.number, h, i, j)
    if "slopes" in tensors:
        slopes = tensors["slopes"]
        slopes = slopes[span.number] if slopes.dim() == 2 else slopes
        s = s - slopes.view(-1, 1, 1) * (i + diagonal - j).abs()
    if "bias" in tensors:
        bias = tensors["bias"]
        bias = bias[span.number if bias.shape[0] > 1 else 0]
        s = s + (bias[..., : span.keys] if bias.shape[2] > 1 else bias)
    seen = torch.ones_like(s, dtype=torch.bool)
    if terms.left is not None:
        seen = seen & (j >= i + diagonal - terms.left)
    if terms.right is not None:
        seen = seen & (j <= i + diagonal + terms.right)
    if terms.mask is not None:
        seen = seen & terms.mask(captured, span.number, h, i, j)
    seen = seen & (s > -math.inf)
    sinks = None
    if "sinks" in tensors:
        sinks = tensors["sinks"].view(-1, 1).expand(-1, span.queries) * 1.0
    p, lse = _softmax(s.masked_fill(~seen, -math.inf), sinks)
    if terms.dropout_p:
        stays = kept(terms.rng, span.number, h, i, j, terms.dropout_p)
        p = torch.where(stays, p * (256 / (256 - threshold(terms.dropout_p))), 0.0)
    step = Steps(span, products, s, sinks, p, seen)
    return _Round.apply(p, dtype) @ v, lse, step


def _softmax(s: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """p and lse; a row of nothing has 0 and -inf, and gradients of 0."""
    if sinks is not None:
        s = torch.cat([s, sinks.unsqueeze(2)], 2)
    if s.shape[2] == 0:
        return s, s.new_full(s.shape[:2], -math.inf)
    largest = s.detach().amax(2, keepdim=True)
    largest = torch.where(largest > -math.inf, largest, 0.0)
    e = torch.exp(s - largest)
    total = e.sum(2, keepdim=True)
    nothing = total == 0
    total = torch.where(nothing, 1.0, total)
    lse = torch.where(nothing, -math.inf, largest + torch.log(total))
    p = e / total
    return (p if sinks is None else p[..., :-1]), lse.squeeze(2)


def _per_query_head(x: Tensor, nheads: int) -> Tensor:
    """(rows, nheads_k, headdim) as (nheads, rows, headdim): head h reads head h // group."""
    return x.transpose(0, 1)[torch.arange(nheads, device=x.device) // (nheads // x.shape[1])]


class _Round(torch.autograd.Function):
    """Rounds to a dtype on the way forward."""

    @staticmethod
    def forward(ctx, x, dtype):
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _RoundGradient(torch.autograd.Function):
    """Rounds to a dtype on the way back."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).to(grad.dtype), None
