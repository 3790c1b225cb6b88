"""Attention with a KV cache on the CPU: exact, and batch-invariant: a row's bits depend on the row
alone.

For tiles of queries, and for chunks of the keys that a tile sees:

    S = scale Q K^T;   m = max S;   P = exp(S - m);   l = sum P;   O = P V,   of each span
    fold the spans:   M = max m;   l = sum exp(m - M) l;   O = sum exp(m - M) O,   left to right

A span is SPAN keys of a piece, counted from its beginning. How many queries a tile has and how many
spans a chunk has is for speed alone: each score, and each sum, is that of one row (`row_products`),
and a key that a row does not see adds 0 at one end of its sums. So a query has the same bits
whether it is decoded alone, verified with others or part of a prefill.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...mods.evaluation import evaluate
from ...mods.expressions import lookup
from ...problem import Extras
from ...tile import predicates
from ...tile.paging import batch_of, gather, lengths_of, queries_of
from ...tile.quantize import by_row, of_sequence
from ...tile.split_kv import SplitState, empty_state, pieces
from ..common.cached import Cached, lse_by_query
from .cache_rows import CacheRows, Memory, Rows
from .dense import of_heads
from .row_products import dots, weighted_sums
from .softmax import cap, finish_tile, fold_spans

Tensor = torch.Tensor
SPAN = 512  # keys of a softmax, unless a piece has fewer
SCORES = 1 << 19  # of a tile and a chunk, where a token and a span have fewer: 2 MiB in fp32
# Keys of one head before those of the next, where these lie between: with 8 a step over 8Ki keys of
# 32 heads takes 25 ms, with a span of them 33 (fp32, one thread of an AMD EPYC, 2026-11-23).
# Several queries of a head find its keys in the L2 cache
FEW_KEYS = 8
STATES = 1 << 23  # elements of a tile's O of all spans, where a token has fewer


class CachedSequence(NamedTuple):
    """One sequence of a call."""

    cached: Cached
    diagonal: int  # the position of its first query
    k: CacheRows
    v: CacheRows
    extras: Extras  # those of heads, (nheads_k, group, 1, 1)
    k_scale: Tensor | None  # (nheads_k or 1, 1, 1), unless each row has its own
    v_scale: Tensor | None

    @property
    def span(self) -> int:
        """The keys of a span, but for the last ones of a piece."""
        return min(SPAN, self.cached.split_size)


class TokenTile(NamedTuple):
    """Queries [start, stop), by position, of one sequence; rows are (group, tokens)."""

    start: int
    stop: int
    q: Tensor  # (nheads_k, rows, headdim)


class Chunk(NamedTuple):
    """Keys [first, last): those of `spans` whole spans, or of a part of one."""

    first: int
    last: int
    spans: int
    skipped: int  # keys of the span before `first`

    @property
    def n(self) -> int:
        """Keys of a span."""
        return (self.last - self.first) // self.spans


def forward(cached: Cached, out: Tensor, lse: Tensor) -> None:
    """Writes `out` and `lse`."""
    cached = cached._replace(split_size=cached.piece_size)  # asked for or not: once for all spans
    q, cu_seqlens_q = cached.q, cached.extras.cu_seqlens_q
    batch = batch_of(q, cu_seqlens_q)
    lengths = lengths_of(cached.k, cached.page_table, cached.extras.seqused_k, batch)
    if cached.k.shape[0] == 0:
        lengths = [0] * batch
    memory = Memory()
    all_queries, all_outs, all_lses = (
        queries_of(x, cu_seqlens_q) for x in (q, out, lse_by_query(lse))
    )
    of_rows = zip(lengths, all_queries, all_outs, all_lses)
    for row, (length, queries, outs, lses) in enumerate(of_rows):
        if queries.shape[0]:
            sequence = open_sequence(cached, row, length, queries.shape[0], lse.dtype)
            for tile in tiles_of(sequence, queries, dtype=lse.dtype):
                _store(sequence, tile, state=_attend(sequence, tile, memory), outs=outs, lses=lses)
    if cu_seqlens_q is not None:  # rows of no sequence
        end = max(int(cu_seqlens_q[-1]), 0)
        lse[:, end:] = -math.inf
        if cached.clears_tail:
            out[end:] = 0


def open_sequence(cached: Cached, row: int, length: int, seqlen_q: int, dtype) -> CachedSequence:
    """A sequence, whose rows lie where they did."""
    nheads, nheads_k = cached.q.shape[-2], cached.k.shape[2]
    group = nheads // nheads_k
    diagonal, left = length - seqlen_q, cached.scalars.left
    first = min(length, max(0, diagonal - left)) if left >= 0 else 0

    def of_row(x: Tensor) -> Tensor:
        return (x if x.dim() == 1 else x[row]).to(dtype).view(nheads_k, group, 1, 1)

    extras = of_heads(cached.extras, of_row)
    k = CacheRows(cached.k, cached.page_table, row=row, ends=(first, length), dtype=dtype)
    v = CacheRows(cached.v, cached.page_table, row=row, ends=(first, length), dtype=dtype)
    k_scale = _scale_of(cached.k_descale, row, length=length, dtype=dtype)
    v_scale = _scale_of(cached.v_descale, row, length=length, dtype=dtype)
    return CachedSequence(
        cached, diagonal, k=k, v=v, extras=extras, k_scale=k_scale, v_scale=v_scale
    )


def _scale_of(scale: Tensor | None, row: int, length: int, dtype: torch.dtype) -> Tensor | None:
    """What scores, or outputs, of a sequence are multiplied with."""
    if scale is None or by_row(scale) or length == 0:
        return None
    return of_sequence(scale, row).to(dtype).view(-1, 1, 1)


def tiles_of(sequence: CachedSequence, queries: Tensor, dtype: torch.dtype) -> Iterator[TokenTile]:
    """Tiles of queries (seqlen_q, nheads, headdim)."""
    seqlen_q, nheads, _ = queries.shape
    nheads_k, first = sequence.cached.k.shape[2], sequence.diagonal
    spans = max(1, (sequence.k.last - sequence.k.first) // sequence.span)
    states = nheads * spans * sequence.cached.v.shape[3]
    tokens = max(1, min(SCORES // (nheads * sequence.span), STATES // states))
    by_group = queries.unflatten(1, (nheads_k, nheads // nheads_k)).permute(1, 2, 0, 3)
    for a in range(0, seqlen_q, tokens):
        b = min(a + tokens, seqlen_q)
        q = by_group[:, :, a:b].to(dtype).reshape(nheads_k, -1, queries.shape[2])
        yield TokenTile(first + a, first + b, q=q)


def _store(
    sequence: CachedSequence, tile: TokenTile, state: SplitState, outs: Tensor, lses: Tensor
) -> None:
    """The rows of a tile to (seqlen_q, nheads, ...)."""
    tokens = tile.stop - tile.start
    out, lse = finish_tile(state, sequence.extras, tokens=tokens)
    if sequence.v_scale is not None:
        out = out * sequence.v_scale
    rows = slice(tile.start - sequence.diagonal, tile.stop - sequence.diagonal)
    for target, x in ((outs, out), (lses.unsqueeze(-1), lse.unsqueeze(-1))):
        x = x.unflatten(1, (-1, tokens)).permute(2, 0, 1, 3)
        target[rows].unflatten(1, x.shape[1:3]).copy_(x)


def _attend(sequence: CachedSequence, tile: TokenTile, memory: Memory) -> SplitState:
    """The state of a tile after all keys."""
    states = states_of(sequence, tile, memory)
    if states is None:
        return empty_state(tile.q.new_zeros((*tile.q.shape[:2], sequence.cached.v.shape[3])))
    return fold_spans(states)


def states_of(sequence: CachedSequence, tile: TokenTile, memory: Memory) -> SplitState | None:
    """The states of a tile after each span, (spans, nheads_k, rows, ...); None without keys."""
    states = [_chunk(sequence, tile, chunk, memory) for chunk in _chunks(sequence, tile)]
    return SplitState._make(map(torch.cat, zip(*states))) if states else None


def _chunks(sequence: CachedSequence, tile: TokenTile) -> Iterator[Chunk]:
    """All keys that some query of a tile may see."""
    left, right = sequence.cached.scalars.left, sequence.cached.scalars.right
    first = max(sequence.k.first, tile.start - left) if left >= 0 else sequence.k.first
    last = min(sequence.k.last, tile.stop + right) if right >= 0 else sequence.k.last
    scores = sequence.span * math.prod(tile.q.shape[:2])
    most = min(sequence.k.most, sequence.v.most) // sequence.span
    most = max(1, min(SCORES // scores, most))
    spans = list(_spans(sequence, first, last=last))
    while spans:
        chunk = spans.pop(0)
        while chunk.n == sequence.span and chunk.spans < most and spans:
            if spans[0].n < sequence.span:
                break
            chunk = Chunk(chunk.first, spans.pop(0).last, spans=chunk.spans + 1, skipped=0)
        yield chunk


def _spans(sequence: CachedSequence, first: int, last: int) -> Iterator[Chunk]:
    """The spans that have some of keys [first, last), with no others."""
    size = sequence.cached.split_size
    for piece in pieces(first, last, split_size=size):
        start, stop = piece * size, min(last, (piece + 1) * size)
        skipped = max(0, first - start) // sequence.span
        for a in range(start + skipped * sequence.span, stop, sequence.span):
            yield Chunk(max(a, first), min(a + sequence.span, stop), 1, max(0, first - a))


def _chunk(sequence: CachedSequence, tile: TokenTile, chunk: Chunk, memory: Memory) -> SplitState:
    """The states of a tile after each span of a chunk, (spans, nheads_k, rows, ...)."""
    cached = sequence.cached
    shape = chunk.spans, *tile.q.shape[:2], chunk.n
    rows = sequence.k.load(chunk.first, chunk.last, memory)
    s = _scores(rows, tile, shape, cached.scalars.scale, sequence.k.heads_are_beside)
    scale = _scales(sequence, cached.k_descale, chunk=chunk)
    scale = sequence.k_scale if scale is None else scale
    if scale is not None:
        s.mul_(scale)
    _modify(s, sequence, tile=tile, chunk=chunk)
    m_i = s.amax(-1, keepdim=True)
    s.sub_(m_i.clamp_min(torch.finfo(s.dtype).min)).exp_()  # -inf: the row sees no key
    l_i = _row_sums(s, chunk.skipped, span=sequence.span)
    scale = _scales(sequence, cached.v_descale, chunk=chunk)
    if scale is not None:
        s.mul_(scale)
    rows = sequence.v.load(chunk.first, chunk.last, memory)
    acc_o = weighted_sums(s.view(-1, chunk.n), rows.matrix, columns=_columns(rows, shape))
    acc_o = acc_o.view((*shape[:3], -1)).masked_fill_(m_i == -math.inf, 0)  # V may hold NaN
    return SplitState(acc_o, m_i, l_i=l_i)


def _scores(
    rows: Rows, tile: TokenTile, shape: tuple[int, ...], scale: float, heads_are_beside: bool
) -> Tensor:
    """(spans, nheads_k, rows, n), in an order that is near to that of memory."""
    spans, nheads_k, nrows, n = shape
    few = FEW_KEYS if heads_are_beside and nrows == 1 and n % FEW_KEYS == 0 else n
    cut = spans * n // few, nheads_k, nrows, few
    q = tile.q.expand(cut[0], -1, -1, -1).reshape(-1, tile.q.shape[2])
    s = dots(q, rows.matrix, columns=_columns(rows, cut), scale=scale)
    return s.view((spans, n // few, *cut[1:])).permute(0, 2, 3, 1, 4).reshape(shape)


def _columns(rows: Rows, shape: tuple[int, ...]) -> Tensor:
    """The rows of a matrix that each row of scores (spans, nheads_k, rows, n) is of."""
    by_span = rows.ids.unflatten(0, (shape[0], shape[3])).transpose(1, 2)
    return by_span.unsqueeze(2).expand(shape).contiguous().view(-1, shape[3])


def _row_sums(p: Tensor, skipped: int, span: int) -> Tensor:
    """Sums over the last dimension, in the order of a whole span."""
    missing = span - p.shape[3]
    if missing:
        p = torch.nn.functional.pad(p, (skipped, missing - skipped))
    return p.sum(-1, keepdim=True)


def _scales(sequence: CachedSequence, scale: Tensor | None, chunk: Chunk) -> Tensor | None:
    """Scales of the rows of a chunk, (spans, nheads_k, 1, n), where each row has its own."""
    if scale is None or not by_row(scale):
        return None
    rows = gather(scale, sequence.cached.page_table, sequence.k.row, chunk.first, chunk.last)
    rows = rows.to(sequence.k.dtype).unflatten(0, (chunk.spans, chunk.n))
    return rows.transpose(1, 2).unsqueeze(2)


def _modify(s: Tensor, sequence: CachedSequence, tile: TokenTile, chunk: Chunk) -> None:
    """The cap, ALiBi and masks, on scaled scores (spans, nheads_k, rows, n) in place."""
    cached, scalars = sequence.cached, sequence.cached.scalars
    cap(s, scalars)
    is_left = scalars.left >= 0 and chunk.first < tile.stop - 1 - scalars.left
    is_right = scalars.right >= 0 and chunk.last - 1 > tile.start + scalars.right
    slopes = sequence.extras.alibi_slopes
    if slopes is None and not cached.mask and not is_left and not is_right:
        return
    s = s.unflatten(2, (-1, tile.stop - tile.start))
    q_idx = torch.arange(tile.start, tile.stop, device="cpu").unsqueeze(1)
    k_idx = torch.arange(chunk.first, chunk.last, device="cpu").view(chunk.spans, 1, 1, 1, chunk.n)
    if slopes is not None:
        # Rounded twice: whether `addcmul` rounds once depends on where an element lies
        s.sub_(slopes * (q_idx - k_idx).abs())
    if is_left:
        s.masked_fill_(~predicates.within_left(q_idx, k_idx, 0, scalars.left), -math.inf)
    if is_right:
        s.masked_fill_(~predicates.within_right(q_idx, k_idx, 0, scalars.right), -math.inf)
    if cached.mask:
        nheads_k, group = s.shape[1:3]
        h = torch.arange(nheads_k * group, device="cpu").view(nheads_k, group, 1, 1)
        b = torch.tensor(sequence.k.row, device="cpu")
        expr, tensors = lookup(cached.mask), cached.extras.captured
        sees = evaluate(expr, b, h=h, q_idx=q_idx, k_idx=k_idx, tensors=tensors)
        s.masked_fill_(~sees, -math.inf)
