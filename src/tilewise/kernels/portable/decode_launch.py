"""Host side of attention with a KV cache: no length is known here."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton

from ...problem import Problem
from ...tile.paging import batch_of, capacity
from ...tile.split_kv import SplitState
from ...tile.types import Sizes, Strided, Tile
from ..common import piece_states
from ..common.arguments import features_of, numbers_of, optionals_of, scales_of, strided_of
from ..common.building import num_sms
from ..common.cached import Cached
from ..common.decode_step import DecodeStep, run
from ..common.outputs import empty_out
from ..common.program import Launch, checked
from .decode import Cache, Partials, attn_fold_kernel, attn_split_kernel
from .plan import padded_headdims

Tensor = torch.Tensor
WORKSPACE = 256 * 2**20  # bytes of what lies between the launches; a longer walk needs none
WARPS, STAGES = 4, 3
PROGRAMS = 2  # that an SM has room for at a time
INTERPRETED_SMS = 128  # of the GPU that calls on CPU tensors are planned for
LEAD = 8192  # keys that one program walks at most, where others could share its pieces
RANKS_COLUMNS = 8  # of the output that a program of the fold of all ranks' states has
ROOM = 24 * 1024  # elements of queries and outputs that a program keeps in registers
ROOM_BESIDE = 8 * 1024  # the same where a second state and addresses of keys have room there, too


class Choice(NamedTuple):
    """How a problem is computed. Of it, a row's bits depend on the tile and the warps alone."""

    tile: Tile
    warps: int
    stages: int
    rows: int  # of a tile of the first kernel, in which each lies as one of `tile`
    row_tiles: int  # such tiles that share each tile of keys
    columns: int  # of the output that a program of the fold has
    at_once: int  # pieces that it loads before it folds the first


