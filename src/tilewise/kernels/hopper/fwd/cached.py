"""Calls with a KV cache on Hopper, by one of two schedules.

Chunks of prefill take that of the training forward: each tile of queries walks all keys that it
sees. Its tiles are large, and its products overlap with its exponentials, so it is faster where a
sequence has tiles enough for the GPU. All others, and all that ask for the contract of pieces
(docs/design/cache.md), take that of decoding, which divides the keys among programs.

A call's form and one sequence's numbers say which, and no batch mates: so a sequence has the same
bits whatever is beside it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from ....tile.paging import batch_of
from ....tile.types import Table
from ...common import decode_step
from ...common.alignment import TMA, misplaced
from ...common.cached import Cached
from ...common.relaunch import distinct_cached
from ..decode import launch as decoding
from ..decode.tiles import is_box
from ..descriptors import is_in_steps, ragged_steps
from ..layouts import column_groups
from ..tile_counter import counter
from .launch import NO_BIAS, Forward, ForwardRelaunch, FwdArgs, Plan, arguments, plan_for

Tensor = torch.Tensor
TILE_ROWS = 128  # of queries, times the query heads of a key head where these share a tile
# Of one sequence. With fewer, keys that are divided keep more of the GPU busy than larger tiles
# gain: an H100, 32 query heads, 8 of keys, 32Ki keys, decoding's time over the other's: 1.10 with
# 128 queries, which are 32 tiles, 1.38 with 256, 1.42 with 512; of 8 sequences of 128 1.39
FEWEST_TILES = 32
MOST_COPIES = 32  # of a block: with twice as many, pages of 8 at headdim 192, 1.4 KB a thread spill
LAST = 2**31 - 1  # a coordinate of TMA

refusal = decoding.refusal  # what decoding refuses, the training forward is not asked for


def least_queries(nheads: int, group: int) -> int:
    """How many queries a sequence must have for the schedule of the training forward."""
    of_tiles = triton.cdiv(FEWEST_TILES * TILE_ROWS, nheads)
    return max(of_tiles, triton.cdiv(TILE_ROWS, group), decoding.FEW_QUERIES + 1)


def why_in_pieces(cached: Cached, out: Tensor) -> str | None:
    """Why keys are summed in pieces and these divided among programs; None where each tile of
    queries walks all keys.
    """
    q, k, v = cached[:3]
    least = least_queries(q.shape[-2], q.shape[-2] // k.shape[2])
    if cached.split_size:
        return "split_size or tilewise.batch_invariant asks for it"
    if cached.extras.cu_seqlens_q is not None:
        return "packed queries: decodes and chunks of one call share a launch"
    if q.shape[1] < least:
        return f"a sequence has fewer than {least} queries, too few tiles"
    if k.dtype != q.dtype:
        return "the cache has 8 bits"
    if cached.mask:
        return "mask_mod counts queries from the sequence's first key"
    if cached.page_table is not None and (reason := why_no_pages(cached)):
        return reason
    if cached.extras.seqused_k is not None and not (is_in_steps(k) and is_in_steps(v)):
        return "sequences or pages are no whole number of heads apart in memory"
    return misplaced(dict.fromkeys(("q", "k", "v", "out"), TMA), q=q, k=k, v=v, out=out)


def why_no_pages(cached: Cached) -> str | None:
    """Why the training forward does not read such pages."""
    k, v = cached.k, cached.v
    tile = plan_for(cached.problem, cached.q, extras=cached.extras).tile
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


def plan_of(cached: Cached, out: Tensor, lse: Tensor) -> tuple[Plan, FwdArgs]:
    """What a chunk selects, and the kernel's arguments."""
    pages = pages_of(cached)
    plan = plan_for(cached.problem, cached.q, extras=cached.extras, pages=pages)
    tensors = *cached[:3], out, lse, cached.extras
    return plan, arguments(cached.problem, plan, *tensors, cached.scalars, pages)


def pages_of(cached: Cached) -> Table | None:
    """Where the pages of a cache lie."""
    return None if cached.page_table is None else decoding.table_of(cached)


class ChunkStep(decode_step.DecodeStep):
    """The launch of a chunk that was launched before, for other tensors of its signature."""

    def __init__(self, cached: Cached, relaunch: ForwardRelaunch, out: Tensor, lse: Tensor) -> None:
        tensors = cached.tensors
        inputs = [x for x in tensors if x is not None]
        super().__init__(cached.q.device, inputs, out, lse, ())
        self.relaunch, self.of = relaunch, relaunch.described.at
        self.has_pages = cached.page_table is not None
        self.places = [i for i, x in enumerate(cached.extras.optional) if x is not None]
        self.count = len(cached.extras.optional)

    def launch(self, stream: int, row: list[Any]) -> None:
        """Launches it; `row` has q, k, v, the page table, the other tensors, out and lse."""
        q, k, v, *addresses, out, lse = row
        table = (addresses.pop(0),) if self.has_pages else ()
        extras = [0] * self.count
        for place, address in zip(self.places, addresses):
            extras[place] = address
        relaunch, of = self.relaunch, self.of
        gaps = lse, counter(self.device, self.index, stream), *(extras if self.places else ())
        described = *of(0, q), *of(1, k), *of(2, v), *of(3, out)
        args = relaunch.args.filled((*gaps, *table))
        relaunch.kernel(stream, *described, *args, *NO_BIAS, *relaunch.constants)


def forward(cached: Cached, out: Tensor, lse: Tensor) -> decode_step.DecodeStep | None:
    """Writes `out` and `lse` of all queries that belong to a sequence. Returns how it is done
    again, where the call has an entry.
    """
    is_empty = not out.numel() or not batch_of(cached.q, cached.extras.cu_seqlens_q)
    if is_empty or why_in_pieces(cached, out) is not None:
        return decoding.forward(cached, out, lse=lse)
    if cached.entry is not None:
        cached, out = distinct_cached(cached), out.detach()
    launched = Forward(cached.problem, cached.scalars)
    launched.first(*cached[:3], out, lse, cached.extras, pages_of(cached))
    if cached.entry is None or launched.relaunch is None:
        return None
    return ChunkStep(cached, launched.relaunch, out=out, lse=lse)
