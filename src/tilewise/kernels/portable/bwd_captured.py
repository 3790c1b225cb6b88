"""The gradient of a tensor that a score function captured, of one place where it is read.

    score = f(s, ..., t[index])        dt[index] += dS * df / dt[index]

over all pairs of a query and a key. The index may be anything that the function computes, so many
pairs may share an element: programs add with atomics, after summing what shares one within a tile
by the index's own shape (t[h] is one number a tile, t[h, q_idx] one a row). A tile whose pairs
all share one element, as beyond the ends of a table of distances, adds one sum, too: as many
atomics at one address would take a hundred times as long as the rest.

A row's dS sum to dLSE, and here they are weighed, by distances say, before they are summed: what
delta is off, from an O that was rounded, would be all that is left of a small difference of large
sums. So a first pass over the keys recomputes delta from P and dP:

    delta = rowsum(P * dP) - dLSE

Of large scores lse has lost a part (`bwd_rest`), and what is recomputed is P' = 2^rest P. There dO
comes times 2^-rest, so that P' dP' is P dP, and delta is scaled between the passes: no loop keeps a
register for it.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...tile.bounds import count_full, count_partial, full_block, key_blocks, partial_block
from ...tile.schedule import find_query_tile
from ...tile.score import scaled
from ..common.io import load_stats, row_stats
from .queries import open_queries, recompute_block


class CapturedLoad(NamedTuple):
    """A load of a captured tensor in a score function; constants of the kernel."""

    SLOPE: Any  # d f / d t[index], a function as FEATURES.SCORE_MOD is
    PLACE: Any  # (b, h, q_idx, k_idx, captured, target) -> where t[index] lies in the gradient
    BY_QUERY: bool  # whether the index is another for each query
    BY_KEY: bool
    WIDE: bool  # whether the gradient has 2^31 elements or more


@triton.jit
def add_delta(
    delta, queries, n_start, FEATURES: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr
):
    """One tile of keys into the delta of its queries."""
    block = recompute_block(queries, delta * 0.0, n_start, FEATURES, TILE, MASKED)
    return delta + tl.sum(block.ds, 1)


@triton.jit
def add_key_tile(
    target,
    queries,
    delta,
    n_start,
    LOAD: tl.constexpr,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the gradient of one tile of keys to the target."""
    block = recompute_block(queries, delta, n_start, FEATURES, TILE, MASKED)
    s = scaled(block.qk, queries.seq, FEATURES).s
    q_idx = queries.m_start + tl.arange(0, TILE.BLOCK_M)[:, None]
    k_idx = n_start + tl.arange(0, TILE.BLOCK_N)[None, :]
    seq = queries.seq
    batch, head, captured = seq.batch, seq.head, seq.modifiers.score_tensors
    slope = LOAD.SLOPE(s, batch, head, q_idx, k_idx, captured)
    # A pair that is not seen moves nothing, whatever the function's slope is there
    share = tl.where(block.ds == 0.0, 0.0, block.ds * slope)
    if not LOAD.BY_KEY:
        share = tl.sum(share, 1, keep_dims=True)
    if not LOAD.BY_QUERY:
        share = tl.sum(share, 0, keep_dims=True)
    place = tl.broadcast_to(LOAD.PLACE(batch, head, q_idx, k_idx, captured, target), share.shape)
    if not LOAD.WIDE:
        place = place.to(tl.int32)
    first = tl.min(tl.min(place, 1), 0)
    if first == tl.max(tl.max(place, 1), 0):
        tl.atomic_add(target.ptr + first, tl.sum(tl.sum(share, 1), 0), sem="relaxed")
    else:
        tl.atomic_add(target.ptr + place, share, mask=share != 0.0, sem="relaxed")


@triton.jit
def attn_bwd_captured_kernel(
    q,
    k,
    v,
    dout,
    target,
    stats,
    optionals,
    sizes,
    numbers,
    LOAD: tl.constexpr,
    FEATURES: tl.constexpr,
    TILE: tl.constexpr,
):
    """stats: lse, its gradient, and what it has lost."""
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    program, lane = tl.program_id(0), tl.arange(0, 32)
    m_block, head, batch = find_query_tile(program, lane, sizes, optionals, FEATURES, BLOCK_M)
    if FEATURES.PACKED:
        if batch >= sizes.packed:
            return
    tile, rows = (m_block, head, batch), (stats[0], stats[1], None)
    queries = open_queries(q, k, v, dout, rows, tile, optionals, sizes, numbers, FEATURES, TILE)

    blocks = key_blocks(queries.m_start, queries.seq, FEATURES, TILE)
    SPLIT: tl.constexpr = FEATURES.MASK_N // BLOCK_N
    PADDED: tl.constexpr = SPLIT > 0 and FEATURES.SEQUSED_K  # which a block mask does not know
    delta = -queries.delta_or_dlse
    for i in range(count_partial(blocks, SPLIT)):
        n_start = partial_block(blocks, i, SPLIT) * BLOCK_N
        delta = add_delta(delta, queries, n_start, FEATURES, TILE, True)
    for i in range(count_full(blocks, SPLIT)):
        n_start = full_block(blocks, i, SPLIT) * BLOCK_N
        delta = add_delta(delta, queries, n_start, FEATURES, TILE, PADDED)
    rest = row_stats(stats[2], queries.offsets.batch, head, sizes) + queries.offsets.first_q
    q_idx = queries.m_start + tl.arange(0, BLOCK_M)
    delta *= tl.exp2(-load_stats(rest, q_idx, queries.seq.lengths, 0.0, True))
    for i in range(count_partial(blocks, SPLIT)):
        n_start = partial_block(blocks, i, SPLIT) * BLOCK_N
        add_key_tile(target, queries, delta, n_start, LOAD, FEATURES, TILE, True)
    for i in range(count_full(blocks, SPLIT)):
        n_start = full_block(blocks, i, SPLIT) * BLOCK_N
        add_key_tile(target, queries, delta, n_start, LOAD, FEATURES, TILE, PADDED)