def choice_of(problem: Problem, queries: int = 1) -> Choice:
    """For sequences of about so many queries."""
    tile = tile_of(problem)
    columns = min(tile.BLOCK_DV, 32)
    at_once = min(8, max(1, 2**14 // (tile.BLOCK_M * columns)))
    rows, row_tiles = tile.BLOCK_M, row_tiles_of(problem, tile, queries)
    if row_tiles > 1 and has_wide_tiles(problem, tile):
        rows, row_tiles = 2 * rows, row_tiles // 2
    is_wide = tile.CHUNK > 0 and max(tile.BLOCK_D, tile.BLOCK_DV) > 256
    # In fp32 more have no room in the shared memory of some GPUs
    stages = STAGES if problem.dtype.itemsize == 2 else 1 if is_wide else 2
    return Choice(tile, WARPS, stages, rows, row_tiles, columns, at_once)


def has_wide_tiles(problem: Problem, tile: Tile) -> bool:
    """Whether two tiles of queries can be one, whose warps exchange what they have of both at a
    time. Of 32 rows NVIDIA's compiler gives each warp all, and of each the columns that it has of
    16: so a row's sums are the same. Of 64 it takes other instructions.
    """
    return problem.dtype.itemsize == 2 and tile.BLOCK_M == 16 and torch.version.hip is None


def row_tiles_of(problem: Problem, tile: Tile, queries: int) -> int:
    """As many as the queries fill, and as have room in registers: products in fp32 leave none,
    and softcap with ALiBi a quarter.
    """
    if problem.dtype.itemsize == 4:
        return 1
    room = ROOM // 4 if problem.has_softcap and problem.has_alibi else ROOM
    tiles = triton.cdiv(queries, tile.BLOCK_M // problem.group)
    one = tile.BLOCK_M * (tile.BLOCK_D + tile.BLOCK_DV)
    return max(n for n in (1, 2, 4) if n == 1 or (n < 2 * tiles and n * one <= room))


def tile_of(problem: Problem) -> Tile:
    """One tile for a problem, whatever its lengths: a row's bits depend on it."""
    block_d, block_dv = padded_headdims(problem)
    block_m = max(16, triton.next_power_of_2(problem.group))
    block_n = 64 if max(block_d, block_dv) <= 128 else 32
    if problem.dtype.itemsize == 4:
        # Products in fp32 are sums term by term: the error of a short one is smaller
        chunk = min(32, block_d) if block_m * block_d <= 2**14 else 0
        return Tile(block_m, block_n // 2, block_d, block_dv, False, chunk)
    return Tile(block_m, block_n, block_d, block_dv, False)


def refusal(cached: Cached) -> str | None:
    """Why these kernels do not serve a call, or None."""
    if cached.k.dtype != cached.q.dtype and cached.q.dtype.itemsize != 2:
        return "with a cache of 8 bits they multiply 16-bit elements: q must be bfloat16 or float16"
    return None


def converts_e4m3(device: torch.device) -> bool:
    """Whether a device has instructions for it; else the kernels read bits."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device) >= (8, 9)


def readable(cached: Cached) -> Cached:
    """The cache as the device's kernels read it."""
    if cached.k.dtype != torch.float8_e4m3fn or converts_e4m3(cached.q.device):
        return cached
    k, v = (x.view(torch.uint8) for x in (cached.k, cached.v))
    return cached._replace(k=k, v=v)


def forward(cached: Cached, out: Tensor, lse: Tensor) -> DecodeStep | None:
    """As `run`."""
    return run(cached, out, lse, launches_of)


def launches_of(
    cached: Cached,
    problem: Problem,
    out: Any,
    lse: Any,
    work: Any,
    workspace: int = WORKSPACE,
    *,
    sms: int | None = None,
    states: SplitState | None = None,
    room: int | None = None,
) -> list[Launch]:
    """One launch or two, by how many pieces there may be and whether their states have room, for a
    GPU of so many SMs; by default the tensors'. With `states`, which lie there, two; `room` is of
    a sequence's keys, if these lie on several ranks.
    """
    if sms is None:
        sms = num_sms(cached.q.device) if cached.q.is_cuda else INTERPRETED_SMS
    cached = readable(cached)
    q, k, extras = cached.q, cached.k, cached.extras
    batch, fit = batch_of(q, extras.cu_seqlens_q), capacity(k, cached.page_table)
    if room is not None or k.shape[0] == 0:
        fit = room or 0
    is_packed = extras.cu_seqlens_q is not None
    rows = q.shape[-3]
    sizes = Sizes(batch if is_packed else 0, problem.nheads_k, rows, fit)
    numbers = numbers_of(cached.scalars, rows, fit)
    # How many queries each packed sequence has, only the device knows
    choice = choice_of(problem, triton.cdiv(rows, max(batch, 1)) if is_packed else rows)
    if states is not None:  # of more pieces than else: more programs, and more states in flight
        at_once = max(1, min(32, 2**12 // (choice.tile.BLOCK_M * RANKS_COLUMNS)))
        choice = choice._replace(columns=RANKS_COLUMNS, at_once=at_once)
    of_tile, of_block = (n // problem.group for n in (choice.tile.BLOCK_M, choice.rows))
    of_block *= choice.row_tiles
    tiles, blocks = (
        problem.nheads_k * most_blocks(batch, rows, n, is_packed) for n in (of_tile, of_block)
    )
    pieces = triton.cdiv(fit, cached.piece_size)
    filled = problem.nheads_k * max(batch, q.shape[:-2].numel() // of_block)
    size = choice.rows * choice.row_tiles * (choice.tile.BLOCK_D + choice.tile.BLOCK_DV)
    has_room = size <= ROOM_BESIDE
    features, lead = features_of(problem), 1
    # Left of a window tiles of a block begin with different pieces, of which the fold knows its own
    if has_room and not features.LEFT:
        lead = lead_of(filled, pieces, cached.piece_size, sms)
    all_rows = q.shape[:-2].numel() * problem.nheads
    need = pieces * all_rows * (problem.headdim_v + 2) * 4
    in_one = states is None and (pieces <= lead or need > workspace)
    lead = lead if states is None else 1
    partials = Partials(None, None, None, rows=0, blocks=blocks, lead=None)
    if not in_one:
        of_pieces = pieces, all_rows
        acc_o, m_i, l_i = states or piece_states.states_in(work, of_pieces, problem.headdim_v)
        several = lead if lead > 1 else None
        partials = Partials(acc_o, m_i, l_i, rows=all_rows, blocks=blocks, lead=several)
    scales = dict(k_scale=cached.k_descale, v_scale=cached.v_descale)
    cache = cache_of(k, cached.v, table=cached.page_table, **scales)
    if has_room and cache.page_table is not None and cache.page_size > 0:
        tile_pages, remainder = divmod(choice.tile.BLOCK_N, cache.page_size)
        cache = cache._replace(tile_pages=None if remainder else tile_pages)
    if cache.v[1:] == cache.k[1:]:
        cache = cache._replace(v=Strided(cache.v.ptr, None, None, None))
    if cached.clears_tail:
        partials = partials._replace(tail=strided_of(out))
    args = dict(q=strided_of(q), cache=cache, partials=partials, out=strided_of(out), lse=lse)
    args |= dict(optionals=optionals_of(extras, problem.mods), sizes=sizes, numbers=numbers)
    args |= dict(split_size=min(cached.piece_size, 2**30))
    common = dict(FEATURES=features, TILE=choice.tile)
    wide = choice.tile._replace(BLOCK_M=choice.rows)
    constants = common | dict(TILE=wide, ROW_TILES=choice.row_tiles)
    options = dict(num_warps=choice.warps, num_stages=choice.stages)
    programs = blocks if in_one else blocks * (pieces - lead + 1)
    launches = [Launch(attn_split_kernel, programs, args, constants, options)]
    if not in_one:
        args = {name: x for name, x in args.items() if name != "q"}
        constants = common | dict(COLUMNS=choice.columns, AT_ONCE=choice.at_once)
        programs = tiles * (choice.tile.BLOCK_DV // choice.columns)
        options = dict(num_warps=WARPS, num_stages=STAGES)
        launches.append(Launch(attn_fold_kernel, programs, args, constants, options))
    return list(map(checked, launches))


def launches_of_states(
    cached: Cached, problem: Problem, acc_o: Any, numbers: Any, work: Any
) -> list[Launch]:
    """The launch that writes the states of all pieces."""
    states = piece_states.states_at(acc_o, numbers)
    return launches_of(cached, problem, acc_o, numbers, work, states=states)[:1]


write_states = functools.partial(piece_states.write_states, launches_of_states)


def fold_states(cached: Cached, states: Tensor, used: Tensor, turn: int) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of the states of all ranks, (ranks, ...), of sequences of so many keys;
    `turn` as `by_position` has it.
    """
    q, headdim_v = cached.q, cached.v.shape[3]
    planes = piece_states.by_position(states, q, headdim_v, turn)
    room = len(planes[0]) * cached.piece_size
    out, lse = empty_out(q, headdim_v)
    extras = cached.extras._replace(seqused_k=used, captured=planes)
    whole = cached._replace(extras=extras, mask="")
    run(whole, out, lse, functools.partial(launches_of_fold, room=room))
    return out, lse


def launches_of_fold(
    cached: Cached, problem: Problem, out: Any, lse: Any, work: Any, room: int
) -> list[Launch]:
    """The launch that folds states, which were captured."""
    acc_o, numbers = cached.extras.captured
    states = piece_states.states_at(acc_o, numbers)
    cached = cached._replace(extras=cached.extras._replace(captured=()))
    return launches_of(cached, problem, out, lse, work, states=states, room=room)[1:]


def most_blocks(batch: int, rows: int, tokens: int, is_packed: bool) -> int:
    """Blocks of so many tokens of a key head; where sequences are packed, the most there may be."""
    if not is_packed:
        return batch * triton.cdiv(rows, tokens)
    return (rows + min(batch, rows) * (tokens - 1)) // tokens


def lead_of(blocks: int, pieces: int, split_size: int, sms: int) -> int:
    """How many pieces of a block one program walks. Others would write the state of each for the
    fold to read, 16 KB for 32 rows of 128 columns and 256 KB of keys and values. A GPU's share of
    all pieces, if sequences were as long as they may be; and not many, for they may be one long one
    among short ones.
    """
    share = triton.cdiv(blocks * pieces, PROGRAMS * sms)
    return max(1, min(pieces, share, LEAD // split_size))


def cache_of(
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Cache:
    """A cache as kernels take it."""
    table = table if table is None or table.stride(1) == 1 else table.contiguous()
    width, stride = (1, 0) if table is None else (table.shape[1], table.stride(0))
    return Cache(
        k=strided_of(k),
        v=strided_of(v),
        page_table=table,
        table_stride=stride,
        pages=width,
        num_pages=k.shape[0],
        page_size=k.shape[1],
        **scales_of("k_scale", k_scale),
        **scales_of("v_scale", v_scale),
    )
