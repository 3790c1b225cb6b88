"""Host side of the backward: delta, then all gradients, then dQ from its accumulator.

Memory beside the gradients: dQ in fp32, and two floats a query; of packed sequences for up to 128
queries a sequence more.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon import language as gl

from ...problem import Extras, Grads, Problem, Scalars
from ...testing.switch import emulator_seed
from ...tile.seqlen import padded_row
from ...tile.types import Features, KeyPipeline, Queue, Sizes, Tile
from ..arguments import aligned, features_of, numbers_of, optionals_of, sizes_of, strided
from ..bwd_delta import Accumulated, bwd_delta_kernel
from ..outputs import empty_grads
from . import bwd_work
from .bwd import hopper_bwd_kernel
from .bwd_dq import hopper_bwd_dq_kernel
from .bwd_wide import hopper_bwd_wide_kernel
from .counters import counter_of, processors
from .described import (
    ASM,
    ELEMENTS,
    Described,
    by_head,
    checked,
    in_steps,
    ragged_by_head,
    ragged_steps,
)

Tensor = torch.Tensor
ROWS = bwd_work.ROWS.value  # of a tile of the kernels before and after: a multiple of BLOCK_M
MEGABYTE = 1 << 20
TINY = 1e-30  # a scale under this is no divisor


class Plan(NamedTuple):
    """What a `Problem` selects: constants of the kernels, and the blocks of the descriptors."""

    features: Features
    tile: KeyPipeline
    edge: Tile  # of the kernels before and after
    blocks: tuple[list[int], ...]  # of q, dout, k, v, stats, dk and dv
    layouts: tuple[Any, ...]  # of these blocks in shared memory


@functools.lru_cache(maxsize=1024)
def plan_of(problem: Problem, has_scale: bool) -> Plan:
    """The plan of a problem. `has_scale`: its scale is large enough to divide by.

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
    m = 128 if widest == 64 and not (problem.has_alibi or problem.has_softcap) else 64
    # Tall tiles have none to load lse ahead of S
    lse_first = m == 64 and has_scale and not problem.has_softcap
    is_ragged = problem.is_packed or problem.has_seqused_k
    tile = KeyPipeline(m, n, block_d, block_dv, problem.deterministic, lse_first, is_ragged)
    before = [1, 1, 1] if problem.is_packed else [1, 1]  # the dimensions of `ragged_by_head`
    before_keys = [1, 1, 1] if is_ragged else [1, 1]
    blocks = (
        [*before, m, block_d],
        [*before, m, block_dv],
        [*before_keys, n, block_d],
        [*before_keys, n, block_dv],
        [1, 1, 1, m],
        [*before, 64, block_d],
        [*before, 64, block_dv],
    )
    element = ELEMENTS[problem.dtype]
    kinds = (element, element, element, element, gl.float32, element, element)
    layouts = tuple(map(gl.NVMMASharedLayout.get_default_for, blocks, kinds))
    features = features_of(problem)._replace(FAST_TANH=problem.has_softcap)
    edge = Tile(ROWS, 16, block_d, block_dv, False)
    return Plan(features, tile, edge, blocks, layouts)


def backward(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Extras,
    scalars: Scalars,
) -> Grads:
    """Gradients by recomputation."""
    grads = empty_grads(problem, q, k, v, extras)
    if q.numel() == 0 or k.numel() == 0:  # a descriptor of no rows is invalid
        for grad in grads[:3]:
            grad.zero_()
    batch, _, nheads, _ = q.shape
    if lse.numel() == 0:
        if grads.dsinks is not None:
            grads.dsinks.zero_()
        return grads
    if dout.stride(-1) != 1 or not aligned(dout):  # such as the expanded gradient of a sum
        dout = dout.contiguous()
    if problem.has_seqused_k and not problem.is_packed:
        k, v = in_steps(k), in_steps(v)
    plan = plan_of(problem, abs(scalars.scale) > TINY)
    optionals, sizes = optionals_of(extras), sizes_of(q, k, extras)
    numbers = numbers_of(scalars, q, k)
    m_blocks = padded_blocks(problem, sizes)
    padded = m_blocks * ROWS
    accumulated = Accumulated(
        lse.new_empty(batch, nheads, padded, plan.tile.BLOCK_D),
        lse.new_empty(batch, nheads, 2, padded),
        padded,
        numbers.scale_log2 if plan.tile.LSE_FIRST else 1.0,
    )
    turns = None
    if plan.tile.ORDERED:
        turns = lse.new_empty(batch, nheads, m_blocks, 2, dtype=torch.int32)
    parts = None
    if grads.dsinks is not None:  # blocks between packed sequences have no part
        parts = (lse.new_zeros if problem.is_packed else lse.new_empty)(batch, nheads, m_blocks)
    dlse = None if dlse is None else dlse.contiguous()
    with on_device(q.device):
        reads = strided(out), strided(dout), lse, dlse, None
        args = (*reads, accumulated, turns, parts, optionals, sizes)
        run_edge(bwd_delta_kernel, batch * nheads * m_blocks, args, plan, q.device)
        if grads.dsinks is not None:
            grads.dsinks.copy_(parts.sum((0, 2)))
        if k.numel() == 0:
            return grads
        run_main(
            problem, plan, dout, q, k, v, (accumulated, turns), grads, optionals, sizes, numbers
        )
        args = accumulated.dq, strided(grads.dq), optionals, sizes, numbers
        run_edge(hopper_bwd_dq_kernel, batch * nheads * m_blocks, args, plan, q.device)
    return grads


