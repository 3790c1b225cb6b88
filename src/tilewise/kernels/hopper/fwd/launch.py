"""Host side of the forward: picks the tile, describes tensors to TMA, plans the launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl

from ....hardware import SHARED_MEMORY
from ....problem import LONG_SEQLEN, NO_EXTRAS, Extras, Problem, Scalars
from ....tile.schedule import even_group
from ....tile.types import Pipeline, Queue, Table
from ....tuning.select import architecture, select
from ....tuning.tables import Key
from ...common.arguments import features_of, numbers_of, optionals_of, sizes_of
from ...common.operand import Gap, Operand
from ...common.program import Program, TorchStep, checked
from ...common.results import FORWARD, forward_of, names_with, outputs_of
from ...common.workspace import Workspace
from .. import assembly
from ..bias_memory import bias_step, has_tiles, in_pairs
from ..decode import eight_bits
from ..decode.scales import Scales
from ..decode.tiles import CACHES
from ..descriptors import (
    GL_DTYPES,
    Plan,
    block_of,
    descriptors,
    in_shared,
    is_in_steps,
    is_ragged,
    ragged_steps,
)
from ..launch import Launch, programs_of
from ..layouts import column_groups
from ..padded import Readable, is_flat, is_padded, is_readable, padded_width
from ..tile_counter import tile_counter
from . import dropout, pairs, runs
from .eight_bit_kernel import OUT_COLUMNS, hopper_eight_bit_fwd_kernel
from .epilogue import out_columns
from .kernel import hopper_fwd_kernel
from .parts_launch import fold_of, in_parts, shared_tiles

Tensor = torch.Tensor
WARPGROUP_ROWS = 64  # of a warpgroup's tile
AT_ONCE = 16 << 20  # bytes of keys and values: `heads_per_l2_group`
MOST_STAGED = 6  # tiles of 8 bits: three blocks of keys and values


class KeyCache(NamedTuple):
    """What is a cache's of a forward over one: where its pages lie; of packed queries, that it
    computes the sequences of `chunk` or more, while another launch computes the others, and no two
    share a `counter`; how many `parts` the keys of each tile have; of 8 bits its `scales`.
    """

    pages: Table | None = None
    chunk: int = 0
    counter: Gap | None = None
    parts: int = 1
    scales: Scales | None = None


NO_CACHE = KeyCache()


def prepare(
    problem: Problem, scalars: Scalars, q: Tensor, k: Tensor
) -> Callable[..., tuple[Tensor, Tensor]]:
    """`forward_of` a problem, which allocates nothing but results, the tile counter, once a stream,
    and copies of rows that are no whole number of 16 bytes.
    """
    return forward_of(functools.partial(forward_program, problem, scalars))


def forward_program(
    problem: Problem, scalars: Scalars, *, q: Any, k: Any, v: Any, **tensors: Any
) -> Program:
    """The forward's one launch, of operands, behind copies of those that TMA cannot read."""
    extras = Extras(**tensors)
    names, work = names_with(FORWARD, extras), Workspace(q.device)
    out, lse = outputs = outputs_of(problem, q)
    steps: list[Any] = []
    if out.numel() or lse.numel():
        steps = steps_of(problem, scalars, extras, work, q=q, k=k, v=v, out=out, lse=lse)
    return Program(names, steps, work, outputs)


