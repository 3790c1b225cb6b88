"""Attention with a KV cache: FlashDecoding (split-KV) in two launches.

The first has a program for each (sequence, block of queries, key head, piece of split_size keys),
which loops over the piece in tiles of BLOCK_N keys and writes its unnormalised partial result. The
second folds the pieces of a tile from left to right. The first `lead` pieces of a block have one
program, which folds as it goes: the same sums, and less to write. So has one launch for all pieces,
where these are few, or their partial results too large.

A tile has whole groups of query heads, row r being token r // GROUP and head r % GROUP, so that
keys are read once for all of a group. A block is ROW_TILES tiles, one after the other in the
sequence, which share each tile of keys as it is read. A row has the same products whichever of a
block's tiles it is in, and however many these are.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...tile.bounds import clamp
from ...tile.fp8 import dequantize
from ...tile.schedule import find_query_tile
from ...tile.score import load_slope
from ...tile.seqlen import modifiers_of, rows_of
from ...tile.softmax import finish, load_sink
from ...tile.splits import SeenKeys, SplitState, fold, keys_seen, piece_keys
from ...tile.types import Lengths, Sequence, Strided
from ..common.io import clear_tail
from ..common.lengths import for_all_lengths
from .places import find_keys, find_pages, first_places, next_places
from .scales import k_row_scales, k_sequence_scale, v_row_scales, v_sequence_scale
from .split_step import add_sums, attend, spread_sums

# Integers that say nothing of how addresses are aligned
LENGTHS = "sizes", "numbers", "cache.table_stride", "cache.pages", "cache.num_pages"
LENGTHS += "partials.rows", "partials.blocks", "partials.lead"


class Cache(NamedTuple):
    """Keys and values by page: of a cache without a table, a page is a sequence."""

    k: Strided  # (pages, page_size, nheads_k, headdim)
    v: Strided  # strides that are those of k are None: products of 64 bits cost much of a step
    page_table: Any  # int32, or None
    table_stride: int
    pages: int  # of a sequence
    num_pages: int
    page_size: int
    # Of 8 bits: scales and their strides, over sequences, or over pages where each row has its own;
    # no tuples, of which Triton (3.6) forgets in a loop which strides are 1
    k_scale: Any = None
    k_scale_batch: Any = None
    k_scale_row: Any = None  # None where rows share one
    k_scale_head: Any = None
    v_scale: Any = None
    v_scale_batch: Any = None
    v_scale_row: Any = None
    v_scale_head: Any = None
    tile_pages: Any = None  # of a tile of keys, where these are whole and addresses have room


class Partials(NamedTuple):
    """States of pieces, fp32, by (piece, row), where row is query * nheads + head; or None."""

    acc_o: Any  # (pieces, rows, headdim_v)
    m_i: Any
    l_i: Any
    rows: int
    blocks: int  # of a launch: its first programs walk `lead` pieces, all others one
    lead: int  # None where it is 1
    tail: Any = None  # `out` where its rows of no sequence are to be cleared


class QueryTile(NamedTuple):
    """A tile of queries, one of a block."""

    seq: Sequence  # `head` and `slope_log2` are (BLOCK_M, 1)
    query: tl.tensor  # (BLOCK_M,), in its tensor: of all sequences
    is_query: tl.tensor  # (BLOCK_M,)
    position: tl.tensor  # (BLOCK_M,), from the sequence's first key on
    head: tl.tensor  # (BLOCK_M,)
    batch_q: tl.tensor  # the row of the batch; 0 where queries are packed
    head_k: tl.tensor
    keys: SeenKeys  # by the whole block


@for_all_lengths(LENGTHS)
@triton.jit
def attn_split_kernel(
    q, cache, partials, out, lse, optionals, sizes, numbers, split_size,
    FEATURES: tl.constexpr, TILE: tl.constexpr, ROW_TILES: tl.constexpr,
):  # fmt: skip
    if FEATURES.PACKED:
        starts, nheads = optionals.cu_seqlens_q, sizes.nheads * FEATURES.GROUP
        program, programs = tl.program_id(0), tl.num_programs(0)
        clear_tail(
            partials.tail, lse, starts, sizes.packed, sizes.seqlen_q, nheads,
            program, programs, tl.arange(0, TILE.BLOCK_DV), FEATURES.HEADDIM_V,
        )  # fmt: skip
    IN_ONE: tl.constexpr = partials.acc_o is None
    TOKENS: tl.constexpr = TILE.BLOCK_M // FEATURES.GROUP * ROW_TILES
    tile, lane = tl.program_id(0) % partials.blocks, tl.arange(0, 32)
    m_block, head_k, batch = find_query_tile(tile, lane, sizes, optionals, FEATURES, TOKENS)
    if FEATURES.PACKED:
        if batch >= sizes.packed:  # the grid has programs enough for any lengths
            return
    rows = open_rows(
        m_block * TOKENS, head_k, batch, TOKENS, cache, optionals, sizes, numbers, split_size,
        FEATURES, TILE.BLOCK_M,
    )  # fmt: skip
    first, stop = rows.keys.piece, rows.keys.stop
    if not IN_ONE:
        nth = tl.program_id(0) // partials.blocks
        first = place_of(first, nth, partials)
        if partials.lead is not None:
            stop = tl.minimum(first + tl.where(nth == 0, partials.lead, 1), stop)
        if first >= stop:
            return
        if partials.lead is None:
            stop = first + 1
    q_tiles = ()
    for i in tl.static_range(ROW_TILES):
        q_tiles = q_tiles + (load_queries(q, row_tile(rows, i, FEATURES), FEATURES, TILE),)
    states = no_keys_in(ROW_TILES, TILE)
    for piece in range(first, stop):
        pieces = walk(q_tiles, rows, cache, piece * split_size, split_size, FEATURES, TILE)
        states = fold_each(states, pieces)
    for i in tl.static_range(ROW_TILES):
        state, queries = state_in(states, i), row_tile(rows, i, FEATURES)
        if IN_ONE:
            store(out, lse, state, queries, cache, optionals, sizes, 0, FEATURES, TILE.BLOCK_DV)
        else:
            store_partial(partials, state, queries, first, sizes, FEATURES, TILE.BLOCK_DV)


@for_all_lengths(LENGTHS)
@triton.jit
def attn_fold_kernel(
    cache, partials, out, lse, optionals, sizes, numbers, split_size,
    FEATURES: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    PARTS: tl.constexpr = TILE.BLOCK_DV // COLUMNS
    TOKENS: tl.constexpr = BLOCK_M // FEATURES.GROUP
    tile, lane = tl.program_id(0) // PARTS, tl.arange(0, 32)
    m_block, head_k, batch = find_query_tile(tile, lane, sizes, optionals, FEATURES, TOKENS)
    if FEATURES.PACKED:
        if batch >= sizes.packed:
            return
    rows = open_rows(
        m_block * TOKENS, head_k, batch, TOKENS, cache, optionals, sizes, numbers, split_size,
        FEATURES, BLOCK_M,
    )  # fmt: skip
    column = tl.program_id(0) % PARTS * COLUMNS
    state = no_keys(BLOCK_M, COLUMNS)
    first = rows.keys.piece
    programs = rows.keys.stop - first
    if partials.lead is not None:
        programs = tl.maximum(programs - partials.lead, 0) + 1
    for nth in range(0, programs, AT_ONCE):
        # One after the other, each would wait for memory
        parts = ()
        for i in tl.static_range(AT_ONCE):
            piece = place_of(first, nth + i, partials)
            part = load_partial(partials, rows, piece, column, sizes, FEATURES, COLUMNS)
            parts = parts + (part,)
        for i in tl.static_range(AT_ONCE):
            state = fold(state, state_in(parts, i))
    store(out, lse, state, rows, cache, optionals, sizes, column, FEATURES, COLUMNS)


@triton.jit
def place_of(first, nth, partials):
    """The first piece of a block's n-th program, and where the state is that it writes."""
    if partials.lead is None:
        return first + nth
    else:
        return first + tl.where(nth == 0, 0, partials.lead - 1 + nth)