def padded_blocks(problem: Problem, sizes: Sizes) -> int:
    """Blocks of ROWS queries of a head, in which no two sequences share a block. Packed sequences
    can have as many, whatever their lengths.
    """
    if problem.is_packed:
        return padded_row.fn(sizes.seqlen_q, sizes.packed, ROWS) // ROWS
    return triton.cdiv(sizes.seqlen_q, ROWS)


def arguments(
    problem: Problem, plan: Plan, dout, q, k, v, added: tuple, grads: Grads, sizes: Sizes
) -> tuple:
    """The descriptors of the kernel, what it adds to among them, and its queue."""
    accumulated, turns = added
    x = accumulated.stats
    stats = Described(x, [*x.shape], [*x.stride()], plan.blocks[4], plan.layouts[4])
    tensors = q, dout, k, v, grads.dk, grads.dv
    blocks, layouts = ([*x[:4], *x[5:]] for x in (plan.blocks, plan.layouts))
    *reads, dk, dv = map(described, tensors, blocks, layouts)
    further = ragged_steps(k)[2], ragged_steps(v)[2]
    queue = queue_of(problem, plan, q, k, sizes)
    return *reads, stats, accumulated.dq, turns, dk, dv, further, queue


def described(x: Tensor, block: list[int], layout: Any) -> Described:
    """A tensor for blocks of `plan_of`, of which ragged ones have a dimension more."""
    return (ragged_by_head if len(block) == 5 else by_head)(x, block, layout)


def queue_of(problem: Problem, plan: Plan, q: Tensor, k: Tensor, sizes: Sizes) -> Queue:
    """The tiles of the call; of packed sequences as many as there can be: each has a block that is
    not full, at most.
    """
    batch, seqlen_k, nheads_k, _ = k.shape
    heads, counter = batch * nheads_k, counter_of(q.device)
    if problem.is_packed:
        n_blocks = seqlen_k // plan.tile.BLOCK_N + sizes.packed
        return Queue(counter, heads * n_blocks, nheads_k, heads, 1)
    n_blocks = triton.cdiv(seqlen_k, plan.tile.BLOCK_N)
    return Queue(counter, heads * n_blocks, nheads_k, heads, together(problem, q))


def run_main(problem, plan: Plan, dout, q, k, v, added: tuple, grads: Grads, *groups) -> None:
    """The kernel itself; `groups` are its optionals, sizes and numbers."""
    args = (*arguments(problem, plan, dout, q, k, v, added, grads, groups[1]), *groups)
    queue = args[10]
    kernel = hopper_bwd_kernel if plan.tile.BLOCK_N == 128 else hopper_bwd_wide_kernel
    constants = dict(FEATURES=plan.features, TILE=plan.tile, num_warps=4)
    if (seed := emulator_seed()) is not None and q.device.type == "cpu":
        from ...testing.hopper import emulate

        programs = min(queue.tiles, 4)  # few, so that each works through several tiles
        emulate(kernel, seed=seed, asm=ASM)[(programs,)](*checked(args), **constants)
    else:
        programs = min(queue.tiles, processors(q.device))
        kernel[(programs,)](*checked(args), **constants)


def together(problem: Problem, q: Tensor) -> int:
    """Key heads whose tiles are mixed, evenly.

    Under a causal mask those whose queries, with dQ, take 32 MB of the L2 cache (H200, headdim 128,
    1Ki: 348 TFLOP/s; 329 with 8 MB, 315 with 64). Where tiles wait for each other, more: those of
    one head then start at different times (H200, headdim 64 to 256, 512 to 16Ki: within 5 % of the
    best number nearly everywhere, where 2 heads are up to 26 % behind it, and 64 up to 50).
    """
    heads = q.shape[0] * problem.nheads_k
    rows = problem.group * q.shape[1]
    row_bytes = (problem.headdim + problem.headdim_v) * q.itemsize + problem.headdim * 4
    if problem.deterministic:
        most = max(2, 16384 // rows)
    elif problem.is_causal:
        most = max(1, 32 * MEGABYTE // (rows * row_bytes))
    else:
        most = 1
    return triton.cdiv(heads, triton.cdiv(heads, most))


def run_edge(kernel: Any, programs: int, args: tuple, plan: Plan, device: torch.device) -> None:
    """A kernel over tiles of ROWS queries; on CPU tensors through the interpreter."""
    constants = dict(FEATURES=plan.features, TILE=plan.edge)
    if device.type == "cpu":
        from ...testing.interpreter import interpret

        interpret(kernel)[(programs,)](*args, **constants)
    else:
        is_wide = max(plan.edge.BLOCK_D, plan.edge.BLOCK_DV) > 128
        kernel[(programs,)](*args, **constants, num_warps=16 if is_wide else 8)


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes a GPU current that is not."""
    if device.type == "cpu" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)
