"""Attention beside a cache on the CPU: exact, and the bits of a row are the row's own.

Every product has one shape for a problem, whatever the lengths: a tile of queries, those at
positions [i * TOKENS, (i + 1) * TOKENS), beside a block of keys, those from the beginning of a
piece on. A tile that is not full has rows of zeros, a block has keys of zeros that no row sees, and
both are copied to memory of their own. So a query lies in the same row of the same product whether
it is decoded alone, verified with others or part of a prefill, and BLAS has nothing to choose from.

    for each piece, for each of its blocks:      keys and values gathered once, in fp32
        for each tile of queries that sees it:   S = Q K^T, online softmax, O += P V
    fold the pieces from left to right (`splits`)

Four tokens are the fewest rows that AVX2 and AVX-512 multiply well: a decode step of one query is
bound by memory, and rows of zeros are then free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ... import predicates
from ...cache_checks import Cached, lse_by_query
from ...evaluation import evaluate
from ...expressions import named
from ...paging import batch_of, lengths_of, queries_of
from ...splits import State, empty_state, finish, fold, pieces

Tensor = torch.Tensor
BLOCK_N = 256
TOKENS = 4
ROWS = 16  # of a tile, unless one token has more


class Sequence(NamedTuple):
    """One sequence of a call."""

    cached: Cached
    row: int  # its number
    length: int  # keys
    first: int  # the first key that some query sees
    diagonal: int  # the position of its first query
    tokens: int  # of a tile
    slopes: Tensor | None  # (nheads_k, group, 1, 1)
    sinks: Tensor | None  # (nheads_k, rows, 1)


class Tile(NamedTuple):
    """Queries [start, start + tokens), by position, of one sequence; rows are (group, tokens)."""

    start: int
    q: Tensor  # (nheads_k, rows, headdim), scaled


class Block(NamedTuple):
    """Keys [start, start + n) in fp32 (fp64 for fp64), zeros where there is no key."""

    start: int
    k: Tensor  # (nheads_k, n, headdim)
    v: Tensor


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


def _sequence(cached: Cached, row: int, length: int, seqlen_q: int, dtype) -> Sequence:
    nheads, nheads_k = cached.q.shape[-2], cached.k.shape[2]
    group = nheads // nheads_k
    tokens = max(1, min(TOKENS, ROWS // group))
    diagonal, left = length - seqlen_q, cached.scalars.left
    first = min(length, max(0, diagonal - left)) if left >= 0 else 0
    slopes, sinks = cached.extras.alibi_slopes, cached.extras.sinks
    if slopes is not None:
        slopes = slopes if slopes.dim() == 1 else slopes[row]
        slopes = slopes.to(dtype).view(nheads_k, group, 1, 1)
    if sinks is not None:
        sinks = sinks.to(dtype).view(nheads_k, group, 1).expand(-1, -1, tokens)
        sinks = sinks.reshape(nheads_k, group * tokens, 1)
    return Sequence(cached, row, length, first, diagonal, tokens, slopes, sinks)


def _tiles(sequence: Sequence, queries: Tensor, dtype: torch.dtype) -> Iterator[Tile]:
    """The tiles that queries (seqlen_q, nheads, headdim) lie in."""
    seqlen_q, nheads, headdim = queries.shape
    nheads_k, tokens = sequence.cached.k.shape[2], sequence.tokens
    group, first = nheads // nheads_k, sequence.diagonal
    by_group = queries.unflatten(1, (nheads_k, group)).permute(1, 2, 0, 3)
    for start in range(first - first % tokens, first + seqlen_q, tokens):
        q = queries.new_zeros(nheads_k, group, tokens, headdim, dtype=dtype)
        a, b = max(start, first), min(start + tokens, first + seqlen_q)
        q[:, :, a - start : b - start].copy_(by_group[:, :, a - first : b - first])
        yield Tile(start, q.mul_(sequence.cached.scalars.scale).flatten(1, 2))


def _store(sequence: Sequence, tile: Tile, state: State, outs: Tensor, lses: Tensor) -> None:
    """The rows of a tile that are queries, to (seqlen_q, nheads, ...)."""
    out, lse = finish(state, sequence.sinks)
    first, tokens = sequence.diagonal, sequence.tokens
    a, b = max(tile.start, first), min(tile.start + tokens, first + outs.shape[0])
    for target, rows in ((outs, out), (lses.unsqueeze(-1), lse.unsqueeze(-1))):
        nheads_k, nrows, width = rows.shape
        found = rows.view(nheads_k, nrows // tokens, tokens, width)[:, :, a - tile.start :]
        found = found[:, :, : b - a].permute(2, 0, 1, 3)
        target[a - first : b - first].unflatten(1, found.shape[1:3]).copy_(found)


def _attend(sequence: Sequence, tiles: list[Tile], workspace: Workspace) -> list[State]:
    """The states of tiles after all keys."""
    headdim_v = sequence.cached.v.shape[3]
    likes = [tile.q.new_zeros(*tile.q.shape[:2], headdim_v) for tile in tiles]
    totals: list[State | None] = [None] * len(tiles)
    size = sequence.cached.split_size
    for piece in pieces(sequence.first, sequence.length, size):
        states: list[State | None] = [None] * len(tiles)
        for block in _blocks(sequence, piece * size, (piece + 1) * size, workspace):
            for i, tile in enumerate(tiles):
                if _sees(sequence, tile, block):
                    state = empty_state(likes[i]) if states[i] is None else states[i]
                    states[i] = _step(sequence, tile, block, state)
        for i, state in enumerate(states):
            if state is not None:
                total = totals[i]
                totals[i] = state if total is None else fold(total, state)
    return [empty_state(like) if x is None else x for x, like in zip(totals, likes)]


class Workspace:
    """Memory of blocks, kept from one to the next: fresh pages cost more than a softmax."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype  # of blocks
        self.blocks: dict[str, Tensor] = {}
        self.stage: Tensor | None = None

    def block(self, name: str, x: Tensor, n: int) -> Tensor:
        """(nheads_k, n, ...), memory of its own for each shape."""
        key = f"{name}{n}"
        if key not in self.blocks:
            self.blocks[key] = x.new_empty(x.shape[2], n, x.shape[3], dtype=self.dtype)
        return self.blocks[key]

    def staged(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Memory of this shape in the dtype of x."""
        numel = math.prod(shape)
        if self.stage is None or self.stage.numel() < numel:
            self.stage = x.new_empty(numel)
        return self.stage[:numel].view(shape)


def _blocks(sequence: Sequence, start: int, stop: int, workspace: Workspace) -> Iterator[Block]:
    """The blocks of a piece, keys [start, stop), that hold keys."""
    cached = sequence.cached
    for a in range(start, stop, BLOCK_N):
        n = min(BLOCK_N, stop - a)
        first, last = max(a, sequence.first), min(a + n, sequence.length)
        if first >= last:
            continue
        loaded = []
        for name, x in (("k", cached.k), ("v", cached.v)):
            target = workspace.block(name, x, n)
            if last - first < n:
                target.zero_()
            _load(target[:, first - a : last - a], x, sequence, first, last, workspace)
            loaded.append(target)
        yield Block(a, *loaded)


def _load(
    target: Tensor, x: Tensor, sequence: Sequence, first: int, last: int, workspace: Workspace
) -> None:
    """Keys or values [first, last) to (nheads_k, last - first, ...)."""
    table, page_size = sequence.cached.page_table, x.shape[1]
    if table is None:
        _copy(target, x[sequence.row, first:last], workspace)
        return
    start, stop = first // page_size, (last - 1) // page_size + 1
    pages = table[sequence.row, start:stop].clamp(0, x.shape[0] - 1)
    if page_size < BLOCK_N:
        found = workspace.staged(x, (stop - start, *x.shape[1:]))
        rows = torch.index_select(x, 0, pages, out=found).flatten(0, 1)
        rows = rows[first - start * page_size : last - start * page_size]
        target.copy_(rows.transpose(0, 1))
        return
    for page, number in enumerate(pages.tolist(), start):  # two at most
        a, b = max(first, page * page_size), min(last, (page + 1) * page_size)
        rows = x[number, a - page * page_size : b - page * page_size]
        _copy(target[:, a - first : b - first], rows, workspace)


def _copy(target: Tensor, rows: Tensor, workspace: Workspace) -> None:
    """(n, nheads_k, headdim) to (nheads_k, n, headdim). Where the heads of a row are neighbours it
    is read in the order of memory first: head by head took 5.8 ms for 3.6, of 8Ki rows of 8 heads
    in fp32 (AMD EPYC, one thread, 2026-11-22).
    """
    if rows.stride(0) > rows.stride(1):
        rows = workspace.staged(rows, rows.shape).copy_(rows)
    target.copy_(rows.transpose(0, 1))


def _sees(sequence: Sequence, tile: Tile, block: Block) -> bool:
    """Whether some query of a tile may see some key of a block."""
    left, right = sequence.cached.scalars.left, sequence.cached.scalars.right
    last, stop = tile.start + sequence.tokens - 1, block.start + block.k.shape[1]
    is_left = left >= 0 and stop <= max(tile.start, sequence.diagonal) - left
    return not is_left and not (right >= 0 and block.start > last + right)


def _step(sequence: Sequence, tile: Tile, block: Block, state: State) -> State:
    """A block of keys into the state of a tile."""
    s = torch.bmm(tile.q, block.k.transpose(1, 2))
    _modify(s, sequence, tile, block)
    m_i = torch.maximum(state.m_i, s.amax(-1, keepdim=True))
    shift = m_i.clamp_min(torch.finfo(m_i.dtype).min)  # -inf: the row has seen no key yet
    p = s.sub_(shift).exp_()
    alpha = torch.exp(state.m_i - shift)
    l_i = state.l_i * alpha + p.sum(-1, keepdim=True)
    return State(m_i, l_i, (state.acc_o * alpha).baddbmm_(p, block.v))


def _modify(s: Tensor, sequence: Sequence, tile: Tile, block: Block) -> None:
    """Softcap, ALiBi and masks, on scaled scores in place."""
    cached, scalars = sequence.cached, sequence.cached.scalars
    if scalars.softcap:
        s.div_(scalars.softcap).tanh_().mul_(scalars.softcap)
    s = s.unflatten(1, (-1, sequence.tokens))
    stop = block.start + s.shape[3]
    sides = _sides(sequence, tile, block.start, stop)
    if sequence.slopes is None and not cached.mask and not any(sides):
        return
    q_idx = _positions(tile.start, tile.start + sequence.tokens).unsqueeze(1)
    k_idx = _positions(block.start, stop)
    if sequence.slopes is not None:
        s.addcmul_(sequence.slopes, (q_idx - k_idx).abs().to(s.dtype), value=-1)
    for is_partial, seen in zip(sides, (_in_use, _within_left, _within_right)):
        if is_partial:
            s.masked_fill_(~seen(sequence, q_idx, k_idx), -math.inf)
    if cached.mask:
        nheads_k, group = s.shape[:2]
        h = _positions(0, nheads_k * group).view(nheads_k, group, 1, 1)
        b = torch.tensor(sequence.row, device="cpu")
        seen = evaluate(named(cached.mask), b, h, q_idx, k_idx, cached.extras.captured)
        s.masked_fill_(~seen, -math.inf)


def _sides(sequence: Sequence, tile: Tile, start: int, stop: int) -> tuple[bool, bool, bool]:
    """Whether keys [start, stop) are not all in use, and which sides of the band cut a tile."""
    left, right = sequence.cached.scalars.left, sequence.cached.scalars.right
    return (
        start < sequence.first or stop > sequence.length,
        left >= 0 and start < tile.start + sequence.tokens - 1 - left,
        right >= 0 and stop - 1 > tile.start + right,
    )


def _in_use(sequence: Sequence, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    return predicates.is_key(k_idx, sequence.length) & (k_idx >= sequence.first)


def _within_left(sequence: Sequence, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    return predicates.within_left(q_idx, k_idx, 0, sequence.cached.scalars.left)


def _within_right(sequence: Sequence, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    return predicates.within_right(q_idx, k_idx, 0, sequence.cached.scalars.right)


def _positions(start: int, stop: int) -> Tensor:
    """Whatever torch's default device is."""
    return torch.arange(start, stop, device="cpu")