@triton.jit
def no_keys(BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr):
    """The state before the first key."""
    return SplitState(
        tl.zeros([BLOCK_M, COLUMNS], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )


@triton.jit
def no_keys_in(ROW_TILES: tl.constexpr, TILE: tl.constexpr):
    """The state before the first key, for each tile of a block."""
    states = ()
    for _ in tl.static_range(ROW_TILES):
        states = states + (no_keys(TILE.BLOCK_M, TILE.BLOCK_DV),)
    return states


@triton.jit
def fold_each(left, right):
    """The states of each tile over neighbouring keys as one."""
    states = ()
    for i in tl.static_range(len(left)):
        states = states + (fold(state_in(left, i), state_in(right, i)),)
    return states


@triton.jit
def state_in(states, i: tl.constexpr):
    """The i-th; in a loop Triton (3.6) forgets the names of what is in tuples of tuples."""
    acc_o, m_i, l_i = states[i]
    return SplitState(acc_o, m_i, l_i)


@triton.jit
def open_rows(
    start, head_k, batch, TOKENS: tl.constexpr, cache, optionals, sizes, numbers, split_size,
    FEATURES: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The first tile of a block of TOKENS queries of one key head, and the keys that they see."""
    GROUP: tl.constexpr = FEATURES.GROUP
    first_q, seqlen_q, batch_q = batch * 0, sizes.seqlen_q, batch
    if FEATURES.PACKED:
        first_q, seqlen_q = rows_of(optionals.cu_seqlens_q, batch, batch + 1, sizes.seqlen_q)
        batch_q = batch * 0
    seqlen_k = sizes.seqlen_k
    if FEATURES.SEQUSED_K:
        seqlen_k = clamp(tl.load(optionals.seqused_k + batch), 0, sizes.seqlen_k)
    diagonal = seqlen_k - seqlen_q
    row = tl.arange(0, BLOCK_M)
    token, head = row // GROUP, head_k * GROUP + row % GROUP
    is_query = (token < BLOCK_M // GROUP) & (start + token < seqlen_q)
    last = diagonal + tl.minimum(start + TOKENS, seqlen_q) - 1
    keys = keys_seen(diagonal + start, last, seqlen_k, numbers, split_size, FEATURES)
    if FEATURES.PACKED:  # a tile behind all sequences
        stop = tl.where(start < seqlen_q, keys.stop, keys.piece)
        keys = SeenKeys(keys.first, keys.last, keys.piece, stop)
    slope = load_slope(optionals, batch, head[:, None], FEATURES)
    lengths = Lengths(seqlen_q, seqlen_k, 0)  # positions are the diagonal's
    seq = Sequence(lengths, slope, numbers, batch, head[:, None], modifiers_of(optionals), 0)
    position = diagonal + start + token
    return QueryTile(seq, first_q + start + token, is_query, position, head, batch_q, head_k, keys)


@triton.jit
def row_tile(rows, i: tl.constexpr, FEATURES: tl.constexpr):
    """The i-th tile of a block, from its first."""
    BLOCK_M: tl.constexpr = rows.query.shape[0]
    TOKENS: tl.constexpr = BLOCK_M // FEATURES.GROUP
    position = rows.position + i * TOKENS
    is_query = (tl.arange(0, BLOCK_M) // FEATURES.GROUP < TOKENS) & (
        position < rows.seq.lengths.seqlen_k
    )
    query = rows.query + i * TOKENS
    return QueryTile(
        rows.seq, query, is_query, position, rows.head, rows.batch_q, rows.head_k, rows.keys
    )


@triton.jit
def load_queries(q, rows, FEATURES: tl.constexpr, TILE: tl.constexpr):
    """(BLOCK_M, BLOCK_D), or its chunks; zeros where there is no query."""
    first = q.ptr + rows.batch_q.to(tl.int64) * q.batch
    row = rows.query.to(tl.int64) * q.row + rows.head.to(tl.int64) * q.head
    return load_chunks((first, row), rows.is_query, FEATURES.HEADDIM, TILE.BLOCK_D, TILE.CHUNK)


@triton.jit
def walk(q_tiles, rows, cache, start, split_size, FEATURES: tl.constexpr, TILE: tl.constexpr):
    """The piece of keys [start, start + split_size), for each tile of queries."""
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    states = spread_sums(no_keys_in(len(q_tiles), TILE), BLOCK_N)
    first, stop = piece_keys(start, split_size, rows.keys, BLOCK_N)
    nth, row = first_places(first, cache, BLOCK_N)
    page = find_pages(rows.seq.batch, nth, first, stop, cache, BLOCK_N)
    k_scale = k_sequence_scale(cache, rows)
    for n_start in range(first, stop, BLOCK_N):
        k_idx = n_start + tl.arange(0, BLOCK_N)
        is_used = k_idx < stop
        if FEATURES.LEFT:
            is_used = is_used & (k_idx >= rows.keys.first)
        k_rows, v_rows = find_keys(cache, page, row, n_start, rows, BLOCK_N)
        k_tile = load_chunks(k_rows, is_used, FEATURES.HEADDIM, TILE.BLOCK_D, TILE.CHUNK)
        v_tile = load_chunks(v_rows, is_used, FEATURES.HEADDIM_V, TILE.BLOCK_DV, 0)
        if k_tile.dtype != q_tiles[0].dtype:
            k_tile = dequantize(k_tile, q_tiles[0].dtype)
            v_tile = dequantize(v_tile, q_tiles[0].dtype)
        scales = (
            k_row_scales(cache, k_scale, page, row, is_used, rows),
            v_row_scales(cache, page, row, is_used, rows),
        )
        # A tile ahead: the copies of K and V would wait for it
        nth, row = next_places(nth, row, cache, BLOCK_N)
        page = find_pages(rows.seq.batch, nth, n_start + BLOCK_N, stop, cache, BLOCK_N)
        keys = k_idx[None, :], is_used[None, :]
        next_states = ()
        for i in tl.static_range(len(q_tiles)):
            queries = row_tile(rows, i, FEATURES)
            state = state_in(states, i)
            state = attend(
                state, q_tiles[i], k_tile, v_tile, queries, keys, cache, scales, FEATURES
            )
            next_states = next_states + (state,)
        states = next_states
    return add_sums(states)


@triton.jit
def load_chunks(rows, mask, D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr):
    """(rows, BLOCK_D), or in chunks of columns (BLOCK_D // CHUNK, rows, CHUNK); zeros, and nothing
    read, where `mask` is False.
    """
    ptr, row = rows
    if CHUNK == 0:
        columns = tl.arange(0, BLOCK_D)
        inside = mask[:, None] & (columns < D)[None, :]
        return tl.load(ptr + (row[:, None] + columns[None, :]), mask=inside, other=0.0)
    else:
        chunk = tl.arange(0, BLOCK_D // CHUNK)[:, None, None]
        columns = chunk * CHUNK + tl.arange(0, CHUNK)[None, None, :]
        inside = mask[None, :, None] & (columns < D)
        return tl.load(ptr + (row[None, :, None] + columns), mask=inside, other=0.0)


@triton.jit
def store_partial(
    partials, state, rows, piece, sizes, FEATURES: tl.constexpr, BLOCK_DV: tl.constexpr
):
    """What a tile of queries has of a piece."""
    offsets = partial_rows(partials, rows, piece, sizes, FEATURES)
    columns = tl.arange(0, BLOCK_DV)
    tl.store(partials.m_i + offsets, state.m_i, mask=rows.is_query)
    tl.store(partials.l_i + offsets, state.l_i, mask=rows.is_query)
    addresses = partials.acc_o + offsets[:, None] * FEATURES.HEADDIM_V + columns[None, :]
    inside = rows.is_query[:, None] & (columns < FEATURES.HEADDIM_V)[None, :]
    tl.store(addresses, state.acc_o, mask=inside)


@triton.jit
def load_partial(
    partials, rows, piece, column, sizes, FEATURES: tl.constexpr, COLUMNS: tl.constexpr
):
    """The state of a piece, COLUMNS of its output; that of no keys past the last piece."""
    offsets = partial_rows(partials, rows, piece, sizes, FEATURES)
    mask = rows.is_query & (piece < rows.keys.stop)
    columns = column + tl.arange(0, COLUMNS)
    addresses = partials.acc_o + offsets[:, None] * FEATURES.HEADDIM_V + columns[None, :]
    inside = mask[:, None] & (columns < FEATURES.HEADDIM_V)[None, :]
    acc_o = tl.load(addresses, mask=inside, other=0.0)
    m_i = tl.load(partials.m_i + offsets, mask=mask, other=float("-inf"))
    l_i = tl.load(partials.l_i + offsets, mask=mask, other=0.0)
    return SplitState(acc_o, m_i, l_i)


@triton.jit
def partial_rows(partials, rows, piece, sizes, FEATURES: tl.constexpr):
    """Where the rows of a piece lie among the partials."""
    nheads = sizes.nheads * FEATURES.GROUP  # sizes count key heads
    query = rows.batch_q.to(tl.int64) * sizes.seqlen_q + rows.query
    return tl.cast(piece, tl.int64) * partials.rows + query * nheads + rows.head


@triton.jit
def store(
    out, lse, state, rows, cache, optionals, sizes, column,
    FEATURES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Normalises, and writes COLUMNS of the rows that are queries; of the first, lse too."""
    head = rows.head
    sink = load_sink(optionals, head, FEATURES)
    rescale, row_lse = finish(state.m_i, state.l_i, sink, FEATURES)
    acc_o = state.acc_o * rescale[:, None]
    if cache.v_scale is not None:
        acc_o = acc_o * v_sequence_scale(cache, rows)
    columns = column + tl.arange(0, COLUMNS)
    row = out.ptr + rows.batch_q.to(tl.int64) * out.batch
    row = row + rows.query.to(tl.int64)[:, None] * out.row + head.to(tl.int64)[:, None] * out.head
    inside = rows.is_query[:, None] & (columns < FEATURES.HEADDIM_V)[None, :]
    tl.store(row + columns[None, :], acc_o.to(out.ptr.dtype.element_ty), mask=inside)
    nheads = sizes.nheads * FEATURES.GROUP
    offsets = (rows.batch_q.to(tl.int64) * nheads + head) * sizes.seqlen_q + rows.query
    tl.store(lse + offsets, row_lse, mask=rows.is_query & (column == 0))