def steps_of(
    problem: Problem,
    scalars: Scalars,
    extras: Extras,
    work: Workspace,
    *,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cache: KeyCache = NO_CACHE,
) -> list[Any]:
    """The steps of a forward, of k and v that are those of a `cache`, if there is one."""
    if k.shape[1] == 0:  # no keys: a descriptor of no rows is invalid
        if not problem.is_packed:
            return [NO_KEYS]
        # Rows that are not used get no sink: the kernel knows them, and reads none of this
        k, v = (
            work.add(f"no {x.name}", (1, 1, x.shape[2], padded_width(x.shape[3])), x.dtype)
            for x in (k, v)
        )
    readable, is_v_flat = Readable(work), False
    if is_padded(problem):
        is_v_flat = is_flat(problem, v)
        is_copied = [not is_readable(x) and not (x is v and is_v_flat) for x in (q, k, v)]
        q, k, v = readable.copied((q, k, v), is_copied)
    if problem.has_seqused_k and not problem.is_packed:
        k, v = readable.copied((k, v), [not is_in_steps(x) for x in (k, v)])
    cache_format = CACHES.get(k.dtype, "")
    plan = plan_for(problem, q, extras=extras, is_flat=is_v_flat, cache=cache, kept=cache_format)
    if plan.tile.CACHE:
        k, v = k.view(torch.int8), v.view(torch.int8)
    args = arguments(problem, plan, q, k, v, out, lse, in_pairs(extras, plan), scalars, cache.pages)
    if plan.tile.CACHE:
        args = {name: x for name, x in args.items() if name not in ("v_step", "bias_desc")}
        args["optionals"] = args["optionals"]._replace(scales=cache.scales)
    if cache.counter is not None:
        args["queue"] = args["queue"]._replace(counter=cache.counter)
    if cache.parts > 1:
        args = in_parts(args, plan.tile, count=cache.parts, work=work)
        folds = [fold_of(args, plan, out)] if shared_tiles(args) else []
        return [*readable.steps, launch_of(plan, args), *folds]
    # Of calls without decodes no kernel waits for the one before, which may write what it reads
    is_early = plan.features.CHUNK > 0
    return [*readable.steps, launch_of(plan, args, launch_pdl=is_early)]


class ForwardLaunch(Launch):
    """A launch of this kernel."""

    __slots__ = ()
    asm = assembly.ASM | dropout.ASM | pairs.ASM | runs.ASM | eight_bits.ASM


def launch_of(plan: Plan, args: dict[str, Any], **options: Any) -> Launch:
    """The launch of a plan, on one program an SM or fewer."""
    programs = programs_of(args["queue"].tiles, args["lse"].device)
    constants = dict(FEATURES=plan.features, TILE=plan.tile)
    options = dict(num_warps=4) | options
    kernel = hopper_eight_bit_fwd_kernel if plan.tile.CACHE else hopper_fwd_kernel
    return checked(ForwardLaunch(kernel, programs, args, constants, options))


def arguments(
    problem: Problem,
    plan: Plan,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    extras: Extras,
    scalars: Scalars,
    pages: Table | None = None,
) -> dict[str, Any]:
    """The kernel's arguments but its constants, by their names, in its order."""
    heads_per_batch = 0, 0
    if plan.features.CHUNK or (problem.has_seqused_k and not problem.is_packed):
        # Batch strides of k and v, in heads: see `ragged_by_head`. Behind one batch is none
        heads_per_batch = tuple(ragged_steps(x)[2] or x.shape[2] for x in (k, v))
    described = descriptors(problem, plan, q, k, v, out, extras.bias)
    keys = k if pages is None else room_of(k, pages)
    named = dict(zip(("q_desc", "k_desc", "v_desc", "out_desc"), described))
    named |= dict(
        lse=lse,
        queue=queue_of(problem, plan.tile, q, keys, extras.sequences),
        optionals=optionals_of(extras, problem.mods)._replace(pages=pages),
        sizes=sizes_of(q, keys, extras),
        numbers=numbers_of(scalars, q.shape[1], keys.shape[1]),
        heads_per_batch=heads_per_batch,
        v_step=v.stride(2) if plan.tile.V_FLAT else 0,
    )
    return named | dict(bias_desc=described[4])


def room_of(k: Any, pages: Table) -> Operand:
    """An operand of as many rows as sequences of pages have room for."""
    table = pages.page_table
    batch, width = (k.shape[0], 0) if table is None else table.shape
    return Operand(k.name, (batch, width * pages.page_size, *k.shape[2:]), k.dtype, k.device)


