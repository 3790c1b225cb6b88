"""Host side of the forward in FP8: as `launch`, for `Quantized` tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl

from ....emulation import emulate, emulator_seed
from ....errors import warn_slow
from ....hardware import SHARED_MEMORY
from ....problem import Extras, Problem, Scalars
from ....tile.types import Features, Numbers, Optionals, Pipeline, Queue, Sizes
from ...common.alignment import in_own_memory
from ...common.arguments import aligned, features_of, numbers_of, optionals_of, sizes_of
from ...common.building import first_launch, num_sms, on_device
from ...common.packed import Packed
from ...common.quantized import COLUMNS, FP8, Quantized, columns_of, empty_values
from ...common.relaunch import (
    addresses_of,
    distinct_extras,
    distinct_views,
    may_relaunch,
    relaunch_of,
)
from .. import assembly
from ..compat import Descriptors, Direct, direct_of
from ..descriptors import DescriptorFields, by_head, checked, of_queries, ragged_by_head
from ..tile_counter import counter, counter_of, counters_of
from . import fp8_operand, transpose
from .epilogue import OUT_COLUMNS
from .fp8_kernel import hopper_fp8_fwd_kernel
from .fp8_mma import Scales
from .launch import WARPGROUP_ROWS, lse_of_nothing, pack_of, queue_of
from .transpose import READY, Transposing

Tensor = torch.Tensor
GL_OUT = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
ASM = assembly.ASM | fp8_operand.ASM | transpose.ASM
UNIT = 16  # bytes that TMA's strides are multiples of, and elements of 8 bits
# Keys of a block and stages of the ring, by the wider headdim. Not measured: a prototype of this
# kernel had 128 keys (H200, Triton 3.6, TFLOP/s at 16Ki full: headdim 128 927, headdim 256 1,244),
# and at headdim 64 551 with 128 keys, 670 with 256 of them, whose O the tensor cores added up
TILES = {64: (128, 4), 128: (128, 4), 256: (128, 2)}
TILES_OF_HEAD = 4  # of queries, at least, that read the V of a key head where it is transposed


class Fp8Plan(NamedTuple):
    """What a `Problem` selects: constants of the kernel, and the blocks of its descriptors."""

    features: Features
    tile: Pipeline
    blocks: tuple[list[int], ...]  # of q, k, v_t, out and V
    layouts: tuple[Any, ...]  # of these blocks in shared memory


class Fp8Args(NamedTuple):
    """What the kernel is launched with, but its constants."""

    q: DescriptorFields
    k: DescriptorFields
    v_t: DescriptorFields
    out: DescriptorFields
    values: DescriptorFields | None  # V, where the kernel transposes it
    lse: Tensor
    scales: Scales
    queue: Queue
    optionals: Optionals
    sizes: Sizes
    numbers: Numbers
    transposing: Transposing | None


class Fp8Relaunch(NamedTuple):
    """What launches after the first need. Holds no tensor."""

    call: Callable[[int, Sequence[Any]], None]  # with a stream and a row
    moved: Callable[[int, int], Any]  # what of a descriptor moves, by its number, from an address
    has_extras: bool
    v_t_shape: torch.Size | None  # where the kernel writes V^T
    counters: int  # that the programs then share


class Fp8Forward:
    """The forward of `Quantized` tensors of one signature: the first through Triton's launcher,
    later ones directly, with descriptors that are cached by address. Where it `transposes`, they
    have V in the place of V^T.
    """

    def __init__(
        self, problem: Problem, scalars: Scalars, out_dtype: torch.dtype, transposes: bool = False
    ) -> None:
        self.problem, self.scalars, self.out_dtype = problem, scalars, out_dtype
        self.transposes = transposes
        self.device = -1
        self.relaunch: Fp8Relaunch | None = None

    def __call__(self, given: Quantized, extras: Extras) -> tuple[Tensor, Tensor]:
        q = given.q
        batch, seqlen_q, nheads, _ = q.shape
        out = q.new_empty(batch, seqlen_q, nheads, self.problem.headdim_v, dtype=self.out_dtype)
        lse = q.new_empty(batch, nheads, seqlen_q, dtype=torch.float32)
        relaunch, device = self.relaunch, self.device
        if relaunch is None or not may_relaunch(device):
            self._first(given, extras, out, lse)
            return out, lse
        stream = torch._C._cuda_getCurrentRawStream(device)
        moved, v_t, values = relaunch.moved, given.v_t, None
        if relaunch.v_t_shape is not None:
            v_t, values = q.new_empty(relaunch.v_t_shape, dtype=torch.uint8), v_t
        row = [
            moved(0, q.data_ptr()),
            moved(1, given.k.data_ptr()),
            moved(2, v_t.data_ptr()),
            moved(3, out.data_ptr()),
        ]
        # Counters are held until the launch: those that a capture makes are the caller's
        tiles, counters = counter(q.device, device, stream), None
        if values is not None:
            counters = counters_of(q.device, relaunch.counters)
            row += moved(4, values.data_ptr()), v_t.data_ptr(), counters.data_ptr()
        row += addresses_of((lse, tiles, *given.scales, given.v_mean, given.v_drift))
        if relaunch.has_extras:
            row += addresses_of(extras.tensors)
        relaunch.call(stream, row)
        return out, lse

    def _first(self, given: Quantized, extras: Extras, out: Tensor, lse: Tensor) -> None:
        """The first launch of a signature, through Triton's launcher."""
        if out.numel() == 0 and lse.numel() == 0:
            return
        if given.k.shape[1] == 0 and not self.problem.is_packed:
            out.zero_()
            lse_of_nothing(lse, extras.sinks)
            return
        inputs = readable(given)
        is_copied = any(x is not y for x, y in zip(inputs[:3], given))
        extras = distinct_extras(extras)
        values = given.v_t if self.transposes else None
        if values is not None:
            inputs = inputs._replace(v_t=empty_values(values, None).view(FP8))
        plan = plan_for(self.problem, inputs, extras, self.out_dtype, self.transposes)
        args = arguments(self.problem, plan, inputs, values, extras, self.scalars, out, lse)
        constants = dict(FEATURES=plan.features, TILE=plan.tile, num_warps=4)
        device = given.q.device
        if emulator_seed() is not None and device.type == "cpu":
            programs = min(args.queue.tiles, 4)  # few, so that each works through several tiles
            emulate(hopper_fp8_fwd_kernel, ASM)[(programs,)](*checked(args), **constants)
            return
        programs = min(args.queue.tiles, num_sms(device))
        with on_device(device):
            compiled = first_launch(hopper_fp8_fwd_kernel, programs, *checked(args), **constants)
            index = torch.cuda.current_device()
        if not is_copied:
            kernel = direct_of(compiled, programs)
            self.relaunch, self.device = how_to_relaunch(kernel, plan, args, extras), index


