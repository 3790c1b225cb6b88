"""Attention by its definition, in plain torch: the oracle that every kernel is tested against.

    S   = scale * Q K^T                   (batch, nheads, seqlen_q, seqlen_k)
    S   = softcap * tanh(S / softcap)     if there is a softcap
    S   = score_mod(S, b, h, q, k)        if there is a score function
    S   = S - slope * |distance|          if there is ALiBi
    S   = S + bias                        if there is a bias
    S   = -inf where the mask hides the key
    LSE = log(sum_j exp(S_j))             with a sink as one more logit in the sum
    P   = exp(S - LSE),   O = P V         with dropout, P where it is kept / (1 - p), else 0

It stores S, so its memory grows with seqlen_q * seqlen_k: that is the one thing the kernels do
better (FlashAttention, Dao et al. 2022, arXiv 2205.14135). All else is here, on any device, in any
dtype up to fp64, and autograd differentiates it as often as you like.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Never

import torch

from .errors import ArgumentError
from .frontend.cached import check_cached, is_cached
from .frontend.call import check
from .frontend.checks import FLOATS, check_kind, in_order, sizes_of
from .frontend.scalars import Numbers, Window, as_int, check_flag
from .frontend.values import check_values
from .kernels.common.cached import Cached, lse_by_query
from .kernels.common.outputs import empty_lse
from .keywords import refuses_others, unexpected
from .mods import masks, scores
from .mods.block_mask import BlockMask
from .mods.evaluation import evaluate
from .mods.flatten import check_block_mask, modifiers_of
from .problem import OPEN, Extras, Scalars
from .tile import predicates
from .tile.dropout_numbers import check_dropout, draw_rng, factor_of, threshold_of
from .tile.paging import batch_of, gather, lengths_of, queries_of
from .tile.quantize import by_row, dequantize, of_sequence
from .tile.random_bytes import keep

Tensor = torch.Tensor


@refuses_others("tilewise.attention_reference")
def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seqused_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    bias: Tensor | None = None,
    mask_mod: masks.Predicate | None = None,
    block_mask: BlockMask | None = None,
    score_mod: scores.ScoreFunction | None = None,
    dropout_p: float = 0.0,
    dropout_rng: Tensor | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
    upcast: bool = True,
    first: tuple[int, int, int] = (0, 0, 0),
    page_table: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """`tilewise.attention` in plain torch, with the scores in memory and autograd's own gradients.

    Example:
        >>> import torch, tilewise
        >>> q, k, v = torch.randn(3, 2, 16, 4, 32, dtype=torch.float64).unbind(0)
        >>> out, lse = tilewise.attention_reference(q, k, v, causal=True, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 16, 4, 32]), torch.Size([2, 4, 16]))
        >>> torch.allclose(out[:, 0], v[:, 0])                  # the first query attends to one key
        True

    The other arguments are those of `tilewise.attention`; any dtype that torch multiplies.

    Args:
        upcast: matrix products in fp32 (fp64 for fp64), as the softmax and lse always are. Without
            it they run in the dtype of q, and S and P are rounded to it: this is the error of plain
            code in half precision, on which the error budget of kernels is based.
        first: (batch, head, query), the offset of q in a larger call: masks, score functions and
            dropout count from it, so that a call too large to store is computed in parts. Bands and
            ALiBi do not use it.
        page_table: int32 (batch, pages). The keys of a KV cache are gathered, sequence by sequence.
        k_descale: scale of an 8-bit cache, which is dequantised before the matmuls.
        v_descale: as k_descale, for v.

    Returns:
        out, and with `return_lse` lse, as `tilewise.attention`.

    Raises:
        ArgumentError: an argument is wrong.

    FlashAttention (Dao et al. 2022, arXiv 2205.14135), section 2.2.
    """
    if unknown:
        raise unexpected("tilewise.attention_reference", unknown)
    if not isinstance(first, (tuple, list)) or len(first) != 3 or None in map(as_int, first):
        raise ArgumentError(f"first={first!r}: it must be three ints, (batch, head, query)")
    upcast = check_flag("upcast", upcast)
    numbers = Numbers(scale, softcap, dropout_p, causal=causal, window=window)
    is_scaled = k_descale is not None or v_descale is not None
    if is_scaled or is_cached(k, page_table, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k):
        extras = Extras(alibi_slopes, sinks, seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q)
        cached = Cached(
            q, k, v, page_table, extras=extras, k_descale=k_descale, v_descale=v_descale
        )
        cached = check_cached(cached, numbers, mask_mod=mask_mod, layout=layout)
        out, lse = _attend_cached(cached, mask_mod, upcast=upcast)
        out = out.transpose(1, 2) if layout == "bhsd" else out
        return (out, lse) if return_lse else out
    return_lse = check_flag("return_lse", return_lse)
    is_packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    q, k, v = in_order(q, k, v=v, layout=layout, is_packed=is_packed)
    if check_dropout(dropout_p) and dropout_rng is None:
        dropout_rng = draw_rng(q.device)
    extras = Extras(alibi_slopes, sinks, seqused_k, seqused_q, cu_seqlens_q, cu_seqlens_k, bias)
    extras = extras._replace(dropout_rng=dropout_rng if dropout_p else None)
    slopes = alibi_slopes.detach() if isinstance(alibi_slopes, Tensor) else alibi_slopes
    with_slopes = extras._replace(alibi_slopes=slopes)  # here they have a gradient
    checked = check(q, k, v, extras=with_slopes, numbers=numbers, deterministic=False)
    check_values(q, k, extras=extras)
    align, scalars = checked.problem.align, checked.scalars
    sizes = sizes_of(q, k, cu_seqlens=cu_seqlens_q)
    has_band = (scalars.left, scalars.right) != (OPEN, OPEN)
    block_mask = check_block_mask(block_mask, sizes, is_packed=is_packed, has_band=has_band)
    modifiers_of(mask_mod, score_mod, block_mask=block_mask, sizes=sizes)
    mask_mod = mask_mod if block_mask is None else block_mask.mask
    options = _Options(align, extras, scalars, mask_mod, score_mod, upcast=upcast, first=first)
    attend = _attend_packed if is_packed else _attend
    out, lse = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), options)
    if layout == "bshd":
        out = out.transpose(1, 2)
    if is_packed:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out


class _Options(NamedTuple):
    """The options of one call."""

    align: str
    extras: Extras
    scalars: Scalars
    mask_mod: masks.Predicate | None
    score_mod: scores.ScoreFunction | None
    upcast: bool
    first: tuple[int, int, int]  # batch (of packed ones, sequence), head and query


def _attend_cached(
    cached: Cached, mask_mod: masks.Predicate | None, upcast: bool
) -> tuple[Tensor, Tensor]:
    """Sequences with a KV cache, one by one, from the position of their first query on."""
    q, extras, table = cached.q, cached.extras, cached.page_table
    cu_seqlens_q = extras.cu_seqlens_q
    out = q.new_zeros((*q.shape[:-1], cached.v.shape[3]))
    lse = empty_lse(q).fill_(-math.inf)
    lengths = lengths_of(cached.k, table, extras.seqused_k, batch_of(q, cu_seqlens_q))
    by_sequence = [queries_of(x, cu_seqlens_q) for x in (q, out, lse_by_query(lse))]
    for b, length in enumerate(lengths):
        queries, out_rows, lse_rows = (x[b] for x in by_sequence)
        k, v = _keys_and_values(cached, b, length=length, upcast=upcast)
        slopes = extras.alibi_slopes
        slopes = slopes if slopes is None or slopes.dim() == 1 else slopes[b : b + 1]
        first = b, 0, length - queries.shape[0]
        one = Extras(slopes, extras.sinks)
        options = _Options("bottom_right", one, cached.scalars, mask_mod, None, upcast, first=first)
        q_rows = queries.unsqueeze(0).transpose(1, 2)
        out_row, lse_row = _attend(q_rows, k.transpose(1, 2), v=v.transpose(1, 2), options=options)
        out_rows.copy_(out_row[0].transpose(0, 1))
        lse_rows.copy_(lse_row[0].T)
    return out, lse


def _keys_and_values(cached: Cached, row: int, length: int, upcast: bool) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence, (1, length, nheads_k, ...), with the products' dtype."""
    table, dtype = cached.page_table, cached.q.dtype
    keys_and_values = []
    for x, scale in ((cached.k, cached.k_descale), (cached.v, cached.v_descale)):
        rows = gather(x, table, row=row, first=0, last=length)
        if x.dtype != dtype:
            if scale is not None and by_row(scale):
                scale = gather(scale, table, row=row, first=0, last=length)
            elif scale is not None:
                scale = of_sequence(scale, row)
            exact = torch.promote_types(dtype, torch.float32) if upcast else dtype
            rows = dequantize(rows, scale, dtype=exact)
        keys_and_values.append(rows.unsqueeze(0))
    return keys_and_values[0], keys_and_values[1]


