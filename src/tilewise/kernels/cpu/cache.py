"""Attention with a KV cache on the CPU: exact, and batch-invariant: a row's bits depend on the row
alone.

Every product has one shape for a problem, whatever the lengths: a tile of queries, those at
positions [i * TOKENS, (i + 1) * TOKENS), times a block of keys, blocks being counted from the
beginning of a piece. A tile that is not full has rows of zeros, a block has keys that no row sees,
and both are copied to memory of their own. So a query lies in the same row of the same product
whether it is decoded alone, verified with others or part of a prefill, and BLAS has nothing to
choose from.

    for each piece, for each span of its blocks, for each tile of queries that sees it:
        S = Q K^T, block by block;   softmax;   O += P V, block by block
    fold the pieces from left to right (`tile.split_kv`)

Four tokens are the fewest rows that AVX2 and AVX-512 multiply well: a decode step of one query is
bound by memory, and rows of zeros are then free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...mods.evaluation import evaluate
from ...mods.expressions import lookup
from ...tile import predicates
from ...tile.paging import batch_of, lengths_of, queries_of
from ...tile.quantize import by_row, of_sequence
from ...tile.split_kv import State, empty_state, finish, fold, pieces
from ..common.cached import Cached, lse_by_query
from .cache_blocks import Workspace, blocks_of, load

Tensor = torch.Tensor
TOKENS = 4
TILE_ROWS = 16  # of a tile, unless one token has more


class CachedSequence(NamedTuple):
    """One sequence of a call."""

    cached: Cached
    row: int  # its number
    length: int  # keys
    first: int  # the first key that some query sees
    diagonal: int  # the position of its first query
    tokens: int  # of a tile
    slopes: Tensor | None  # (nheads_k, group, 1, 1)
    sinks: Tensor | None  # (nheads_k, rows, 1)
    k_scale: Tensor | None  # (nheads_k or 1, 1, 1), unless each row has its own
    v_scale: Tensor | None
    n: int  # keys of a block
    count: int  # blocks of a span


class TokenTile(NamedTuple):
    """Queries [start, start + tokens), by position, of one sequence; rows are (group, tokens)."""

    start: int
    q: Tensor  # (nheads_k, rows, headdim), scaled


def forward(cached: Cached, out: Tensor, lse: Tensor) -> None:
    """Writes `out` and `lse` of all queries that belong to a sequence."""
    q, cu_seqlens_q = cached.q, cached.extras.cu_seqlens_q
    batch = batch_of(q, cu_seqlens_q)
    lengths = lengths_of(cached.k, cached.page_table, cached.extras.seqused_k, batch)
    if cached.k.shape[0] == 0:
        lengths = [0] * batch
    workspace = Workspace(lse.dtype)
    of_rows = (queries_of(x, cu_seqlens_q) for x in (q, out, lse_by_query(lse)))
    for row, (length, queries, outs, lses) in enumerate(zip(lengths, *of_rows)):
        if queries.shape[0]:
            sequence = _sequence(cached, row, length, queries.shape[0], lse.dtype)
            tiles = list(_tiles(sequence, queries, lse.dtype))
            for tile, state in zip(tiles, _attend(sequence, tiles, workspace)):
                _store(sequence, tile, state, outs, lses)


def _sequence(cached: Cached, row: int, length: int, seqlen_q: int, dtype) -> CachedSequence:
    nheads, nheads_k = cached.q.shape[-2], cached.k.shape[2]
    group = nheads // nheads_k
    tokens = max(1, min(TOKENS, TILE_ROWS // group))
    diagonal, left = length - seqlen_q, cached.scalars.left
    first = min(length, max(0, diagonal - left)) if left >= 0 else 0
    slopes, sinks = cached.extras.alibi_slopes, cached.extras.sinks
    if slopes is not None:
        slopes = slopes if slopes.dim() == 1 else slopes[row]
        slopes = slopes.to(dtype).view(nheads_k, group, 1, 1)
    if sinks is not None:
        sinks = sinks.to(dtype).view(nheads_k, group, 1).expand(-1, -1, tokens)
        sinks = sinks.reshape(nheads_k, group * tokens, 1)
    scales = [_scale_of(x, row, length, dtype) for x in (cached.k_descale, cached.v_descale)]
    learned = slopes, sinks, *scales
    return CachedSequence(
        cached, row, length, first, diagonal, tokens, *learned, *blocks_of(cached)
    )


def _scale_of(scale: Tensor | None, row: int, length: int, dtype: torch.dtype) -> Tensor | None:
    """What scores, or outputs, of a sequence are multiplied with."""
    if scale is None or by_row(scale) or length == 0:
        return None
    return of_sequence(scale, row).to(dtype).view(-1, 1, 1)


def _tiles(sequence: CachedSequence, queries: Tensor, dtype: torch.dtype) -> Iterator[TokenTile]:
    """The tiles that queries (seqlen_q, nheads, headdim) lie in."""
    seqlen_q, nheads, headdim = queries.shape
    nheads_k, tokens = sequence.cached.k.shape[2], sequence.tokens
    group, first = nheads // nheads_k, sequence.diagonal
    by_group = queries.unflatten(1, (nheads_k, group)).permute(1, 2, 0, 3)
    for start in range(first - first % tokens, first + seqlen_q, tokens):
        q = queries.new_zeros(nheads_k, group, tokens, headdim, dtype=dtype)
        a, b = max(start, first), min(start + tokens, first + seqlen_q)
        q[:, :, a - start : b - start].copy_(by_group[:, :, a - first : b - first])
        yield TokenTile(start, q.mul_(sequence.cached.scalars.scale).flatten(1, 2))


def _store(
    sequence: CachedSequence, tile: TokenTile, state: State, outs: Tensor, lses: Tensor
) -> None:
    """The rows of a tile that are queries, to (seqlen_q, nheads, ...)."""
    out, lse = finish(state, sequence.sinks)
    if sequence.v_scale is not None:
        out = out * sequence.v_scale
    first, tokens = sequence.diagonal, sequence.tokens
    a, b = max(tile.start, first), min(tile.start + tokens, first + outs.shape[0])
    for target, rows in ((outs, out), (lses.unsqueeze(-1), lse.unsqueeze(-1))):
        nheads_k, nrows, width = rows.shape
        found = rows.view(nheads_k, nrows // tokens, tokens, width)[:, :, a - tile.start :]
        found = found[:, :, : b - a].permute(2, 0, 1, 3)
        target[a - first : b - first].unflatten(1, found.shape[1:3]).copy_(found)


def _attend(sequence: CachedSequence, tiles: list[TokenTile], workspace: Workspace) -> list[State]:
    """The states of tiles after all keys."""
    totals: list[State | None] = [None] * len(tiles)
    size = sequence.cached.split_size
    for piece in pieces(sequence.first, sequence.length, size):
        states: list[State | None] = [None] * len(tiles)
        for span in _spans(sequence, piece * size, workspace, len(tiles) > 1):
            for i, tile in enumerate(tiles):
                if _sees(sequence, tile, span.start, span.stop):
                    states[i] = _step(sequence, tile, span, states[i])
        for i, state in enumerate(states):
            if state is not None:
                total = totals[i]
                totals[i] = state if total is None else fold(total, state)
    return [
        empty_state(tile.q.new_zeros(*tile.q.shape[:2], sequence.cached.v.shape[3]))
        if total is None
        else total
        for tile, total in zip(tiles, totals)
    ]


class Span:
    """Keys [start, stop) of a piece, in `count` blocks of `n`, loaded on demand.

    For one tile, blocks share memory that fits a core's cache; for several tiles, all blocks stay.
    """

    def __init__(
        self, sequence: CachedSequence, start: int, stop: int, workspace: Workspace, stays: bool
    ):
        self.sequence, self.workspace, self.stays = sequence, workspace, stays
        self.start, self.stop = start, stop
        self.n, self.count = sequence.n, sequence.count
        self.loaded: set[tuple[str, int]] = set()

    def ends(self, number: int) -> tuple[int, int]:
        """Which keys of a block are in use: none where the second is not above the first."""
        start = self.start + number * self.n
        stop = min(start + self.n, self.stop, self.sequence.length)
        return max(start, self.sequence.first), stop

    def factor(self, name: str, number: int) -> Tensor:
        """Keys ("k") or values ("v") of a block; values are zeros where there is none."""
        cached = self.sequence.cached
        x = cached.k if name == "k" else cached.v
        rows, factor = self.workspace.block(name, number if self.stays else -1, x, self.n)
        if (name, number) not in self.loaded:
            # Scores of keys that are not there are masked, whatever they are
            self._load(rows, x, number, 0.0 if name == "v" else None)
            if self.stays:
                self.loaded.add((name, number))
        return factor

    def scale(self, name: str, number: int) -> Tensor | None:
        """What the scores ("k") or probabilities ("v") of a block are multiplied with, or None."""
        cached = self.sequence.cached
        x = cached.k_descale if name == "k" else cached.v_descale
        if x is None or not by_row(x):
            return self.sequence.k_scale if name == "k" else None
        rows, factor = self.workspace.scales(name, x, self.n)
        self._load(rows, x, number, 1.0)
        return factor

    def _load(self, rows: Tensor, x: Tensor, number: int, other: float | None) -> None:
        """Rows of a block; `other`, unless it is None, where no key is in use."""
        first, last = self.ends(number)
        if last - first < self.n:
            start = self.start + number * self.n
            if other is not None:
                rows[: first - start].fill_(other), rows[last - start :].fill_(other)
            rows = rows[first - start : last - start]
        table = self.sequence.cached.page_table
        table = None if table is None else table[self.sequence.row]
        load(rows, x, (self.sequence.row, table), first, last)


def _spans(
    sequence: CachedSequence, start: int, workspace: Workspace, stays: bool
) -> Iterator[Span]:
    """The spans of a piece that hold keys."""
    stop = start + sequence.cached.split_size
    width = sequence.n * sequence.count
    for a in range(start, stop, width):
        b = min(a + width, stop)
        if max(a, sequence.first) < min(b, sequence.length):
            yield Span(sequence, a, b, workspace, stays)


def _sees(sequence: CachedSequence, tile: TokenTile, start: int, stop: int) -> bool:
    """Whether some query of a tile may see some key of [start, stop)."""
    left, right = sequence.cached.scalars.left, sequence.cached.scalars.right
    last = tile.start + sequence.tokens - 1
    is_left = left >= 0 and stop <= max(tile.start, sequence.diagonal) - left
    return not is_left and not (right >= 0 and start > last + right)


def _step(sequence: CachedSequence, tile: TokenTile, span: Span, state: State | None) -> State:
    """A span of keys into the state of a tile, None before the first of a piece."""
    nheads_k, rows = tile.q.shape[:2]
    s = tile.q.new_empty(span.count, nheads_k, rows, span.n)
    blocks, seen = s.unbind(0), []
    for number, scores in enumerate(blocks):
        first, last = span.ends(number)
        if first < last and _sees(sequence, tile, first, last):
            torch.bmm(tile.q, span.factor("k", number), out=scores)
            scale = span.scale("k", number)
            if scale is not None:
                scores.mul_(scale)
            seen.append(number)
        else:
            scores.zero_()  # masked
    _modify(s, sequence, tile, span)
    m_i = s.amax((0, 3)).unsqueeze(-1)
    m_i = m_i if state is None else torch.maximum(state.m_i, m_i)
    shift = m_i.clamp_min(torch.finfo(m_i.dtype).min)  # -inf: the row has seen no key yet
    s.sub_(shift).exp_()
    l_i = s.sum((0, 3)).unsqueeze(-1)
    if state is None:
        acc_o = s.new_zeros(nheads_k, rows, sequence.cached.v.shape[3])
    else:
        alpha = torch.exp(state.m_i - shift)
        l_i, acc_o = l_i.add_(state.l_i * alpha), state.acc_o * alpha
    for number in seen:
        scale = span.scale("v", number)
        if scale is not None:
            blocks[number].mul_(scale)
        acc_o.baddbmm_(blocks[number], span.factor("v", number))
    return State(m_i, l_i, acc_o)


def _modify(s: Tensor, sequence: CachedSequence, tile: TokenTile, span: Span) -> None:
    """Softcap, ALiBi and masks, on scaled scores (count, nheads_k, rows, n) in place."""
    cached, scalars = sequence.cached, sequence.cached.scalars
    if scalars.softcap:
        s.div_(scalars.softcap).tanh_().mul_(scalars.softcap)
    sides = _sides(sequence, tile, span)
    if sequence.slopes is None and not cached.mask and not any(sides):
        return
    s = s.unflatten(2, (-1, sequence.tokens))
    q_idx = _positions(tile.start, tile.start + sequence.tokens).unsqueeze(1)
    k_idx = _positions(span.start, span.start + span.count * span.n)
    k_idx = k_idx.view(span.count, 1, 1, 1, span.n)
    if sequence.slopes is not None:
        s.addcmul_(sequence.slopes, (q_idx - k_idx).abs().to(s.dtype), value=-1)
    for is_partial, seen in zip(sides, (_in_use, _within_left, _within_right)):
        if is_partial:
            s.masked_fill_(~seen(sequence, span, q_idx, k_idx), -math.inf)
    if cached.mask:
        nheads_k, group = s.shape[1:3]
        h = _positions(0, nheads_k * group).view(nheads_k, group, 1, 1)
        b = torch.tensor(sequence.row, device="cpu")
        seen = evaluate(lookup(cached.mask), b, h, q_idx, k_idx, cached.extras.captured)
        s.masked_fill_(~seen, -math.inf)


def _sides(sequence: CachedSequence, tile: TokenTile, span: Span) -> tuple[bool, bool, bool]:
    """Whether the keys of a span are not all in use, and which sides of the band cut a tile."""
    left, right = sequence.cached.scalars.left, sequence.cached.scalars.right
    stop = span.start + span.count * span.n
    return (
        span.start < sequence.first or stop > min(span.stop, sequence.length),
        left >= 0 and span.start < tile.start + sequence.tokens - 1 - left,
        right >= 0 and stop - 1 > tile.start + right,
    )


def _in_use(sequence: CachedSequence, span: Span, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    stop = min(span.stop, sequence.length)
    return predicates.is_key(k_idx, stop) & (k_idx >= sequence.first)


def _within_left(sequence: CachedSequence, span: Span, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    return predicates.within_left(q_idx, k_idx, 0, sequence.cached.scalars.left)


def _within_right(sequence: CachedSequence, span: Span, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    return predicates.within_right(q_idx, k_idx, 0, sequence.cached.scalars.right)


def _positions(start: int, stop: int) -> Tensor:
    """Whatever torch's default device is."""
    return torch.arange(start, stop, device="cpu")