def how_to_relaunch(
    kernel: Direct | None, plan: Fp8Plan, args: Fp8Args, extras: Extras
) -> Fp8Relaunch | None:
    """None where a tensor was copied to be contiguous, or where this Triton's launcher is unknown.
    A row has what moves in the order in which `Fp8Forward` fills it.
    """
    if kernel is None:
        return None
    fields = [x for x in args[:5] if x is not None]
    described = Descriptors(kernel, fields)
    gaps, operands, has_maps = described.opened([x.base.data_ptr() for x in fields])
    row: list[Any] = [*gaps]
    transposing, v_t_shape, counters = args.transposing, None, 0
    if transposing is None:
        operands.append(None)
    else:
        v_t_shape, counters = transposing.v_t.shape, READY.value + transposing.blocks
        row += transposing[:2]
    row += args.lse, args.queue.counter, *args.scales[:5]
    has_extras = any(x is not None for x in extras.tensors)
    row += extras.tensors if has_extras else ()
    call = relaunch_of(kernel, (*operands, *args[5:], plan.features, plan.tile), row, has_maps)
    if call is None:
        return None
    moved = described.moved if isinstance(call, Packed) else described.first
    return Fp8Relaunch(call, moved, has_extras, v_t_shape, counters)


def arguments(
    problem: Problem,
    plan: Fp8Plan,
    given: Quantized,
    values: Tensor | None,
    extras: Extras,
    scalars: Scalars,
    out: Tensor,
    lse: Tensor,
) -> Fp8Args:
    """The kernel's arguments for a call: q and out as in 16 bits, k, v_t and V as (batch, head,
    row, column).
    """
    q, k = given.q, given.k
    group = problem.group
    of_q, of_k, of_v, of_out, of_values = zip(plan.blocks, plan.layouts)
    of_rows = ragged_by_head if problem.is_packed else functools.partial(of_queries, group=group)
    queue = queue_of(problem, plan.tile, q, k, extras.sequences)
    queue = queue._replace(counter=counter_of(q.device))
    described = transposing = None
    if values is not None:
        described = by_head(values.view(torch.uint8), *of_values)
        transposing = transposing_of(given.v_t, plan, queue.l2_group)
    return Fp8Args(
        of_queries(q, *of_q, group),
        by_head(k, *of_k),
        by_head(given.v_t.transpose(1, 2), *of_v),
        of_rows(out, *of_out),
        described,
        lse,
        Scales(*distinct_views((*given.scales, given.v_mean, given.v_drift)), problem.nheads_k),
        queue,
        optionals_of(extras),
        sizes_of(q, k, extras),
        numbers_of(scalars, q, k),
        transposing,
    )


