"""Host side of the forward: builds TMA descriptors, picks the tile, launches.

A launch from Python takes longer than a short kernel. So all that follows from a signature is
cached (`Forward`), and calls after the first launch the compiled kernel without Triton's front end,
which inspects every argument.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl

from ....emulation import emulate, emulator_seed
from ....hardware import SHARED_MEMORY
from ....problem import LONG_SEQLEN, NO_EXTRAS, Extras, Problem, Scalars
from ....tile.schedule import even_group
from ....tile.types import Features, Numbers, Optionals, Pipeline, Queue, Sizes, Strided, Table
from ....tuning.config import Key
from ....tuning.select import architecture, select
from ...common.arguments import features_of, numbers_of, optionals_of, packed_in, sizes_of
from ...common.building import first_launch, num_sms, on_device
from ...common.outputs import empty_out
from ...common.relaunch import (
    Pattern,
    addresses_of,
    distinct_extras,
    may_relaunch,
    pattern_of,
)
from .. import assembly
from ..bias_memory import bias_step, has_tiles, in_pairs
from ..compat import Descriptors, Direct, direct_of
from ..descriptors import (
    GL_DTYPES,
    DescriptorFields,
    checked,
    descriptors,
    in_steps,
    is_ragged,
    ragged_steps,
)
from ..layouts import column_groups
from ..padded import PaddedLaunch, empty_rows, is_padded
from ..tile_counter import counter, counter_of
from . import dropout
from .epilogue import out_columns
from .kernel import hopper_fwd_kernel

Tensor = torch.Tensor
WARPGROUP_ROWS = 64  # of a warpgroup's tile
AT_ONCE = 16 << 20  # bytes of keys and values: `heads_per_l2_group`
NO_BIAS = (None,)  # its descriptor, where it has none


class Plan(NamedTuple):
    """What a `Problem` selects: constants of the kernel, and the blocks of its descriptors."""

    features: Features
    tile: Pipeline
    q_block: list[int]
    k_block: list[int]
    v_block: list[int]
    out_block: list[int]
    bias_block: list[int]
    layouts: tuple[Any, ...]  # of these blocks in shared memory


class FwdArgs(NamedTuple):
    """What the kernel is launched with, but its constants."""

    q: DescriptorFields
    k: DescriptorFields
    v: DescriptorFields
    out: DescriptorFields | Strided
    lse: Tensor
    queue: Queue
    optionals: Optionals
    sizes: Sizes
    numbers: Numbers
    heads_per_batch: tuple[int, int]  # batch strides of k and v, in heads; see `ragged_by_head`
    v_step: int  # where v is flat, elements from a head to the next
    bias: DescriptorFields | None


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, scalars: Scalars
) -> tuple[Tensor, Tensor]:
    """`out` and `lse`; allocates nothing else but the tile counter, once a stream, and copies of
    rows that are no whole number of 16 bytes.
    """
    return prepare(problem, scalars, q, k)(q, k, v, extras)


def prepare(problem: Problem, scalars: Scalars, q: Tensor, k: Tensor) -> Forward | PaddedLaunch:
    """The forward of all calls of one signature."""
    make = functools.partial(Forward, problem, scalars)
    return PaddedLaunch(problem, make) if is_padded(problem) else make()


class ForwardRelaunch(NamedTuple):
    """What launches after the first need. Holds no tensor."""

    kernel: Direct
    described: Descriptors  # of q, k, v, out and the bias, if that is copied
    args: Pattern  # between the descriptors
    has_extras: bool
    constants: tuple


class Forward:
    """The forward of calls of one signature: the first through Triton's launcher, later ones
    directly, with descriptors that are cached by address.
    """

    def __init__(self, problem: Problem, scalars: Scalars, is_flat: bool = False) -> None:
        self.problem = problem
        self.scalars = scalars
        self.is_flat = is_flat
        self.device = -1
        self.relaunch: ForwardRelaunch | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        out, lse = empty_out(self.problem, q)
        relaunch, device = self.relaunch, self.device
        if relaunch is None or not may_relaunch(device):
            self.first(q, k, v, out, lse, extras)
            return out, lse
        stream = torch._C._cuda_getCurrentRawStream(device)
        of = relaunch.described.at
        for_bias = of(4, extras.bias.data_ptr()) if relaunch.described.count == 5 else NO_BIAS
        row = [lse.data_ptr(), counter(q.device, device, stream)]
        if relaunch.has_extras:
            row += addresses_of(extras.tensors)
        relaunch.kernel(
            stream,
            *of(0, q.data_ptr()),
            *of(1, k.data_ptr()),
            *of(2, v.data_ptr()),
            *of(3, out.data_ptr()),
            *relaunch.args(row),
            *for_bias,
            *relaunch.constants,
        )
        return out, lse

    def first(
        self, q, k, v, out, lse, extras: Extras, pages: Table | None = None, chunk=0, counter=None
    ) -> None:
        """The first launch of a signature, through Triton's launcher; `pages` are where k and v are
        those of a cache. Of its packed queries it computes the sequences of `chunk` or more, while
        another launch computes the others; no two share a `counter`.
        """
        if out.numel() == 0 and lse.numel() == 0:
            return
        caller_k, caller_v = k, v
        if k.shape[1] == 0:  # no keys: a descriptor of no rows is invalid
            if not self.problem.is_packed:
                out.zero_()
                lse_of_nothing(lse, extras.sinks)
                return
            # Rows that are not used get no sink: the kernel knows them, and reads none of this
            k, v = (empty_rows(x, 1, 1, *x.shape[2:]) for x in (k, v))
        if self.problem.has_seqused_k and not self.problem.is_packed:
            k, v = in_steps(k), in_steps(v)
        extras = distinct_extras(extras)
        plan = plan_for(self.problem, q, extras, self.is_flat, pages, chunk)
        extras = in_pairs(extras, plan)
        args = arguments(self.problem, plan, q, k, v, out, lse, extras, self.scalars, pages)
        constants = dict(FEATURES=plan.features, TILE=plan.tile, num_warps=4)
        if chunk:
            args = args._replace(queue=args.queue._replace(counter=counter))
        if emulator_seed() is not None and q.device.type == "cpu":
            programs = min(args.queue.tiles, 4)  # few, so that each works through several tiles
            emulated = emulate(hopper_fwd_kernel, assembly.ASM | dropout.ASM)
            emulated[(programs,)](*checked(args), **constants)
            return
        programs = min(args.queue.tiles, num_sms(q.device))
        with on_device(q.device):
            constants["launch_pdl"] = True  # it runs beside the launch before
            compiled = first_launch(hopper_fwd_kernel, programs, *checked(args), **constants)
            device = torch.cuda.current_device()
        if caller_k is k and caller_v is v:  # neither copied nor replaced
            kernel = direct_of(compiled, programs)
            self.relaunch, self.device = relaunch_of(kernel, plan, args, extras), device


def relaunch_of(
    kernel: Direct | None, plan: Plan, args: FwdArgs, extras: Extras
) -> ForwardRelaunch | None:
    """How to relaunch the kernel; None where a tensor was copied to be contiguous, or where this
    Triton's launcher is unknown.
    """
    between = tuple(args[4:-1])
    has_extras = any(x is not None for x in extras.tensors)
    row = args.lse, args.queue.counter, *(extras.tensors if has_extras else ())
    if args.optionals.pages is not None:
        row = *row, args.optionals.pages.page_table
    pattern = pattern_of(between, row)
    if kernel is None or pattern is None:
        return None
    fields = [x for x in (args.q, args.k, args.v, args.out, args.bias) if x is not None]
    constants = plan.features, plan.tile
    return ForwardRelaunch(kernel, Descriptors(kernel, fields), pattern, has_extras, constants)


def arguments(
    problem: Problem,
    plan: Plan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Extras,
    scalars: Scalars,
    pages: Table | None = None,
) -> FwdArgs:
    """The kernel's arguments for a call."""
    heads_per_batch = 0, 0
    if plan.features.CHUNK or (problem.has_seqused_k and not problem.is_packed):
        heads_per_batch = ragged_steps(k)[2], ragged_steps(v)[2]
    *described, for_bias = descriptors(problem, plan, q, k, v, out, extras.bias)
    keys = k if pages is None else room_of(k, pages)
    return FwdArgs(
        *described,
        lse,
        queue_of(problem, plan.tile, q, keys, packed_in(extras)),
        optionals_of(extras, problem.mods)._replace(pages=pages),
        sizes_of(q, keys, extras),
        numbers_of(scalars, q, keys),
        heads_per_batch,
        v.stride(2) if plan.tile.V_FLAT else 0,
        for_bias,
    )


