"""Host side of the forward in FP8: as `launch`, for `Quantized` tensors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl

from ....errors import warn_slow
from ....hardware import SHARED_MEMORY
from ....problem import Extras, Problem, Scalars
from ....tile.types import Pipeline
from ...common.arguments import aligned, features_of, numbers_of, optionals_of, sizes_of
from ...common.building import num_sms
from ...common.program import Program, Step, checked
from ...common.quantized import COLUMNS, FP8, columns_of
from ...common.results import FP8_FORWARD, fp8_forward_of, names_with, outputs_of
from ...common.workspace import Workspace
from .. import assembly
from ..descriptors import Plan, block_of, by_head, in_shared, of_queries, ragged_by_head
from ..launch import Launch, programs_of
from ..padded import Readable
from ..tile_counter import tile_counters
from . import fp8_operand, transpose
from .epilogue import OUT_COLUMNS
from .fp8_kernel import hopper_fp8_fwd_kernel
from .fp8_mma import Scales
from .launch import NO_KEYS, WARPGROUP_ROWS, pack_of, queue_of
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


class Fp8Launch(Launch):
    """A launch of this kernel."""

    __slots__ = ()
    asm = ASM


def prepare_fp8(
    problem: Problem, scalars: Scalars, out_dtype: torch.dtype, transposes: bool = False
) -> Callable[..., tuple]:
    """The forward of all calls of one signature. Where it `transposes`, they have V in the place of
    V^T.
    """
    return fp8_forward_of(functools.partial(fp8_program, problem, scalars, out_dtype, transposes))


def fp8_program(
    problem: Problem,
    scalars: Scalars,
    out_dtype: torch.dtype,
    transposes: bool = False,
    **operands: Any,
) -> Program:
    """The one launch, of operands, behind copies of those that TMA cannot read."""
    extras, q, k = Extras(**{x: operands[x] for x in Extras._fields}), operands["q"], operands["k"]
    out, lse = outputs_of(problem, q, out_dtype)
    names, work = names_with(FP8_FORWARD, extras), Workspace(q.device)
    steps: list[Any] = []
    if k.shape[1] == 0 and not problem.is_packed:
        steps = [NO_KEYS]
    elif out.numel() or lse.numel():
        tensors, steps = readable_operands(operands, work, transposes=transposes)
        tensors |= dict(out=out, lse=lse)
        plan = plan_for(problem, q, extras, out_dtype, transposes)
        args = arguments(problem, plan, tensors, extras, scalars)
        programs = programs_of(args["queue"].tiles, q.device)
        constants = dict(FEATURES=plan.features, TILE=plan.tile)
        launch = Fp8Launch(hopper_fp8_fwd_kernel, programs, args, constants, dict(num_warps=4))
        steps.append(checked(launch))
    return Program(names, steps, work, (out, lse))


def arguments(
    problem: Problem, plan: Plan, operands: dict[str, Any], extras: Extras, scalars: Scalars
) -> dict[str, Any]:
    """The kernel's arguments but its constants, by their names: q and out as in 16 bits, k, v_t and
    V as (batch, head, row, column).
    """
    q, k, v_t, values = (operands[name] for name in ("q", "k", "v_t", "values"))
    group = problem.group
    blocks = plan.blocks
    of_rows = ragged_by_head if problem.is_packed else functools.partial(of_queries, group=group)
    queue = queue_of(problem, plan.tile, q, k, extras.sequences)
    numbers = {name: operands[name] for name in ("v_mean", "v_drift")}
    numbers |= {name: operands[f"{name}_scale"] for name in ("q", "k", "v")}
    return dict(
        q_desc=of_queries(q, **blocks["q"], group=group),
        k_desc=by_head(k, **blocks["k"]),
        v_desc=by_head(v_t.transpose(1, 2), **blocks["v_t"]),
        out_desc=of_rows(operands["out"], **blocks["out"]),
        values_desc=None
        if values is None
        else by_head(values.view(torch.uint8), **blocks["values"]),
        lse=operands["lse"],
        scales=Scales(**numbers, nheads_k=problem.nheads_k),
        queue=queue,
        optionals=optionals_of(extras),
        sizes=sizes_of(q, k, extras),
        numbers=numbers_of(scalars, q.shape[1], k.shape[1]),
        transposing=None if values is None else transposing_of(v_t, plan, queue.l2_group),
    )


def transposing_of(v_t: Any, plan: Plan, l2_group: int) -> Transposing:
    """How the programs of a launch write V^T: blocks of as many heads are interleaved as tiles are,
    whose heads are key heads where their query heads share a tile.
    """
    batch, nheads_k, _, columns = v_t.shape
    heads, levels = batch * nheads_k, columns // COLUMNS
    return Transposing(
        v_t=v_t.view(torch.uint8),
        words=tile_counters(READY.value + heads * levels),
        blocks=heads * levels,
        levels=levels,
        nheads_k=nheads_k,
        heads=heads,
        width=l2_group if plan.tile.PACK > 1 else max(1, l2_group // plan.features.GROUP),
        pieces=COLUMNS // transpose.piece_keys(plan.tile.BLOCK_DV),
    )


def readable_operands(
    operands: dict[str, Any], work: Workspace, transposes: bool
) -> tuple[dict[str, Any], list[Step]]:
    """The operands as TMA can read them, and as `values` V, which a kernel that `transposes` reads;
    and the steps that copy them to there. Packed sequences without any key get one row that no
    sequence has, as a descriptor without rows is invalid.
    """
    q, k, v_t, values = operands["q"], operands["k"], operands["v_t"], None
    if not k.shape[1]:
        k = work.add("no k", (1, 1, *k.shape[2:]), k.dtype, is_cleared=True)
    if transposes:
        batch, rows, heads, columns = v_t.shape
        shape = batch, heads, columns, columns_of(rows)
        values, v_t = v_t, work.add("transposed", shape, torch.uint8).view(FP8)
    is_copied = [not aligned(x) for x in (q, k, v_t)]
    for x in itertools.compress((q, k, v_t), is_copied):
        warn_slow(
            f"{x.name} in FP8 is copied, because TMA needs rows, heads and batches that start at "
            f"multiples of {UNIT} bytes and are not expanded: {x.name}.clone() gives both"
        )
    readable = Readable(work)
    q, k, v_t = readable.copied((q, k, v_t), is_copied)
    return operands | dict(q=q, k=k, v_t=v_t, values=values), readable.steps


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
    problem: Problem, q: Any, extras: Extras, out_dtype: torch.dtype, transposes: bool = False
) -> Plan:
    """The plan of a call."""
    sequences = max(1, extras.sequences)
    seqlen_q = max(1, q.shape[1] // sequences)
    pack = 1 if problem.is_packed else pack_of(problem, seqlen_q)
    return plan_of(problem, pack, out_dtype, transposes)


@functools.lru_cache(maxsize=1024)
def plan_of(problem: Problem, pack: int, out_dtype: torch.dtype, transposes: bool) -> Plan:
    """The plan of a problem whose tiles hold `pack` heads."""
    block_d, block_dv = block_of(problem.headdim), block_of(problem.headdim_v)
    rows, out_columns = WARPGROUP_ROWS, min(block_dv, OUT_COLUMNS.value)
    # Each sequence has a multiple of COLUMNS, so that no block is of two sequences. Half of
    # them where positions or tanh take registers in the loop
    block_n, stages = TILES[max(block_d, block_dv)]
    block_n = block_n if problem.has_plain_scores else block_n // 2
    block_n = min(block_n, COLUMNS) if problem.is_packed else block_n
    tile = Pipeline(
        BLOCK_M=2 * rows // pack,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
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
    blocks = dict(
        q=[1, 1, rows // pack, pack, block_d],
        k=[1, 1, block_n, block_d],
        v_t=[1, 1, block_dv, block_n],
        out=[*of_out, out_columns],
        values=[1, 1, COLUMNS, block_dv],
    )
    dtypes = dict.fromkeys(blocks, gl.float8e4nv) | dict(out=GL_OUT[out_dtype], values=gl.uint8)
    features = features_of(problem, has_fast_tanh=True)
    return Plan(features, tile, in_shared(dtypes, blocks))


def shared_memory(tile: Pipeline, out_columns: int, out_dtype: torch.dtype) -> int:
    """Bytes of shared memory of a program, with 1 KiB for its barriers."""
    q = 2 * tile.Q_STAGES * WARPGROUP_ROWS * tile.BLOCK_D
    kv = tile.STAGES * tile.BLOCK_N * (tile.BLOCK_D + tile.BLOCK_DV)
    values = 2 * COLUMNS * tile.BLOCK_DV * tile.TRANSPOSES
    return q + kv + values + 2 * WARPGROUP_ROWS * out_columns * out_dtype.itemsize + 1024
