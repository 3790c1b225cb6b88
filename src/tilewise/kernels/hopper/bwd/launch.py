"""Host side of the backward: delta, then all gradients, then dQ from its accumulator.

Memory besides the gradients: dQ in fp32, and two floats a query; of packed sequences for up to 128
queries a sequence more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl

from ....emulation import emulate, emulator_seed, interpret
from ....problem import NO_MODS, Between, Extras, Grads, Problem, Saved, Scalars
from ....tile.seqlen import padded_row
from ....tile.types import Features, KeyPipeline, Numbers, Optionals, Queue, Sizes, Tile
from ...common.arguments import bias_of, features_of, numbers_of, optionals_of, sizes_of, strided
from ...common.building import first_launch, num_sms, on_device
from ...common.bwd_dbias import attn_bwd_dbias_kernel, sharing_of
from ...common.bwd_delta import Accumulated, Scaled, bwd_delta_kernel
from ...common.bwd_rest import attn_bwd_rest_kernel
from ...common.outputs import empty_grads
from ...common.relaunch import Launched, distinct_extras, distinct_views, may_relaunch
from .. import assembly
from ..bias_memory import has_tiles
from ..descriptors import (
    GL_DTYPES,
    DescriptorFields,
    checked,
    in_steps,
    is_in_steps,
    of_backward,
    ragged_steps,
)
from ..padded import copy_back, in_padded_rows, is_padded, with_padded_rows
from . import dropout as bwd_dropout
from . import work_tile as bwd_work
from .bias_pairs import SUMMED, clear_unseen, sum_scores, sums_of, target_of, way_of
from .dq import hopper_bwd_dq_kernel
from .kernel import hopper_bwd_kernel
from .queue import queue_of
from .relaunch import (
    NOTHING,
    Ready,
    Scratch,
    fill_dsinks,
    make_scratch,
    ready_of,
    relaunch_backward,
    shapes_of,
)

Tensor = torch.Tensor
ROWS = bwd_work.ROWS.value  # of a tile of the kernels before and after: a multiple of BLOCK_M
TINY = 1e-30  # a scale under this is no divisor


class Plan(NamedTuple):
    """What a `Problem` selects: the kernels' constants and the blocks of the descriptors."""

    features: Features
    tile: KeyPipeline
    edge: Tile  # of the kernels before and after
    blocks: tuple[list[int], ...]  # of q, dout, k, v, stats, dk, dv, the bias and its gradient
    layouts: tuple[Any, ...]  # of these blocks in shared memory


class BwdArgs(NamedTuple):
    """The arguments of the kernel but its constants."""

    q: DescriptorFields
    dout: DescriptorFields
    k: DescriptorFields
    v: DescriptorFields
    stats: DescriptorFields
    dq: Tensor  # accumulated
    dq_semaphore: Tensor | None
    dk: DescriptorFields
    dv: DescriptorFields
    bias: DescriptorFields | None
    dbias: DescriptorFields | None
    heads_per_batch: tuple[int, int]  # batch strides of k and v, in heads; see `ragged_by_head`
    queue: Queue
    optionals: Optionals
    sizes: Sizes
    numbers: Numbers


