"""Exact attention tile by tile in plain torch, forward and backward, with every feature.

For each block of queries, over the blocks of keys that its band touches:

    S  = score_mod(softcap * tanh(scale Q K^T / softcap)) - slope * |distance| + bias,
         hidden keys -inf
    m' = max(m, rowmax S),   alpha = exp(m - m'),   P = exp(S - m')
    l  = alpha l + rowsum P,   O = alpha O + P V            at the end O / l and LSE = m + log l

A sink is a key without a value: the softmax starts at m = sink, l = 1. Backward, P = exp(S - LSE):

    dV += P^T dO,   dP = dO V^T,   dS = P * (dP - delta),   delta = rowsum(dO * O) - dLSE
    dQ += scale dS K,   dK += dS^T (scale Q)

Of large scores LSE in fp32 has lost log l, and at -1e9, a mask as a bias, all of it: n keys would
have P = 1 each. There m, log l and O are computed once more, and P = exp((S - m) - log l) is the
forward's.

FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithms 1 and 2.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ...problem import Grads
from . import modify, tiles
from .dense import Dense, QueryRange, rows
from .tiles import Chunk, Workspace, bias_and_mask, block_m, chunks, load, store

Tensor = torch.Tensor
LARGE = 4096.0  # of an LSE in fp32 whose rounding is 2^-12, a relative error of P


class Rows(NamedTuple):
    """The softmax of a block of queries, (heads, group * rows, ...)."""

    out: Tensor
    m_i: Tensor
    log_l: Tensor


def forward(dense: Dense, out: Tensor, lse: Tensor) -> None:
    """Writes `out` (batch, nheads, seqlen_q, headdim_v) and `lse` (batch, nheads, seqlen_q)."""
    if out.numel() == 0:
        return
    workspace = Workspace()
    for x in chunks(dense, lse.dtype):
        queries, outs = x.by_group(dense.q), x.by_group(out)
        lses = x.by_group(lse.unsqueeze(-1))
        for r in rows(dense, block_m(dense)):
            q = load(queries, r, lse.dtype) * dense.scale
            block = _attend(dense, x, r, q, workspace)
            store(outs, r, block.out)
            store(lses, r, block.m_i + block.log_l)


def is_large(lse: Tensor) -> bool:
    """Whether a row has so large scores that P of the backward would not be that of the forward."""
    if not lse.numel():
        return False
    low, high = torch.aminmax(lse)
    if low == -math.inf:  # rows that see no key
        low = lse.masked_fill(lse == -math.inf, 0).amin()
    return bool(low < -LARGE or high > LARGE)


def _attend(dense: Dense, x: Chunk, r: QueryRange, q: Tensor, workspace: Workspace) -> Rows:
    """One block of scaled queries (heads, group * rows, headdim)."""
    heads, nrows, _ = q.shape
    m_i, l_i = q.new_full((heads, nrows, 1), -math.inf), q.new_zeros(heads, nrows, 1)
    if x.sinks is not None:
        m_i = x.sinks.expand(-1, -1, nrows // x.group, -1).reshape(heads, nrows, 1)
        l_i = (m_i > -math.inf).to(q.dtype)
    acc_o = q.new_zeros(heads, nrows, x.v.shape[2])
    for start in range(r.first, r.last, tiles.BLOCK_N):
        stop = min(start + tiles.BLOCK_N, r.last)
        s = workspace.matmul("s", q, x.k[:, start:stop].transpose(1, 2))
        if dense.softcap:
            s.div_(dense.softcap).tanh_().mul_(dense.softcap)
        place = None
        if dense.more is not None:
            place = modify.place_of(dense, x, r, start, stop)
            modify.apply_score_mod(s, dense, place)
            modify.apply_bias_and_mask(s, dense, place)
        bias_and_mask(s, dense, x, r, start, stop)
        m_new = torch.maximum(m_i, s.amax(-1, keepdim=True))
        shift = m_new.masked_fill(m_new == -math.inf, 0)  # the row has seen no key yet
        p = s.sub_(shift).exp_()
        alpha = m_i.sub(shift).exp_()
        l_i = l_i * alpha + p.sum(-1, keepdim=True)
        if place is not None:
            p = modify.drop(p, dense, place)
        acc_o.mul_(alpha).baddbmm_(p, x.v[:, start:stop])
        m_i = m_new
    acc_o.div_(l_i.masked_fill(l_i == 0, 1))
    return Rows(acc_o, m_i, l_i.log())


def backward(
    dense: Dense, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, grads: Grads
) -> None:
    """Writes dq, dk and dv, in the order of `dense`, and adds to dsinks and dbias.

    The other tensors are (batch, nheads, seqlen_q, ...) too.
    """
    if dense.q.numel() == 0:
        for grad in grads[:3]:
            grad.zero_()
        return
    workspace, dtype, has_large = Workspace(), lse.dtype, is_large(lse)
    for x in chunks(dense, dtype):
        queries, dqs, douts, outs = (x.by_group(t) for t in (dense.q, grads.dq, dout, out))
        lses = x.by_group(lse.unsqueeze(-1))
        dlses = None if dlse is None else x.by_group(dlse.unsqueeze(-1))
        dk, dv = (t.new_zeros(t.shape) for t in (x.k, x.v))
        for r in rows(dense, block_m(dense)):
            q, do = load(queries, r, dtype) * dense.scale, load(douts, r, dtype)
            out_rows, row_lse, log_l = load(outs, r, dtype), load(lses, r, dtype), None
            if has_large:
                out_rows, row_lse, log_l = _attend(dense, x, r, q, workspace)
            delta = (do * out_rows).sum(-1, keepdim=True)
            if dlses is not None:
                delta -= load(dlses, r, dtype)
            row_lse = row_lse.masked_fill(row_lse == -math.inf, math.inf)  # P is 0 in such a row
            block = Given(q, do, delta, row_lse, log_l)
            targets = dk, dv, grads.dbias
            store(dqs, r, _attend_backward(dense, x, r, block, targets, workspace))
            if dense.sinks is not None:
                _add_dsinks(grads.dsinks, x, r, block)
        for grad, acc in ((grads.dk, dk), (grads.dv, dv)):
            target = grad[x.batch, x.heads]
            target.copy_(acc.view(target.shape))


class Given(NamedTuple):
    """What the backward of one block of queries is given, (heads, group * rows, ...)."""

    q: Tensor  # scaled
    do: Tensor
    delta: Tensor
    lse: Tensor
    log_l: Tensor | None  # where `lse` is m alone


def _attend_backward(
    dense: Dense,
    x: Chunk,
    r: QueryRange,
    given: Given,
    targets: tuple[Tensor, Tensor, Tensor | None],
    workspace: Workspace,
) -> Tensor:
    """dQ of one block of queries; adds its share to the targets, dk, dv and dbias."""
    q, do, delta, lse, log_l = given
    dk, dv, dbias = targets
    dq = torch.zeros_like(q)
    for start in range(r.first, r.last, tiles.BLOCK_N):
        stop = min(start + tiles.BLOCK_N, r.last)
        k, v = x.k[:, start:stop], x.v[:, start:stop]
        s = workspace.matmul("s", q, k.transpose(1, 2))
        slope = None
        if dense.softcap:
            tanh = s.div_(dense.softcap).tanh_()
            slope = 1 - tanh * tanh
            s.mul_(dense.softcap)
        place, derivative, slopes = None, None, []
        if dense.more is not None:
            place = modify.place_of(dense, x, r, start, stop)
            slopes = modify.slopes_of(s, dense, place)
            derivative = modify.apply_score_mod(s, dense, place)
            modify.apply_bias_and_mask(s, dense, place)
        bias_and_mask(s, dense, x, r, start, stop)
        s.sub_(lse)
        p = (s if log_l is None else s.sub_(log_l)).exp_()
        dp = workspace.matmul("dp", do, v.transpose(1, 2))
        dropped = p
        if place is not None:
            dropped, dp = modify.drop(p, dense, place), modify.drop(dp, dense, place)
        dv[:, start:stop].baddbmm_(dropped.transpose(1, 2), do)
        ds = dp.sub_(delta).mul_(p)
        if dbias is not None:
            modify.add_dbias(dbias, ds, dense, place)
        if slopes:
            modify.add_captured(ds, slopes, dense, place)
        if derivative is not None:
            ds.mul_(derivative)
        if slope is not None:
            ds.mul_(slope)
        dk[:, start:stop].baddbmm_(ds.transpose(1, 2), q)
        dq.baddbmm_(ds, k)
    return dq.mul_(dense.scale)


def _add_dsinks(dsinks: Tensor, x: Chunk, r: QueryRange, given: Given) -> None:
    """The sink's P is exp(sink - LSE) and its dP is 0, so its dS is -P delta."""
    by_head = (x.sinks.shape[0], x.group, r.stop - r.start, 1)
    s = x.sinks - given.lse.view(by_head)
    if given.log_l is not None:
        s = s - given.log_l.view(by_head)
    ds = torch.exp(s) * given.delta.view(by_head)
    target = dsinks.unflatten(0, (-1, x.group))[x.heads]
    target.sub_(ds.sum((2, 3)).view(-1, *target.shape).sum(0))