def room_of(k: Tensor, pages: Table) -> Tensor:
    """A meta tensor of as many rows as sequences of pages have room for."""
    table = pages.page_table
    shape = (k.shape[0], 0) if table is None else table.shape
    return torch.empty(shape[0], shape[1] * pages.page_size, *k.shape[2:], device="meta")


def lse_of_nothing(lse: Tensor, sinks: Tensor | None) -> Tensor:
    return lse.fill_(-math.inf) if sinks is None else lse.copy_(sinks.float()[None, :, None])


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
    pages: Table | None = None,
    chunk: int = 0,
) -> Plan:
    """The plan of a call; of packed sequences that of long ones where `max_seqlen_q` allows some,
    else that of their mean length. With `chunk`, of packed sequences over a KV cache with as
    many queries, whatever the others are.
    """
    seqlen_q = max(1, q.shape[1] // max(1, packed_in(extras)))
    # Members of a group lie in a dimension of their own, and `ragged_by_head` has none left
    pack = 1 if problem.is_packed or problem.is_modified else pack_of(problem, seqlen_q)
    is_short = seqlen_q <= LONG_SEQLEN and not (problem.is_long or chunk)
    is_copied = has_tiles(extras.bias, q)
    bias = bias_step(extras.bias), is_copied
    page_size = 0 if pages is None else pages.page_size
    plan = plan_of(problem, q.device, is_short, pack, *bias, is_flat, page_size)
    return plan._replace(features=plan.features._replace(CHUNK=chunk)) if chunk else plan


def plan_of(
    problem: Problem,
    device: torch.device,
    is_short: bool,
    pack: int,
    bias_step: int = 0,
    has_tiles: bool = False,
    is_flat: bool = False,
    page_size: int = 0,
) -> Plan:
    """The plan of a problem, as the tuning tables say."""
    block_d, block_dv = (
        max(64, triton.next_power_of_2(d)) for d in (problem.headdim, problem.headdim_v)
    )
    if 128 < problem.headdim <= 192:
        block_d = 192
    arch = "sm90" if device.type == "cpu" else architecture(device)
    widest = max(block_d, block_dv)  # to 192, with 128 of V: 128 keys fit
    config = select(Key(arch, "hopper_fwd", widest, 16, problem.is_causal, is_short), device)
    warpgroups = config.BLOCK_M // WARPGROUP_ROWS
    if pack > 1 or problem.has_alibi or problem.has_left or problem.is_modified or page_size:
        warpgroups = 2  # three have 160 registers a thread each: positions would spill
    of_o = out_columns(block_d, block_dv)
    block_n = config.BLOCK_N
    if problem.mods.block != (0, 0):  # what a mask lists is made up of whole tiles
        block_n = math.gcd(block_n, problem.mods.block[1])
    tile = Pipeline(
        warpgroups * WARPGROUP_ROWS // pack,
        block_n,
        block_d,
        block_dv,
        warpgroups,
        config.num_stages,
        2,
        pack,
        bias_step,
        V_FLAT=is_flat,
        PAGE=min(page_size, block_n),
    )
    if shared_memory(tile, of_o) > SHARED_MEMORY["sm90"]:
        tile = tile._replace(Q_STAGES=1)
    if has_tiles and block_n == 128 and pack == 1:  # one slot of Q less makes room for it
        copied = tile._replace(BIAS_COPIED=True)
        if shared_memory(copied, of_o) > SHARED_MEMORY["sm90"]:
            copied = copied._replace(Q_STAGES=1)
        tile = copied if shared_memory(copied, of_o) <= SHARED_MEMORY["sm90"] else tile
    features = features_of(problem)._replace(FAST_TANH=problem.has_softcap)
    of_keys = [1, 1, 1, tile.PAGE or block_n] if is_ragged(problem) else [1, 1, block_n]
    rows, columns = WARPGROUP_ROWS, block_d // column_groups(block_d)
    of_out = [1, 1, 1, rows] if problem.is_packed else [1, 1, rows // pack, pack]
    blocks = (
        [1, 1, rows // pack, pack, columns],
        [*of_keys, columns],
        [*of_keys, block_dv],
        [*of_out, of_o],
        [1, 1, rows, tile.BLOCK_N],
    )
    element = GL_DTYPES[problem.dtype]
    layouts = tuple(gl.NVMMASharedLayout.get_default_for(block, element) for block in blocks)
    return Plan(features, tile, *blocks, layouts)


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
        return Queue(counter_of(q.device), -(-bound // 16) * 16, nheads, nheads, 1)
    m_blocks, heads = triton.cdiv(seqlen_q, tile.BLOCK_M), batch * nheads
    width = heads_per_l2_group(problem, k.shape[1], heads, sharing)
    return Queue(counter_of(q.device), heads * m_blocks, nheads, heads, width)


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
