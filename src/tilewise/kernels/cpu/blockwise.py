"""Exact attention tile by tile in plain torch, forward and backward, with every feature.

For each block of queries, over the blocks of keys that its band touches:

    S  = score_mod(cap(scale Q K^T)) - slope * |distance| + bias,
         hidden keys -inf
    m' = max(m, rowmax S),   alpha = exp(m - m'),   P = exp(S - m')
    l  = alpha l + rowsum P,   O = alpha O + P V            at the end O / l and LSE = m + log l

It starts at m = -inf, l = 0, or as `softmax.first_state` says. Backward, P = exp(S - LSE):

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
from . import modify
from .dense import Dense, QueryRange, rows
from .modify import TileIndices
from .softmax import add_gradient_of_tile, cap, first_state
from .tiles import Chunk, Workspace, bias_and_mask, block_m, chunks, key_blocks, load, store

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
    for chunk in chunks(dense, lse.dtype):
        queries, outs = chunk.by_group(dense.q), chunk.by_group(out)
        lses = chunk.by_group(lse.unsqueeze(-1))
        for block in rows(dense, block_m(dense)):
            q = load(queries, block, dtype=lse.dtype) * dense.scalars.scale
            result = _attend(dense, chunk, block=block, q=q, workspace=workspace)
            store(outs, block, tile=result.out)
            store(lses, block, tile=result.m_i + result.log_l)


def is_large(lse: Tensor) -> bool:
    """Whether a row has so large scores that P of the backward would not be that of the forward."""
    if not lse.numel():
        return False
    low, high = torch.aminmax(lse)
    if low == -math.inf:  # rows that see no key
        low = lse.masked_fill(lse == -math.inf, 0).amin()
    return bool(low < -LARGE or high > LARGE)


def _attend(dense: Dense, chunk: Chunk, block: QueryRange, q: Tensor, workspace: Workspace) -> Rows:
    """One block of scaled queries (heads, group * rows, headdim)."""
    m_i, l_i = first_state(chunk, q)
    acc_o = q.new_zeros((*q.shape[:2], chunk.v.shape[2]))
    highest = torch.full_like(m_i, -math.inf)  # without the sink
    for keys in key_blocks(block):
        s, indices, *_ = scores(dense, chunk, block=block, q=q, keys=keys, workspace=workspace)
        highest = torch.maximum(highest, s.amax(-1, keepdim=True))
        m_new = torch.maximum(m_i, highest)
        shift = m_new.masked_fill(m_new == -math.inf, 0)  # the row has seen no key yet
        p = s.sub_(shift).exp_()
        alpha = m_i.sub(shift).exp_()
        l_i = l_i * alpha + p.sum(-1, keepdim=True)
        if indices is not None:
            p = modify.drop(p, indices)
        acc_o.mul_(alpha).baddbmm_(p, chunk.v[:, keys])
        m_i = m_new
    acc_o.div_(l_i.masked_fill_(l_i == 0, 1))  # a row without keys, whose m is -inf
    acc_o.masked_fill_(highest == -math.inf, 0)  # 0 times what V holds may be NaN
    return Rows(acc_o, m_i, log_l=l_i.log())


class Scores(NamedTuple):
    """The scores of one tile, and what their gradient needs."""

    s: Tensor
    indices: TileIndices | None  # of a call with modifiers
    factors: list[Tensor]  # the derivative by Q K^T, as a product
    slopes: list[Tensor]  # the derivatives by what the score function reads, at each target


def scores(
    dense: Dense,
    chunk: Chunk,
    block: QueryRange,
    q: Tensor,
    keys: slice,
    workspace: Workspace,
    has_grads: bool = False,
) -> Scores:
    """Scores of scaled queries (heads, group * rows, headdim) and a block of keys."""
    s = workspace.matmul("s", q, chunk.k[:, keys].transpose(1, 2))
    indices, factors, slopes = None, [], []
    cap(s, dense.scalars, factors if has_grads else None)
    if dense.modifiers is not None:
        indices = modify.indices_of(dense, chunk, block=block, keys=keys)
        if has_grads:
            slopes = modify.slopes_of(s, indices)
            factors = modify.derivative_of(s, indices) + factors
        modify.apply(s, indices)
    bias_and_mask(s, dense, chunk=chunk, block=block, keys=keys)
    return Scores(s, indices, factors=factors, slopes=slopes)


def backward(
    dense: Dense, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, grads: Grads
) -> None:
    """Writes dq, dk and dv, in the order of `dense`, and adds to the optional gradients.

    The other tensors are (batch, nheads, seqlen_q, ...) too.
    """
    if dense.q.numel() == 0:
        for grad in grads[:3]:
            grad.zero_()
        return
    workspace, dtype, has_large = Workspace(), lse.dtype, is_large(lse)
    for chunk in chunks(dense, dtype):
        queries, dqs, douts, outs = (chunk.by_group(t) for t in (dense.q, grads.dq, dout, out))
        lses = chunk.by_group(lse.unsqueeze(-1))
        dlses = None if dlse is None else chunk.by_group(dlse.unsqueeze(-1))
        sums = grads._replace(
            dk=chunk.k.new_zeros(chunk.k.shape), dv=chunk.v.new_zeros(chunk.v.shape)
        )
        for block in rows(dense, block_m(dense)):
            do, out_rows, row_lse = (load(t, block, dtype=dtype) for t in (douts, outs, lses))
            q, log_l = load(queries, block, dtype=dtype) * dense.scalars.scale, None
            if has_large:
                again = _attend(dense, chunk, block=block, q=q, workspace=workspace)
                out_rows, row_lse, log_l = again
            delta = (do * out_rows).sum(-1, keepdim=True)
            if dlses is not None:
                delta -= load(dlses, block, dtype=dtype)
            row_lse = row_lse.masked_fill(row_lse == -math.inf, math.inf)  # P is 0 in such a row
            inputs = QueryRows(block, q, do=do, delta=delta, lse=row_lse, log_l=log_l)
            dq = _attend_backward(dense, chunk, inputs=inputs, sums=sums, workspace=workspace)
            store(dqs, block, tile=dq)
            add_gradient_of_tile(grads, chunk, delta=delta, lse=row_lse, log_l=log_l)
        for grad, acc in ((grads.dk, sums.dk), (grads.dv, sums.dv)):
            target = grad[chunk.batch, chunk.heads]
            target.copy_(acc.view(target.shape))


class QueryRows(NamedTuple):
    """A block of queries, and what the backward reads of it, (heads, group * rows, ...)."""

    block: QueryRange
    q: Tensor  # scaled
    do: Tensor
    delta: Tensor
    lse: Tensor
    log_l: Tensor | None  # where `lse` is m alone


def _attend_backward(
    dense: Dense, chunk: Chunk, inputs: QueryRows, sums: Grads, workspace: Workspace
) -> Tensor:
    """dQ of one block of queries; adds its share to the sums of dk, dv and dbias."""
    block, q, do, delta, lse, log_l = inputs
    dk, dv, dbias = sums.dk, sums.dv, sums.dbias
    dq = torch.zeros_like(q)
    for keys in key_blocks(block):
        tile = scores(
            dense, chunk, block=block, q=q, keys=keys, workspace=workspace, has_grads=True
        )
        s = tile.s.sub_(lse)
        p = (s if log_l is None else s.sub_(log_l)).exp_()
        dp = workspace.matmul("dp", do, chunk.v[:, keys].transpose(1, 2))
        dropped = p
        if tile.indices is not None:
            dropped, dp = modify.drop(p, tile.indices), modify.drop(dp, tile.indices)
        dv[:, keys].baddbmm_(dropped.transpose(1, 2), do)
        ds = dp.sub_(delta).mul_(p)
        if dbias is not None:
            target = modify.of_bias(dbias, tile.indices)
            target.add_(tile.indices.view(ds).sum_to_size(target.shape))
        if tile.slopes:
            modify.add_captured(ds, tile.slopes, tile=tile.indices)
        for factor in tile.factors:
            ds.mul_(factor)
        dk[:, keys].baddbmm_(ds.transpose(1, 2), q)
        dq.baddbmm_(ds, chunk.k[:, keys])
    return dq.mul_(dense.scalars.scale)
