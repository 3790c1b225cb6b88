"""Calls with a KV cache on Hopper, by one of two schedules.

Chunks of prefill take that of the training forward: each tile of queries walks all keys that it
sees. Its tiles are large, and its products overlap with its exponentials, so it is faster where a
sequence has tiles enough for the GPU. All others, and all that ask for the contract of pieces
(docs/design/cache.md), take that of decoding, which divides the keys among programs.

A call's form and one sequence's numbers say which, and no batch mates: so a sequence has the same
bits whatever is beside it.

A step of packed queries may have both. Decodes wait for memory and chunks for tensor cores, so two
launches run at the same time: the second begins where the first leaves SMs to it. Which sequences
are whose they find from the lengths on the device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from ....problem import Problem
from ....tile.paging import batch_of, capacity
from ....tile.types import Table
from ...common import piece_states
from ...common.alignment import TMA, misplaced
from ...common.arguments import scales_of
from ...common.cached import Cached
from ...common.decode_step import DecodeStep, run
from ...common.operand import Within
from ...common.workspace import Workspace
from ..decode import launch as decoding
from ..decode.scales import Scales
from ..decode.tiles import CACHES, is_box
from ..descriptors import block_of, is_in_steps, ragged_steps
from ..layouts import column_groups
from .launch import KeyCache, pack_of, plan_for, steps_of
from .parts_launch import BLOCKS, count_of, sms_of

Tensor = torch.Tensor
TILE_ROWS = 128  # of queries, times the query heads of a key head where these share a tile
# Of one sequence. With fewer, keys that are divided keep more of the GPU busy than larger tiles
# gain: an H100, 32 query heads, 8 of keys, 32Ki keys, decoding's time over the other's: 1.10 with
# 128 queries, which are 32 tiles, 1.38 with 256, 1.42 with 512; of 8 sequences of 128 1.39
FEWEST_TILES = 32
# Of tiles whose keys have parts: with 32 queries, which are 8 tiles, of one sequence with 4Ki, 8Ki
# and 32Ki keys decoding's time over theirs is 1.1, 1.4 and 1.6
FEWEST_WITH_PARTS = 8
MOST_COPIES = 32  # of a block: with twice as many, pages of 8 at headdim 192, 1.4 KB a thread spill
LAST = 2**31 - 1  # a coordinate of TMA

refusal = decoding.refusal  # what decoding refuses, the training forward is not asked for
write_states = functools.partial(piece_states.write_states, decoding.launches_of_states)


def least_queries(nheads: int, group: int) -> int:
    """How many queries a sequence must have for the schedule of the training forward."""
    of_tiles = triton.cdiv(FEWEST_TILES * TILE_ROWS, nheads)
    return max(of_tiles, triton.cdiv(TILE_ROWS, group), decoding.FEW_QUERIES + 1)


def least_of(cached: Cached) -> int:
    """`least_queries` of a call, or fewer where the keys of a tile have parts; of a packed one half
    as many, because others of a step keep the GPU busy, as a power of two, which is what is known
    of its bound.
    """
    nheads = cached.q.shape[-2]
    group = nheads // cached.k.shape[2]
    least = least_queries(nheads, group)
    if blocks_of(cached) == BLOCKS:
        of_tiles = triton.cdiv(FEWEST_WITH_PARTS * TILE_ROWS, nheads)
        fewest = max(of_tiles, triton.cdiv(TILE_ROWS, group), decoding.FEW_QUERIES + 1)
        return min(least, fewest)
    if cached.extras.cu_seqlens_q is None:
        return least
    return max(triton.next_power_of_2(least) // 2, 2 * decoding.FEW_QUERIES)


def why_in_pieces(cached: Cached, out: Tensor) -> str | None:
    """Why keys are summed in pieces and these divided among programs; None where each tile of
    queries walks all keys: of packed queries, in sequences of `least_of` or more.
    """
    q, k, v = cached[:3]
    least = least_of(cached)
    if cached.split_size:
        return "split_size or tilewise.batch_invariant asks for it"
    if cached.extras.cu_seqlens_q is not None:
        if cached.longest < least:
            return (
                f"packed queries, of which max_seqlen_q promises no sequence with {least} or more"
            )
        if not capacity(k, cached.page_table):
            return "there is room for no key"
    elif q.shape[1] < least:
        return f"a sequence has fewer than {least} queries, too few tiles"
    if k.dtype != q.dtype and (reason := why_not_converted(cached)):
        return reason
    if cached.mask:
        return "mask_mod counts queries from the sequence's first key"
    if cached.page_table is not None and (reason := why_no_pages(cached)):
        return reason
    is_ragged = not (cached.extras.seqused_k is cached.extras.cu_seqlens_q is None)
    if is_ragged and not (is_in_steps(k) and is_in_steps(v)):
        return "sequences or pages are no whole number of heads apart in memory"
    return misplaced(dict.fromkeys(("q", "k", "v", "out"), TMA), q=q, k=k, v=v, out=out)


def why_not_converted(cached: Cached) -> str | None:
    """Why the training forward does not read such a cache of 8 bits."""
    problem = cached.problem
    block_d, block_dv = map(block_of, (problem.headdim, problem.headdim_v))
    if block_d != block_dv or block_d > 128:
        return "the cache has 8 bits, and headdims are over 128 or differ: no room to convert it"
    return None


def why_no_pages(cached: Cached) -> str | None:
    """Why the training forward does not read such pages."""
    k, v = cached.k, cached.v
    queries, chunk = in_batch(cached.q), chunk_of(cached)
    tile = plan_for(cached.problem, queries, extras=cached.extras, cache=KeyCache(chunk=chunk)).tile
    page_size = k.shape[1]
    if not k.shape[0] or not is_box(page_size, tile.BLOCK_N):
        return f"pages of {page_size} keys are no boxes of TMA: powers of two from 8 on are"
    if tile.BLOCK_N // page_size * (column_groups(tile.BLOCK_D) + 1) > MOST_COPIES:
        return f"a block of keys would be over {MOST_COPIES} copies of pages"
    if cached.extras.seqused_k is None:
        return "pages without seqused_k"
    if any(x.shape[0] * ragged_steps(x)[2] + x.shape[2] > LAST for x in (k, v)):
        return "there are more pages, times the heads from one to the next, than TMA counts"
    return None


def in_batch(x: Any) -> Any:
    """Packed rows as a batch of one; a batch as it is."""
    return x if x.dim() == 4 else x.unsqueeze(0)


def chunk_of(cached: Cached) -> int:
    """From how many queries on packed sequences are chunks; 0 where queries are not packed."""
    return 0 if cached.extras.cu_seqlens_q is None else least_of(cached)


def launches_of(
    cached: Cached, problem: Problem, out: Any, lse: Any, work: Workspace, chunk: int = 0
) -> list[Any]:
    """The launches of chunks; with `chunk`, from as many queries on, behind that of other
    sequences, whose counters they share.
    """
    steps, counter, scales = [], None, None
    if cached.k.dtype in CACHES:
        scales = Scales(**scales_of("k", cached.k_descale), **scales_of("v", cached.v_descale))
    if chunk:
        steps = [decoding.launch_of(cached, problem, out, lse, work, chunk=chunk)]
        counters = steps[0].args["counters"].counter
        counter = Within("counter of chunks", counters.name, decoding.OF_CHUNKS)
    parts = parts_of(cached, problem)
    cache = KeyCache(pages_of(cached), chunk, counter=counter, parts=parts, scales=scales)
    return steps + steps_of(
        problem,
        cached.scalars,
        cached.extras,
        work,
        q=in_batch(cached.q),
        k=cached.k,
        v=cached.v,
        out=in_batch(out),
        lse=lse,
        cache=cache,
    )


def blocks_of(cached: Cached) -> int:
    """Blocks of keys that a tile is planned for; 0 where the keys of a tile have no parts: of
    packed queries, and without lengths.
    """
    extras, scalars = cached.extras, cached.scalars
    if extras.cu_seqlens_q is not None or extras.seqused_k is None:
        return 0
    if scalars.left < 0:
        return BLOCKS
    return min(triton.cdiv(TILE_ROWS + scalars.left + max(scalars.right, 0), TILE_ROWS), BLOCKS)


def parts_of(cached: Cached, problem: Problem) -> int:
    """How many programs share the keys of each tile."""
    q, blocks = cached.q, blocks_of(cached)
    if not blocks:
        return 1
    seqlen_q, pack = q.shape[1], pack_of(problem, q.shape[1])
    heads = problem.nheads_k if pack > 1 else problem.nheads
    tiles = heads * triton.cdiv(seqlen_q * pack, TILE_ROWS)
    return count_of(tiles, sms=sms_of(q.device), blocks=blocks)


def pages_of(cached: Cached) -> Table | None:
    """Where the pages of a cache lie."""
    return None if cached.page_table is None else decoding.table_of(cached)


def forward(cached: Cached, out: Tensor, lse: Tensor) -> DecodeStep | None:
    """As `run`, by the schedule that the call takes."""
    if not batch_of(cached.q, cached.extras.cu_seqlens_q):
        return None
    if why_in_pieces(cached, out) is not None:
        return run(cached, out, lse, decoding.launches_of)
    return run(cached, out, lse, functools.partial(launches_of, chunk=chunk_of(cached)))