def plan_of(
    problem: Problem,
    has_scale: bool,
    is_copied: bool = False,
    bias_grad: bool = False,
    in_heads: bool = True,
) -> Plan:
    """The plan of a problem. `has_scale`: its scale is large enough to divide by; `is_copied`:
    TMA can read its bias; `bias_grad`: and write dS as the gradient of that; `in_heads`:
    batches of K and V are a whole number of heads apart.

    To headdim 128 both head dims are padded to the wider one.
    """
    block_d, block_dv = (
        max(64, triton.next_power_of_2(d)) for d in (problem.headdim, problem.headdim_v)
    )
    widest = max(block_d, block_dv)
    if widest <= 128:
        block_d = block_dv = widest
    n = 128 if widest <= 128 else 64
    # 128 queries at a time leave no registers for positions or derivatives
    needs_registers = problem.is_modified or problem.has_alibi or problem.has_softcap
    m = 128 if widest == 64 and not needs_registers else 64
    # Tall tiles have none to load lse ahead of S. Of a bias of -1e9 the quotient of lse and scale
    # times scale is another number than lse
    is_linear = not (problem.has_softcap or problem.mods.score or problem.has_bias)
    lse_first = m == 64 and has_scale and is_linear
    # Tall blocks of sequences that are all as long are ragged, too: the compiler then spills no
    # address of the loop (H200, back to back, headdim 64, full: 5 % at 4Ki, 2 % at 512)
    is_ragged = problem.is_packed or problem.has_seqused_k or (m == 128 and in_heads)
    has_metadata = problem.mods.block != NO_MODS.block or problem.has_dropout
    is_copied = is_copied and n == 128  # wide heads leave no shared memory
    flags = problem.deterministic, lse_first, is_ragged, has_metadata, is_copied, bias_grad
    tile = KeyPipeline(m, n, block_d, block_dv, *flags)
    before = [1, 1, 1] if problem.is_packed else [1, 1]  # the dimensions of `ragged_by_head`
    before_keys = [1, 1, 1] if is_ragged else [1, 1]
    exact = problem.has_fp32_key_grads
    halves = 2 if exact else 1  # through a staging buffer of as many bytes
    blocks = (
        [*before, m, block_d],
        [*before, m, block_dv],
        [*before_keys, n, block_d],
        [*before_keys, n, block_dv],
        [1, 1, 1, m],
        [*before, 64, block_d // halves],
        [*before, 64, block_dv // halves],
        [1, 1, m, 64],
        [1, 1, m, 64],
    )
    element = GL_DTYPES[problem.dtype]
    of_grads = gl.float32 if exact else element
    kinds = (*[element] * 4, gl.float32, of_grads, of_grads, element, element)
    layouts = tuple(map(gl.NVMMASharedLayout.get_default_for, blocks, kinds))
    features = features_of(problem)._replace(FAST_TANH=problem.has_softcap)
    edge = Tile(ROWS, 16, block_d, block_dv, False)
    return Plan(features, tile, edge, blocks, layouts)


def plan_for(
    problem: Problem, scalars: Scalars, q: Tensor, k: Tensor, v: Tensor, bias, dbias
) -> tuple[Plan, tuple[int, ...] | None]:
    """The plan of a call, and the shape of the dS that is summed for the gradient of the bias."""
    way = way_of(problem, bias, dbias, q, k)
    has_scale, in_heads = abs(scalars.scale) > TINY, is_in_steps(k) and is_in_steps(v)
    plan = plan_of(problem, has_scale, has_tiles(bias, q), bool(way), in_heads)
    return plan, sums_of(q, k) if way == SUMMED else None


def backward(problem: Problem, saved: Saved, extras: Extras, scalars: Scalars) -> Grads:
    """Gradients by recomputation."""
    return Backward(problem, scalars)(saved, extras)


def prepare_backward(problem: Problem, scalars: Scalars) -> Backward:
    """The backward of one signature."""
    return Backward(problem, scalars)


class Backward:
    """The backward of one signature: the first launches through Triton's launcher, later ones
    directly.
    """

    def __init__(self, problem: Problem, scalars: Scalars) -> None:
        self.problem = problem
        self.scalars = scalars
        self.ready: Ready | None = None
        self.is_copied = False  # whether the relaunched kernels read or write copies

    def __call__(self, saved: Saved, extras: Extras) -> Grads:
        return self.interleaved(saved, extras, NOTHING)

    def interleaved(self, saved: Saved, extras: Extras, between: Between) -> Grads:
        """The gradients, with what a caller launches between the kernels. Where k, v or dK, dV are
        copied it is launched before the first kernel and after the last.
        """
        ready = self.ready
        grads = empty_grads(self.problem, saved.q, saved.k, saved.v, extras)
        is_ready = ready is not None and may_relaunch(ready.device)
        if ready is not None and not self.is_copied:
            if not (is_ready and relaunch_backward(ready, saved, grads, extras, between)):
                self._launch(saved, grads, extras, between)
            return grads
        has_work = not is_empty(saved, grads)
        around, inside = NOTHING, between
        if not has_work or is_padded(self.problem):
            around, inside = inside, around
        around.before_keys()
        if has_work:
            inputs, outputs = readable(self.problem, saved), grads
            if is_padded(self.problem):
                outputs = with_padded_rows(grads)
            self.is_copied = inputs is not saved or outputs is not grads
            if not (is_ready and relaunch_backward(ready, inputs, outputs, extras, inside)):
                self._launch(inputs, outputs, extras, inside)
            copy_back(outputs, grads)
        around.after_keys(grads)
        return grads

    def _launch(self, saved: Saved, grads: Grads, extras: Extras, between: Between) -> None:
        with on_device(saved.q.device):
            self._first(Saved(*distinct_views(saved)), grads, distinct_extras(extras), between)

    def _first(self, saved: Saved, grads: Grads, extras: Extras, between: Between) -> None:
        """The first launches of a signature, through Triton's launcher."""
        problem, saved_by_caller = self.problem, saved
        dout, _, q, k, v, _, lse = saved
        if problem.has_seqused_k and not problem.is_packed:
            between.before_keys()
            between = between._replace(before_keys=NOTHING.before_keys)
            k, v = in_steps(k), in_steps(v)
            saved = saved._replace(k=k, v=v)
        plan, ds = plan_for(problem, self.scalars, q, k, v, extras.bias, grads.dbias)
        numbers = numbers_of(self.scalars, q, k)
        groups = optionals_of(extras, problem.mods), sizes_of(q, k, extras), numbers
        m_blocks = padded_blocks(problem, groups[1])
        programs = lse.shape[0] * lse.shape[1] * m_blocks
        scratch = make_scratch(problem, shapes_of(problem, plan, lse, m_blocks, ds), lse)
        added = accumulated_of(plan, scratch, numbers), scratch.dq_semaphore
        reads = strided(saved.out), strided(dout), lse, saved.dlse, scratch.delta
        args = (*reads, *added, scratch.parts, *groups[:2])
        launches = run_rest(problem, plan, saved, scratch.lost, groups)
        launches.append(run_processing(bwd_delta_kernel, programs, args, plan, q.device))
        if scratch.dout is not None:
            saved = saved._replace(dout=scratch.dout)
        fill_dsinks(grads, scratch.parts)
        between.before_keys()
        if k.numel() == 0:
            between.after_keys(grads)
            return
        target = target_of(plan, grads, scratch.ds)
        clear_unseen(problem, target)
        args = arguments(problem, plan, saved, added, grads, (extras.bias, target), groups)
        launches.append(run_main(plan, args, q.device))
        between.after_keys(grads)
        if plan.tile.BIAS_GRAD:
            sum_scores(grads.dbias, scratch.ds)
        of_dq = scratch.dq, strided(grads.dq), *groups
        launches.append(run_processing(hopper_bwd_dq_kernel, programs, of_dq, plan, q.device))
        if grads.dbias is not None and not plan.tile.BIAS_GRAD:
            of_pairs = (
                *map(strided, (q, k, v, saved.dout)),
                bias_of(grads.dbias),
                (lse, scratch.delta, None),
            )
            launches.append(run_dbias(plan, (q, k, grads.dbias), (*of_pairs, *groups)))
        launches = [x for x in launches if x is not None]
        is_copied = k is not saved_by_caller.k or v is not saved_by_caller.v
        if len(launches) > 2 and not is_copied:
            tensors = saved_by_caller, extras, grads, scratch
            self.ready = ready_of(plan, tensors, launches, problem)


def readable(problem: Problem, saved: Saved) -> Saved:
    """The saved tensors, with copies of those that kernels cannot read."""
    (dout,) = in_padded_rows(saved.dout)  # such as the expanded gradient of a sum
    dlse = None if saved.dlse is None else saved.dlse.contiguous()
    q, k, v = saved.q, saved.k, saved.v
    if is_padded(problem):
        q, k, v = in_padded_rows(q, k, v)
    copies = Saved(dout, dlse, q, k, v, saved.out, saved.lse)
    return saved if all(a is b for a, b in zip(copies, saved)) else copies


def is_empty(saved: Saved, grads: Grads) -> bool:
    """Whether there is nothing to compute; fills gradients that are 0 with it."""
    if saved.q.numel() == 0 or saved.k.numel() == 0:  # a descriptor of no rows is invalid
        for grad in (*grads[:3], grads.dbias):
            if grad is not None:
                grad.zero_()
    if saved.lse.numel() == 0 and grads.dsinks is not None:
        grads.dsinks.zero_()
    return saved.lse.numel() == 0


def accumulated_of(plan: Plan, scratch: Scratch, numbers: Numbers) -> Accumulated | Scaled:
    """What the kernel before fills, as kernels take it."""
    lse_unit = numbers.scale_log2 if plan.tile.LSE_FIRST else 1.0
    padded = scratch.stats.shape[3]
    fields = scratch.dq, scratch.stats, padded, lse_unit, numbers.dropout_factor
    if scratch.dout is None:
        return Accumulated(*fields)
    return Scaled(*fields, scratch.lost, strided(scratch.dout))


def padded_blocks(problem: Problem, sizes: Sizes) -> int:
    """Blocks of ROWS queries of a head, in which no two sequences share a block. Packed sequences
    can have as many, whatever their lengths.
    """
    if problem.is_packed:
        return padded_row.fn(sizes.seqlen_q, sizes.packed, ROWS) // ROWS
    return triton.cdiv(sizes.seqlen_q, ROWS)


def arguments(
    problem: Problem, plan: Plan, saved: Saved, added: tuple, grads: Grads, pairs, groups: tuple
) -> BwdArgs:
    """What the kernel is launched with. `pairs`: the bias, and where its gradient is written, or
    None; `groups` are its optionals, sizes and numbers.
    """
    accumulated, dq_semaphore = added
    q, k = saved.q, saved.k
    tensors = q, saved.dout, k, saved.v, accumulated.stats, grads.dk, grads.dv
    of_pairs = [x for x in pairs if x is not None] if plan.tile.BIAS_COPIED else []
    described = of_backward(plan, *tensors, *of_pairs)
    *reads, dk, dv, for_bias, for_dbias = (*described, None, None)[:9]
    heads_per_batch = ragged_steps(k)[2], ragged_steps(saved.v)[2]
    queue = queue_of(problem, plan.tile.BLOCK_N, q, k, groups[1])
    written = accumulated.dq, dq_semaphore, dk, dv, for_bias, for_dbias
    return BwdArgs(*reads, *written, heads_per_batch, queue, *groups)


def run_main(plan: Plan, args: BwdArgs, device: torch.device) -> Launched | None:
    """The kernel itself; there is no launch where it was emulated."""
    queue = args.queue
    kernel = hopper_bwd_kernel
    constants = dict(FEATURES=plan.features, TILE=plan.tile, num_warps=4)
    if emulator_seed() is not None and device.type == "cpu":
        programs = min(queue.tiles, 4)  # few, so that each works through several tiles
        emulated = emulate(kernel, assembly.ASM | bwd_dropout.ASM)
        emulated[(programs,)](*checked(args), **constants)
        return None
    programs = min(queue.tiles, num_sms(device))
    return Launched(first_launch(kernel, programs, *checked(args), **constants), programs, args)


def run_dbias(plan: Plan, tensors: tuple[Tensor, ...], args: tuple) -> Launched | None:
    """The gradient of the bias, by a kernel of its own; None where it is empty."""
    q, k, dbias = tensors
    tile = Tile(64, 64, plan.tile.BLOCK_D, plan.tile.BLOCK_DV, False)
    sharing, programs = sharing_of(dbias, q, k, tile)
    if programs == 0:
        return None
    options = dict(num_warps=8, num_stages=1)
    constants = plan.features, tile
    return _run(attn_bwd_dbias_kernel, programs, (*args, sharing), constants, q.device, options)


def run_rest(
    problem: Problem, plan: Plan, saved: Saved, lost: Tensor | None, groups: tuple
) -> list[Launched | None]:
    """What the lse of large scores has lost, where a bias or a score function may make such."""
    if lost is None:
        return []
    q, sizes = saved.q, groups[1]
    tile = plan.edge._replace(BLOCK_M=64, BLOCK_N=64)  # no larger than a block mask's
    blocks = triton.cdiv(q.shape[1], tile.BLOCK_M) + sizes.packed
    programs = blocks * q.shape[0] * q.shape[2]
    args = *map(strided, (q, saved.k, saved.v)), saved.lse, lost, *groups
    constants, options = (plan.features, tile), dict(num_warps=8, num_stages=1)
    return [_run(attn_bwd_rest_kernel, programs, args, constants, q.device, options)]


def run_processing(
    kernel: Any, programs: int, args: tuple, plan: Plan, device: torch.device
) -> Launched | None:
    """Launches a pre- or post-processing kernel, over tiles of ROWS queries."""
    is_wide = max(plan.edge.BLOCK_D, plan.edge.BLOCK_DV) > 128
    options = dict(num_warps=16 if is_wide else 8)
    return _run(kernel, programs, args, (plan.features, plan.edge), device, options)


def _run(
    kernel: Any, programs: int, args: tuple, constants: tuple, device: torch.device, options: dict
) -> Launched | None:
    """A Triton kernel; on CPU tensors through the interpreter, and there is no launch then."""
    features, tile = constants
    if emulator_seed() is not None and device.type == "cpu":
        features = features._replace(FAST_TANH=False)  # an instruction of GPUs
        interpret(kernel)[(programs,)](*args, FEATURES=features, TILE=tile)
        return None
    compiled = first_launch(kernel, programs, *args, FEATURES=features, TILE=tile, **options)
    return Launched(compiled, programs, (*args, *constants))