def transposing_of(v_t: Tensor, plan: Fp8Plan, l2_group: int) -> Transposing:
    """How the programs of a launch write V^T: blocks of as many heads are interleaved as tiles are,
    whose heads are key heads where their query heads share a tile.
    """
    batch, nheads_k, _, columns = v_t.shape
    heads, levels = batch * nheads_k, columns // COLUMNS
    # Not the object that is the counter of tiles, too, where a captured graph has one of both
    counters = counters_of(v_t.device, READY.value + heads * levels).detach()
    width = l2_group if plan.tile.PACK > 1 else max(1, l2_group // plan.features.GROUP)
    pieces = COLUMNS // transpose.piece_keys(plan.tile.BLOCK_DV)
    numbers = heads * levels, levels, nheads_k, heads, width, pieces
    return Transposing(v_t.view(torch.uint8), counters, *numbers)


def readable(given: Quantized) -> Quantized:
    """The tensors, with copies of those that TMA cannot read. Packed sequences without any key get
    one row that no sequence has, as a descriptor without rows is invalid.
    """
    k = given.k if given.k.shape[1] else given.k.new_zeros(1, 1, *given.k.shape[2:])
    v_t = in_units(given.v_t, "v_t")
    return given._replace(q=in_units(given.q, "q"), k=in_units(k, "k"), v_t=v_t)


def in_units(x: Tensor, name: str) -> Tensor:
    """x, or a copy of it where TMA cannot read its rows."""
    if aligned(x):
        return x
    warn_slow(
        f"{name} in FP8 is copied, because TMA needs rows, heads and batches that start at "
        f"multiples of {UNIT} bytes and are not expanded: {name}.clone() gives both"
    )
    return in_own_memory(x)


def takes_values(problem: Problem, q: Tensor, v: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether the kernel transposes V itself. Some 4 us a block and program, an estimate, are
    hidden where each block is read by several tiles, and where there are tiles for all SMs. Else a
    pass before has the GPU to itself: by count, not timed.
    """
    if not fits_values(problem, v, out_dtype):
        return False
    if not q.is_cuda:  # in the emulator
        return True
    batch, seqlen_q = q.shape[:2]
    of_head = triton.cdiv(seqlen_q * problem.group, 2 * WARPGROUP_ROWS)
    return of_head >= TILES_OF_HEAD and batch * problem.nheads_k * of_head >= num_sms(q.device)


def fits_values(problem: Problem, v: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether it can: TMA can read V, it is not packed, of which V^T has other columns, and there
    is room for blocks of V in shared memory, and for two more warps in registers, of which tanh and
    128 columns take all.
    """
    widest = max(block_of(problem.headdim), block_of(problem.headdim_v))
    columns = columns_of(v.shape[1])
    is_small = v.shape[3] * columns < 2**31  # counted in 32 bits
    is_readable = columns > 0 and v.stride(3) == 1 and aligned(v)
    is_full = widest > 128 or (widest == 128 and problem.has_softcap)
    if problem.is_packed or is_full or not is_small or not is_readable:
        return False
    tile = plan_of(problem, 1, out_dtype, True).tile
    return shared_memory(tile, widest, out_dtype) <= SHARED_MEMORY["sm90"]


def plan_for(
    problem: Problem,
    given: Quantized,
    extras: Extras,
    out_dtype: torch.dtype,
    transposes: bool = False,
) -> Fp8Plan:
    """The plan of a call."""
    sequences = max(1, extras.sequences)
    seqlen_q = max(1, given.q.shape[1] // sequences)
    pack = 1 if problem.is_packed else pack_of(problem, seqlen_q)
    return plan_of(problem, pack, out_dtype, transposes)


@functools.lru_cache(maxsize=1024)
def plan_of(problem: Problem, pack: int, out_dtype: torch.dtype, transposes: bool) -> Fp8Plan:
    """The plan of a problem whose tiles hold `pack` heads."""
    block_d, block_dv = block_of(problem.headdim), block_of(problem.headdim_v)
    rows, out_columns = WARPGROUP_ROWS, min(block_dv, OUT_COLUMNS.value)
    # Each sequence has a multiple of COLUMNS, so that no block is of two sequences. Half of
    # them where positions or tanh take registers in the loop
    has_terms = problem.has_softcap or problem.has_alibi
    block_n, stages = TILES[max(block_d, block_dv)]
    block_n = block_n // 2 if has_terms else block_n
    block_n = min(block_n, COLUMNS) if problem.is_packed else block_n
    tile = Pipeline(
        2 * rows // pack,
        block_n,
        block_d,
        block_dv,
        WARPGROUPS=2,
        STAGES=stages,
        Q_STAGES=2,
        PACK=pack,
        FP8=True,
        TRANSPOSES=transposes,
    )
    if shared_memory(tile, out_columns, out_dtype) > SHARED_MEMORY["sm90"]:
        tile = tile._replace(Q_STAGES=1)
    of_out = [1, 1, 1, rows] if problem.is_packed else [1, 1, rows // pack, pack]
    blocks = (
        [1, 1, rows // pack, pack, block_d],
        [1, 1, block_n, block_d],
        [1, 1, block_dv, block_n],
        [*of_out, out_columns],
        [1, 1, COLUMNS, block_dv],
    )
    elements = *(gl.float8e4nv,) * 3, GL_OUT[out_dtype], gl.uint8
    layouts = tuple(map(gl.NVMMASharedLayout.get_default_for, blocks, elements))
    features = features_of(problem)._replace(FAST_TANH=problem.has_softcap)
    return Fp8Plan(features, tile, blocks, layouts)


def block_of(headdim: int) -> int:
    """The columns of a tile of so many."""
    return max(64, triton.next_power_of_2(headdim))


def shared_memory(tile: Pipeline, out_columns: int, out_dtype: torch.dtype) -> int:
    """Bytes of shared memory of a program, with 1 KiB for its barriers."""
    q = 2 * tile.Q_STAGES * WARPGROUP_ROWS * tile.BLOCK_D
    kv = tile.STAGES * tile.BLOCK_N * (tile.BLOCK_D + tile.BLOCK_DV)
    values = 2 * COLUMNS * tile.BLOCK_DV * tile.TRANSPOSES
    return q + kv + values + 2 * WARPGROUP_ROWS * out_columns * out_dtype.itemsize + 1024