def nothing(out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """The results of queries without keys."""
    out.zero_()
    if sinks is None:
        lse.fill_(-math.inf)
    else:
        lse.copy_(sinks[None, :, None])


NO_KEYS = TorchStep(nothing, ("out", "lse", "sinks"))


def pack_of(problem: Problem, seqlen_q: int) -> int:
    """How many heads share a tile, as neighbouring rows: those of a group, where this makes fewer
    tiles.
    """
    pack = triton.next_power_of_2(problem.group)
    if pack == 1 or pack > WARPGROUP_ROWS:
        return 1
    rows = 2 * WARPGROUP_ROWS
    packed = problem.nheads_k * triton.cdiv(seqlen_q * pack, rows)
    return pack if packed < problem.nheads * triton.cdiv(seqlen_q, rows) else 1


def plan_for(
    problem: Problem,
    q: Tensor,
    extras: Extras = NO_EXTRAS,
    is_flat: bool = False,
    cache: KeyCache = NO_CACHE,
    kept: str = "",
) -> Plan:
    """The plan of a call, as the tuning tables say; of packed sequences that of long ones where
    `max_seqlen_q` allows some, else that of their mean length. Of a `cache` in chunks that of
    these, whatever the others are; with `kept` it has 8 bits.
    """
    seqlen_q = max(1, q.shape[1] // max(1, extras.sequences))
    # Members of a group lie in a dimension of their own, and `ragged_by_head` has none left
    pack = 1 if problem.is_packed or problem.is_modified else pack_of(problem, seqlen_q)
    is_short = seqlen_q <= LONG_SEQLEN and not (problem.is_long or cache.chunk)
    page_size, device = 0 if cache.pages is None else cache.pages.page_size, q.device
    block_d, block_dv = map(block_of, (problem.headdim, problem.headdim_v))
    if 128 < problem.headdim <= 192:
        block_d = 192
    arch = "sm90" if device.type == "cpu" else architecture(device)
    widest = max(block_d, block_dv)  # to 192, with 128 of V: 128 keys fit
    config = select(Key(arch, "hopper_fwd", widest, 16, problem.is_causal, is_short), device)
    warpgroups = config.BLOCK_M // WARPGROUP_ROWS
    has_positions = problem.has_alibi or problem.has_left or problem.is_modified
    if has_positions or cache.parts > 1 or pack > 1 or page_size or kept:
        warpgroups = 2  # three have 160 registers a thread each: positions would spill
    of_o = OUT_COLUMNS.value if kept else out_columns(block_d, block_dv)
    block_n = config.BLOCK_N
    if problem.mods.block != (0, 0):  # what a mask lists is made up of whole tiles
        block_n = math.gcd(block_n, problem.mods.block[1])
    tile = Pipeline(
        BLOCK_M=warpgroups * WARPGROUP_ROWS // pack,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        WARPGROUPS=warpgroups,
        STAGES=config.num_stages,
        Q_STAGES=2,
        PACK=pack,
        BIAS_STEP=bias_step(extras.bias),
        V_FLAT=is_flat,
        PAGE=min(page_size, block_n),
    )
    if kept:
        tile = with_staged(tile, kept, of_o, cache.scales)
    if shared_memory(tile, of_o) > SHARED_MEMORY["sm90"]:
        tile = tile._replace(Q_STAGES=1)
    if block_n == 128 and pack == 1 and has_tiles(extras.bias, q):  # a slot of Q less makes room
        copied = tile._replace(BIAS_COPIED=True)
        if shared_memory(copied, of_o) > SHARED_MEMORY["sm90"]:
            copied = copied._replace(Q_STAGES=1)
        tile = copied if shared_memory(copied, of_o) <= SHARED_MEMORY["sm90"] else tile
    features = features_of(problem, has_fast_tanh=True)._replace(CHUNK=cache.chunk)
    of_keys = [1, 1, 1, tile.PAGE or block_n] if is_ragged(problem) else [1, 1, block_n]
    rows, columns = WARPGROUP_ROWS, block_d // column_groups(block_d)
    of_out = [1, 1, 1, rows] if problem.is_packed else [1, 1, rows // pack, pack]
    blocks = dict(
        q=[1, 1, rows // pack, pack, columns],
        k=[*of_keys, columns],
        v=[*of_keys, block_dv],
        out=[*of_out, of_o],
        bias=[1, 1, rows, tile.BLOCK_N],
    )
    dtypes = dict.fromkeys(blocks, GL_DTYPES[problem.dtype])
    if kept:
        dtypes |= dict.fromkeys(("k", "v"), gl.int8)
    return Plan(features, tile, in_shared(dtypes, blocks))


def with_staged(tile: Pipeline, kept: str, out_columns: int, scales: Scales | None) -> Pipeline:
    """A tile over a cache of 8 bits, which waits in as many tiles as there is room for."""
    tile = tile._replace(CACHE=kept, Q_STAGES=1)
    of_rows = 0 if scales is None else (scales.k_row is not None) + (scales.v_row is not None)
    room = SHARED_MEMORY["sm90"] - shared_memory(tile, out_columns)
    room -= of_rows * 4 * tile.STAGES * tile.BLOCK_N
    return tile._replace(STAGED=min(room // (tile.BLOCK_N * tile.BLOCK_D), MOST_STAGED))


def shared_memory(tile: Pipeline, out_columns: int) -> int:
    """Bytes of shared memory of a program, with 1 KiB for its barriers."""
    q = tile.WARPGROUPS * tile.Q_STAGES * WARPGROUP_ROWS * tile.BLOCK_D
    kv = tile.STAGES * tile.BLOCK_N * (tile.BLOCK_D + tile.BLOCK_DV)
    bias = tile.WARPGROUPS * WARPGROUP_ROWS * tile.BLOCK_N * tile.BIAS_COPIED
    return 2 * (q + kv + bias + tile.WARPGROUPS * WARPGROUP_ROWS * out_columns) + 1024


def queue_of(problem: Problem, tile: Pipeline, q: Tensor, k: Tensor, packed: int = 0) -> Queue:
    """The tiles of the call, and the order they are handed out in.

    Of packed sequences only the device knows how many tiles there are, and their order is that of
    `tile.varlen`. A sequence has at most one tile that is not full. The bound is a multiple of 16,
    as the kernel does not read it, but would be compiled again for a number that is none.
    """
    batch, seqlen_q, nheads, _ = q.shape
    sharing = problem.group
    if tile.PACK > 1:
        nheads, sharing = problem.nheads_k, 1
    if packed:
        bound = (seqlen_q // tile.BLOCK_M + packed) * nheads
        return Queue(tile_counter(), -(-bound // 16) * 16, nheads, nheads, 1)
    m_blocks, heads = triton.cdiv(seqlen_q, tile.BLOCK_M), batch * nheads
    width = heads_per_l2_group(problem, k.shape[1], heads, sharing)
    return Queue(tile_counter(), heads * m_blocks, nheads, heads, width)


def heads_per_l2_group(problem: Problem, seqlen_k: int, heads: int, sharing: int) -> int:
    """The number of heads whose tiles are interleaved; `sharing` of them read the same keys.

    Without a causal mask one: neighbours find in the L2 cache what they both read. So do tiles of a
    block mask, as only lists on the device say which are long. Else those whose keys and values
    take 16 MB (H100, in graphs of 0.1 s, relative to 128 MB, with 16, 32 and 64: headdim 128 4Ki
    1.133, 1.101 and 1.051, 16Ki 1.114, 1.095 and 1.014, headdim 256 16Ki 1.120, 1.108 and 1.025,
    headdim 64 16Ki 0.986, 0.993 and 0.986; sustained, 16 MB gain 2 to 3 % of headdim 128).
    """
    if not problem.is_causal:
        return 1
    head_bytes = seqlen_k * (problem.headdim + problem.headdim_v) * problem.dtype.itemsize
    return even_group(heads, AT_ONCE * sharing // head_bytes)
