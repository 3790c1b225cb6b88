"""Host side of decoding on Hopper: describes the cache to TMA, allocates partial states, launches.
It knows no length.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl

from ....hardware import REGISTERS
from ....problem import Problem
from ....tile.paging import batch_of, capacity
from ....tile.split_kv import SplitState
from ....tile.split_schedule import SplitSizes
from ....tile.types import SplitPipeline, Strided, Table
from ...common.alignment import ALIGNMENT, CACHE, misplaced
from ...common.arguments import features_of, numbers_of, optionals_of, scales_of, strided_of
from ...common.building import num_sms
from ...common.cached import Cached
from ...common.operand import Within
from ...common.piece_states import states_at, states_in
from ...common.program import checked
from ...common.workspace import Workspace
from .. import descriptors
from ..assembly import ASM
from ..descriptors import GL_DTYPES, DescriptorFields
from ..launch import Launch
from ..tile_counter import tile_counters
from . import eight_bits
from .kernel import hopper_decode_kernel
from .rows import Output
from .scales import Scales
from .tiles import CACHES, ROWS, tile_of
from .work import Counters

Tensor = torch.Tensor
FEWEST_ROWS = 8  # that wgmma takes as columns, and a swizzle repeats after
WORKSPACE = 256 * 2**20  # bytes of partial states; with fewer, tiles are not divided
FEW_QUERIES = 8  # of a sequence: with as many a call waits for memory
HANDED_OUT = 64  # counters before those of tiles: see `work.fetch_next_tile`
OF_CHUNKS = 32  # of these, where those of a launch of chunks begin, which runs at the same time
# Tiles an SM from which two programs on each have about one, whole: of fewer tiles they would make
# shorter parts, and so more states (an H200, 8 queries, 8 sequences: 1.09 of the time)
FULL = 1.75
TOKENS = 4  # of a tile of decodes that run at the same time as chunks


class DecodeLaunch(Launch):
    """A launch of the kernel, also of a cache of 8 bits."""

    __slots__ = ()
    asm = ASM | eight_bits.ASM


def refusal(cached: Cached) -> str | None:
    """Why these kernels do not serve a call, or None."""
    problem, k = cached.problem, cached.k
    if problem.dtype.itemsize != 2:
        return "they multiply 16-bit elements, which the queries must have"
    if problem.group > ROWS:
        return f"{problem.group} query heads per key head are more than {ROWS} rows"
    if max(problem.headdim, problem.headdim_v) > 256:
        return "headdim is over 256"
    unit = ALIGNMENT // k.itemsize
    if problem.headdim % unit or problem.headdim_v % unit:
        return f"TMA copies rows of a multiple of {unit} elements of {k.dtype}"
    block_n = tile_of(problem).BLOCK_N
    if cached.piece_size % block_n:
        return f"split_size={cached.piece_size} is not a multiple of {block_n} keys"
    return misplaced(CACHE["hopper"], q=cached.q, k=k, v=cached.v)


def rows_of(problem: Problem, cached: Cached, batch: int, chunk: int = 0) -> int:
    """Rows of a tile, which decide no bit: of as many queries as a sequence has on average, or of
    few where long sequences are chunks, and other launches'.
    """
    group = problem.group
    queries = max(triton.cdiv(cached.q.shape[:-2].numel(), batch), 1)
    queries = min(queries, TOKENS) if chunk else queries
    # Of 8 bits two programs share an SM to 32 rows, and are faster than one of 64: only where a
    # group is as many
    most = ROWS if cached.k.dtype not in CACHES or group > 32 else 32
    return min(max(triton.next_power_of_2(queries * group), FEWEST_ROWS), most)


def warpgroups_of(problem: Problem, cached: Cached, batch: int, programs: int) -> int:
    """How many warpgroups share tiles of keys, which decides no bit: two where sequences have many
    queries, by their number on average, and tiles of two are as many as programs, or almost.
    """
    queries = cached.q.shape[:-2].numel()
    if cached.k.dtype in CACHES or problem.headdim_v > 128:  # two have no registers for these
        return 1
    tiles = queries * problem.nheads / (2 * ROWS)
    return 2 if queries > FEW_QUERIES * batch and tiles > 0.75 * programs else 1


def launch_of(
    cached: Cached,
    problem: Problem,
    out: Any,
    lse: Any,
    work: Workspace,
    *,
    most: int | None = None,
    chunk: int = 0,
    states: SplitState | None = None,
) -> Launch:
    """The launch for any lengths, of operands, for `most` SMs; by default all. With `chunk`,
    sequences of so many queries are computed by another launch. With `states` those of pieces are
    written there, by piece and row, and nothing else.
    """
    q, k, extras = cached.q, cached.k, cached.extras
    batch, room = batch_of(q, extras.cu_seqlens_q), capacity(k, cached.page_table)
    if most is None:
        most = num_sms(q.device) if q.is_cuda else 4
    tile = tile_for(problem, cached, batch, most, chunk)._replace(STATES=states is not None)
    is_packed = extras.cu_seqlens_q is not None
    rows, queries = q.shape[-3], q.shape[:-2].numel()
    numbers = numbers_of(cached.scalars, rows, room)
    tokens = tile.ROWS // problem.group
    tiles = problem.nheads_k * (triton.cdiv(rows, tokens) * (1 if is_packed else batch))
    tiles += problem.nheads_k * batch * is_packed
    pieces = triton.cdiv(room, cached.piece_size)
    # Partial states of all pieces, or as many as there is memory for
    query_bytes = 4 * (problem.headdim_v + 2) * problem.nheads
    held = min(queries * pieces if pieces > 1 else 0, WORKSPACE // query_bytes, 2**25 - 1)
    partials = states or states_in(work, (max(held, 1) * problem.nheads,), problem.headdim_v)
    packed = batch if is_packed else 0
    keys, values = described(cached, tile)
    tail = strided_of(out) if cached.clears_tail else None
    args = dict(q=strided_of(q), k=keys, v=values, table=table_of(cached))
    args |= dict(output=Output(strided_of(out), lse, partials=partials, tail=tail))
    handed_out = tile_counters(HANDED_OUT + queries * problem.nheads_k)
    by_tile = Within("counters of tiles", handed_out.name, HANDED_OUT)
    args |= dict(counters=Counters(handed_out, by_tile))
    args |= dict(optionals=optionals_of(extras, problem.mods))
    args |= dict(
        sizes=SplitSizes(packed, problem.nheads_k, rows, room, batch, cached.piece_size, held)
    )
    args |= dict(numbers=numbers)
    args["scales"] = Scales(**scales_of("k", cached.k_descale), **scales_of("v", cached.v_descale))
    features = features_of(problem, has_fast_tanh=True)._replace(CHUNK=chunk)
    options = dict(num_warps=4)
    if tile.PROGRAMS > 1:  # of 8 warps each, whose registers setmaxnreg then divides
        options["maxnreg"] = REGISTERS // (tile.PROGRAMS * 8 * 32)
    programs = min(tiles * max(pieces, 1), most * tile.PROGRAMS)
    constants = dict(FEATURES=features, TILE=tile)
    return checked(DecodeLaunch(hopper_decode_kernel, programs, args, constants, options))


def tile_for(
    problem: Problem, cached: Cached, batch: int, programs: int, chunk: int
) -> SplitPipeline:
    """The tile of a call, for so many programs."""
    by_row = [x is not None and x.dim() == 3 for x in (cached.k_descale, cached.v_descale)]
    warpgroups = 1 if chunk else warpgroups_of(problem, cached, batch, programs)
    rows = rows_of(problem, cached, batch, chunk)
    tiles = cached.q.shape[:-2].numel() * problem.nheads / rows
    return tile_of(
        problem,
        0 if cached.page_table is None else cached.k.shape[1],
        kept=cached.k.dtype,
        row_scales=sum(by_row),
        warpgroups=warpgroups,
        rows=rows,
        is_beside_chunks=chunk > 0,
        has_many_tiles=tiles >= FULL * programs,
    )


def described(cached: Cached, tile: SplitPipeline) -> list[DescriptorFields | Strided]:
    """Keys and values as TMA takes them, (pages, nheads_k, page_size, headdim), in boxes of a block
    of keys or of a page, whichever is shorter; or as threads do.
    """
    k, v = (x.view(torch.int8) if tile.CACHE else x for x in cached[1:3])
    if not tile.BY_TMA:
        return [strided_of(x) for x in (k, v)]
    page_size = tile.BLOCK_N
    if cached.page_table is not None:
        page_size = min(page_size, cached.k.shape[1])
    return [
        by_head(x, [1, 1, page_size, block], gl.int8 if tile.CACHE else GL_DTYPES[x.dtype])
        for x, block in ((k, tile.BLOCK_D), (v, tile.BLOCK_DV))
    ]


def by_head(x: Tensor, block: list[int], element: Any) -> DescriptorFields:
    """A cache in boxes of one head."""
    layout = gl.NVMMASharedLayout.get_default_for(block, element)
    return descriptors.by_head(x, block, layout)


def table_of(cached: Cached) -> Table:
    """Where pages lie; without a table a sequence is a page."""
    table, k = cached.page_table, cached.k
    if table is None:
        return Table(None, 0, 0, 0)
    table = table if table.stride(1) == 1 else table.contiguous()
    return Table(table, table.stride(0), num_pages=k.shape[0], page_size=k.shape[1])


def launches_of(
    cached: Cached, problem: Problem, out: Any, lse: Any, work: Workspace, most: int | None = None
) -> list[Launch]:
    """The one launch, for `most` SMs."""
    return [launch_of(cached, problem, out, lse, work, most=most)]


def launches_of_states(
    cached: Cached, problem: Problem, acc_o: Any, numbers: Any, work: Workspace
) -> list[Launch]:
    """The launch that writes the states of all pieces, and folds none."""
    states = states_at(acc_o, numbers)
    return [launch_of(cached, problem, acc_o, numbers, work, states=states)]