def _attend_packed(q: Tensor, k: Tensor, v: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    """Packed sequences, one by one; rows that are not used have out 0 and lse -inf."""
    outs, lses = [], []
    sequence, head, query = options.first
    for i, (queries, unused, keys, extras) in enumerate(_sequences(options.extras)):
        alone = options._replace(extras=extras, first=(sequence + i, head, query))
        out, lse = _attend(q[:, :, queries], k[:, :, keys], v=v[:, :, keys], options=alone)
        outs.append(torch.nn.functional.pad(out, (0, 0, 0, unused)))
        lses.append(torch.nn.functional.pad(lse, (0, unused), value=-math.inf))
    if not outs:
        return q.new_zeros((*q.shape[:3], v.shape[3])), q.new_full(q.shape[:3], -math.inf)
    out, lse = torch.cat(outs, 2), torch.cat(lses, 2)
    tail = q.shape[2] - out.shape[2]
    out = torch.nn.functional.pad(out, (0, 0, 0, tail))
    return out, torch.nn.functional.pad(lse, (0, tail), value=-math.inf)


def _sequences(extras: Extras):
    """Each sequence's rows of q, how many more it has that are not used, its rows of k, and its
    extras.
    """
    slopes = extras.alibi_slopes
    rows = zip(
        _rows(extras.cu_seqlens_q, extras.seqused_q), _rows(extras.cu_seqlens_k, extras.seqused_k)
    )
    for i, ((queries, stop), (keys, _)) in enumerate(rows):
        one = slopes if slopes is None or slopes.dim() == 1 else slopes[i : i + 1]
        alone = Extras(one, extras.sinks, dropout_rng=extras.dropout_rng)
        yield queries, stop - queries.stop, keys, alone


def _rows(cu_seqlens: Tensor | None, used: Tensor | None) -> list[tuple[slice, int]]:
    """The rows that each sequence uses, and where all of its rows end."""
    ends = [] if cu_seqlens is None else cu_seqlens.tolist()
    stops = ends[1:] if used is None else [a + n for a, n in zip(ends, used.tolist())]
    return [(slice(a, b), c) for a, b, c in zip(ends, stops, ends[1:])]


def _attend(
    q: Tensor,  # (batch, nheads, seqlen_q, headdim)
    k: Tensor,
    v: Tensor,
    options: _Options,
) -> tuple[Tensor, Tensor]:
    extras, scalars = options.extras, options.scalars
    dtype, exact = q.dtype, torch.promote_types(q.dtype, torch.float32)
    if options.upcast:
        q, k, v = q.to(exact), k.to(exact), v.to(exact)
    q_idx, k_idx = _arange(q).unsqueeze(-1), _arange(k)
    seqlen_k = k.shape[2]
    if extras.seqused_k is not None:
        seqlen_k = extras.seqused_k.view(-1, 1, 1, 1)
        padding = ~predicates.is_key(k_idx.unsqueeze(-1), seqlen_k)
        # Padding may hold anything, and 0 * NaN is NaN.
        k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
    diagonal = seqlen_k - q.shape[2] if options.align == "bottom_right" else 0
    first_b, first_h, first_q = options.first
    b = torch.arange(q.shape[0], device=q.device).view(-1, 1, 1, 1) + first_b
    h = torch.arange(q.shape[1], device=q.device).view(-1, 1, 1) + first_h
    indices = dict(q_idx=q_idx + first_q, k_idx=k_idx)
    s = scalars.scale * _matmul(q, k.transpose(2, 3)).to(exact)
    if scalars.softcap:
        s = scalars.softcap * torch.tanh(s / scalars.softcap)
    if options.score_mod is not None:
        score_mod = scores.score(options.score_mod)
        s = score_mod(s, b, h, q_idx + first_q, k_idx).to(exact).expand_as(s)
    if extras.alibi_slopes is not None:
        slopes = extras.alibi_slopes.to(exact)[..., None, None]
        s = s - slopes * (q_idx + diagonal - k_idx).abs()
    if extras.bias is not None:
        s = s + extras.bias.to(exact)
    visible = _visible(q_idx, k_idx, seqlen_k, diagonal, scalars.left, scalars.right)
    if options.mask_mod is not None:
        mask = masks.mask(options.mask_mod)
        visible = visible & evaluate(mask.expr, b, h=h, tensors=mask.tensors, **indices)
    s = s.masked_fill(~visible, -math.inf)
    p, lse = _softmax(s, extras.sinks)
    if extras.dropout_rng is not None:
        threshold = threshold_of(scalars.dropout_p)
        is_kept = keep(extras.dropout_rng, b, head=h, threshold=threshold, **indices)
        p = torch.where(is_kept, p * factor_of(threshold), 0)
    is_empty = (s == -math.inf).all(-1, keepdim=True)  # 0 times what V holds may be NaN
    return _matmul(p.to(v.dtype), v).to(dtype).masked_fill(is_empty, 0), lse


def _visible(q_idx: Tensor, k_idx: Tensor, seqlen_k, diagonal, left: int, right: int) -> Tensor:
    """Whether the mask keeps each (query, key) pair."""
    visible = predicates.is_key(k_idx, seqlen_k)
    if left >= 0:
        visible = visible & predicates.within_left(q_idx, k_idx, diagonal=diagonal, left=left)
    if right >= 0:
        visible = visible & predicates.within_right(q_idx, k_idx, diagonal=diagonal, right=right)
    return visible


def _softmax(s: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """P and LSE of each row, with 0 and -inf for a row of -inf, whose gradients are 0 and not NaN.

    The sink is one more column, dropped again at the end; without sinks it is -inf, of no weight.
    """
    batch, nheads, seqlen_q, _ = s.shape
    sink = s.new_full((nheads,), -math.inf) if sinks is None else sinks.to(s.dtype)
    s = torch.cat([s, sink[:, None, None].expand(batch, nheads, seqlen_q, 1)], dim=-1)
    row_max = s.detach().amax(-1, keepdim=True)
    row_max = row_max.masked_fill(row_max == -math.inf, 0)
    p = torch.exp(s - row_max)
    row_sum = p.sum(-1, keepdim=True)
    is_empty = row_sum == 0
    row_sum = row_sum.masked_fill(is_empty, 1)
    lse = (row_max + torch.log(row_sum)).masked_fill(is_empty, -math.inf)
    return (p / row_sum)[..., :-1], lse.squeeze(-1)


def _matmul(x: Tensor, shared: Tensor) -> Tensor:
    """x @ shared by head, where each head of `shared` serves a group of heads of x (GQA)."""
    groups = x.unflatten(1, (shared.shape[1], -1))
    return torch.matmul(groups, shared.unsqueeze(2)).flatten(1, 2)


def _arange(x: Tensor) -> Tensor:
    """The positions in a (batch, nheads, seqlen, headdim) tensor."""
    return torch.arange(x.shape[2], device=x.device)


def merge_states(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Merges attention over two disjoint sets of keys into attention over their union.

    Example:
        >>> import torch, tilewise
        >>> q, k, v = torch.randn(3, 2, 16, 4, 32).unbind(0)
        >>> left = tilewise.attention_reference(q, k[:, :5], v[:, :5], return_lse=True)
        >>> right = tilewise.attention_reference(q, k[:, 5:], v[:, 5:], return_lse=True)
        >>> out, lse = tilewise.merge_states(*left, *right)
        >>> torch.allclose(out, tilewise.attention_reference(q, k, v), atol=1e-5)
        True

    Merge results without sinks, and add the sink once, at the end.

    Args:
        out1: (..., seqlen, nheads, headdim_v), batched, or packed without the first dimension.
        lse1: (..., nheads, seqlen), natural log, float.
        out2: shaped as out1.
        lse2: shaped as lse1.

    Returns:
        (out, lse), computed in fp32, or in fp64 if an lse is fp64, out in the dtype of out1,
        differentiable in all four. A part whose lse is -inf (no key) may hold any values in its
        out, also NaN; where both are -inf, lse is -inf and out 0.

    Raises:
        ArgumentError: shapes do not match.

    FlashDecoding (Dao et al. 2023): out = sum of exp(lse_i - lse) out_i, lse = log of the sum of
    exp(lse_i).
    """
    _check_states(out1, lse1, out2=out2, lse2=lse2)
    exact = torch.promote_types(torch.promote_types(lse1.dtype, lse2.dtype), torch.float32)
    lse1, lse2 = lse1.to(exact), lse2.to(exact)
    row_max = torch.maximum(lse1, lse2).detach().clamp_min(torch.finfo(exact).min)
    weight1, weight2 = torch.exp(lse1 - row_max), torch.exp(lse2 - row_max)
    total = weight1 + weight2
    is_empty = total == 0
    total = total.masked_fill(is_empty, 1)
    lse = (row_max + torch.log(total)).masked_fill(is_empty, -math.inf)
    out = torch.zeros_like(out1, dtype=exact)
    for part, part_lse, weight in ((out1, lse1, weight1), (out2, lse2, weight2)):
        rows = weight / total, part_lse == -math.inf
        share, is_empty = (x.transpose(-1, -2).unsqueeze(-1) for x in rows)
        out = out + share * part.to(exact).masked_fill(is_empty, 0)
    return out.to(out1.dtype), lse


def _check_states(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> None:
    states = dict(out1=out1, lse1=lse1, out2=out2, lse2=lse2)
    for name, x in states.items():
        check_kind(name, x, q=out1, dtypes=FLOATS, of="out1")
    if out1.shape != out2.shape:
        raise ArgumentError(
            f"out1 has shape {tuple(out1.shape)} and out2 has shape {tuple(out2.shape)}: they "
            "must be equal"
        )
    if out1.dim() < 3:
        raise ArgumentError(
            f"out1 has shape {tuple(out1.shape)}: it must be (..., seqlen, nheads, headdim_v)"
        )
    *batch, seqlen, nheads, _ = out1.shape
    for name, lse in (("lse1", lse1), ("lse2", lse2)):
        if tuple(lse.shape) != (*batch, nheads, seqlen):
            raise ArgumentError(
                f"{name} has shape {tuple(lse.shape)} and out1 has shape {tuple(out1.shape)}: "
                f"{name} must be (..., nheads, seqlen), here {(*batch, nheads, seqlen)}"
            )
