"""The launches of a backward, of the operands that its kernels read and write."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ....problem import Extras, Grads, Problem, Saved, Scalars
from ....tile.types import Tile
from ...common import program
from ...common.arguments import bias_of, numbers_of, optionals_of, sizes_of, strided
from ...common.bwd_dbias import attn_bwd_dbias_kernel, sharing_of
from ...common.bwd_delta import Accumulated, Scaled, bwd_delta_kernel
from ...common.bwd_rest import attn_bwd_rest_kernel
from ...common.program import checked
from ...common.workspace import Workspace
from .. import assembly, dependents
from ..descriptors import of_backward, ragged_steps
from ..launch import Launch, programs_of
from ..padded import padded_width
from . import dropout
from .bias_pairs import target_of
from .dq import hopper_bwd_dq_kernel
from .kernel import hopper_bwd_kernel
from .mma_dq import hopper_bwd_query_kernel
from .plan import ROWS, columns_of_dq, padded_blocks, plan_for
from .queue import programs_beside_dq, queue_of, queue_of_queries


class BackwardLaunch(Launch):
    """A launch of the kernel of all gradients but dQ."""

    __slots__ = ()
    asm = assembly.ASM | dropout.ASM | dependents.ASM


class Kernels:
    """The launches of one backward, and the slices that they leave to each other."""

    def __init__(
        self,
        problem: Problem,
        scalars: Scalars,
        saved: Saved,
        extras: Extras,
        grads: Grads,
        work: Workspace,
    ) -> None:
        q, k, lse = saved.q, saved.k, saved.lse
        self.saved, self.extras, self.grads = saved, extras, grads
        self.sizes = sizes_of(q, k, extras)
        self.plan, of_ds = plan_for(
            problem, scalars, self.sizes, q, k, saved.v, extras.bias, grads.dbias
        )
        self.has_dq = self.plan.tile.HAS_DQ
        if not self.has_dq:  # no sum needs an order
            problem = problem._replace(deterministic=False)
        self.problem = problem
        self.optionals = optionals_of(extras, problem.mods)
        self.numbers = numbers_of(scalars, q.shape[1], k.shape[1])
        self.shared = dict(optionals=self.optionals, sizes=self.sizes, numbers=self.numbers)
        # Batch strides of k and v, in heads: see `ragged_by_head`
        self.steps = dict(heads_per_batch=(ragged_steps(k)[2], ragged_steps(saved.v)[2]))
        tile, m_blocks = self.plan.tile, padded_blocks(problem, self.sizes)
        # Of the kernels around it
        columns = columns_of_dq(problem, tile)
        self.rows = Tile(ROWS, tile.BLOCK_N, columns, BLOCK_DV=tile.BLOCK_DV, DESCRIPTORS=False)
        # No larger than a block mask's
        self.blocks = self.rows._replace(BLOCK_M=64, BLOCK_N=64, BLOCK_D=tile.BLOCK_D)
        heads = tuple(lse.shape[:2])
        self.padded, self.tiles = m_blocks * ROWS, heads[0] * heads[1] * m_blocks
        self.dq = self.semaphore = None
        if self.has_dq:
            self.dq = work.add("accumulated", (*heads, self.padded, columns))
            self.semaphore = work.add("dq_semaphore", (*heads, m_blocks, 2), torch.int32)
        self.stats = work.add("stats", (*heads, 2, self.padded))
        self.delta = self.lost = self.parts = self.ds = None
        self.dout: Any = saved.dout
        if problem.has_bias_grad and not tile.BIAS_GRAD:
            self.delta = work.add("delta", lse.shape)
        mean = self.sizes.seqlen_k // max(self.sizes.packed, 1)
        self.keys = mean // (2 if problem.is_causal else 1)  # of a query
        if scalars.left >= 0:
            self.keys = min(self.keys, scalars.left + 1)
        if problem.has_natural_scores:
            self.lost = work.add("lost", lse.shape)
            shape = lse.shape[0], lse.shape[2], lse.shape[1], problem.headdim_v
            rows = work.add("scaled", (*shape[:3], padded_width(shape[3])), problem.dtype)
            self.dout = rows.as_strided(shape, rows.strides)
        if problem.has_sinks:  # blocks between packed sequences have no part
            self.parts = work.add("parts", (*heads, m_blocks), is_cleared=problem.is_packed)
        if of_ds is not None:
            self.ds = work.add("ds", of_ds, problem.dtype)
        self.target = target_of(self.plan, grads, self.ds)

    def rest(self) -> program.Launch:
        """What the lse of large scores has lost."""
        q, k, v, lse = self.saved.q, self.saved.k, self.saved.v, self.saved.lse
        blocks = triton.cdiv(q.shape[1], 64) + self.sizes.packed
        args = dict(q=strided(q), k=strided(k), v=strided(v), lse=lse, rest=self.lost)
        return self.by_blocks(attn_bwd_rest_kernel, blocks * q.shape[0] * q.shape[2], args)

    def before(self) -> program.Launch:
        """delta, and clears what the kernel of the gradients adds to."""
        saved, unit = self.saved, 1.0
        if self.plan.tile.LSE_FIRST:
            unit = self.numbers.scale_log2
        accumulated: Any = Accumulated
        dq = self.dq or self.stats  # the kernel takes no None there
        fields: dict[str, Any] = dict(dq=dq, stats=self.stats, padded=self.padded)
        fields |= dict(lse_unit=unit, delta_unit=self.numbers.dropout_factor)
        if self.lost is not None:
            accumulated = Scaled
            fields |= dict(rest=self.lost, dout=strided(self.dout))
        args = dict(out=strided(saved.out), dout=strided(saved.dout), lse=saved.lse)
        args |= dict(dlse=saved.dlse, delta=self.delta, accumulated=accumulated(**fields))
        args |= dict(dq_semaphore=self.semaphore, sink_parts=self.parts)
        args |= dict(optionals=self.optionals, sizes=self.sizes)
        return self.over_rows(bwd_delta_kernel, args)

    def main(self) -> program.Launch:
        """All gradients but dQ, which is accumulated."""
        plan, saved, grads = self.plan, self.saved, self.grads
        inputs = dict(q_desc=saved.q, do_desc=self.dout, k_desc=saved.k, v_desc=saved.v)
        args: dict[str, Any] = of_backward(plan, inputs | dict(stats_desc=self.stats))
        args |= dict(dq=self.dq, dq_semaphore=self.semaphore)
        args |= of_backward(plan, dict(dk_desc=grads.dk, dv_desc=grads.dv))
        pairs = dict(bias_desc=self.extras.bias, dbias_desc=self.target)
        args |= dict.fromkeys(pairs)
        if plan.tile.BIAS_COPIED:
            args |= of_backward(plan, {name: x for name, x in pairs.items() if x is not None})
        queue = queue_of(self.problem, plan.tile.BLOCK_N, saved.q, saved.k, self.sizes)
        args |= self.steps | dict(queue=queue) | self.shared
        constants = dict(FEATURES=plan.features, TILE=plan.tile)
        programs = programs_of(queue.tiles, saved.q.device)
        if self.has_dq and not plan.tile.ORDERED:
            programs = programs_beside_dq(queue.tiles, self.keys, saved.q.device)
        return checked(
            BackwardLaunch(hopper_bwd_kernel, programs, args, constants, dict(num_warps=4))
        )

    def after(self) -> list[Any]:
        """dQ, and the gradient of a bias, where it is not dS."""
        if not self.has_dq:
            return [self.queries()]
        is_counted = not self.plan.tile.ORDERED
        args = dict(accumulated=self.dq, dq=strided(self.grads.dq))
        args |= dict(counts=self.semaphore if is_counted else None) | self.shared
        launches = [self.over_rows(hopper_bwd_dq_kernel, args, IS_EARLY=is_counted)]
        if is_counted:
            launches[0].options["launch_pdl"] = True
        if self.grads.dbias is not None and not self.plan.tile.BIAS_GRAD:
            launches.append(self.bias())
        return launches

    def queries(self) -> program.Launch:
        """dQ by a kernel of its own."""
        plan, saved = self.plan, self.saved
        tensors = dict(q_desc=saved.q, do_desc=self.dout, k_desc=saved.k, v_desc=saved.v)
        tensors |= dict(stats_desc=self.stats, dq_desc=self.grads.dq)
        queue = queue_of_queries(self.problem, saved.q, tiles=self.tiles)
        args: dict[str, Any] = of_backward(plan, tensors) | self.steps
        args |= dict(queue=queue) | self.shared
        constants = dict(FEATURES=plan.features, TILE=plan.tile)
        programs, options = programs_of(queue.tiles, saved.q.device), dict(num_warps=4)
        launch = BackwardLaunch(hopper_bwd_query_kernel, programs, args, constants, options)
        return checked(launch)

    def bias(self) -> program.Launch:
        """The gradient of the bias, by a kernel of its own; of no programs where it is empty."""
        q, k, v, dbias = self.saved.q, self.saved.k, self.saved.v, self.grads.dbias
        sharing, programs = sharing_of(dbias, q, k, self.blocks)
        args = dict(q=strided(q), k=strided(k), v=strided(v), dout=strided(self.dout))
        args |= dict(dbias=bias_of(dbias), stats=(self.saved.lse, self.delta, None))
        return self.by_blocks(attn_bwd_dbias_kernel, programs, args, sharing=sharing)

    def by_blocks(self, kernel: Any, programs: int, args: Any, **last: Any) -> program.Launch:
        """A portable kernel, over pairs of blocks of 64."""
        constants = dict(FEATURES=self.plan.features, TILE=self.blocks)
        options = dict(num_warps=8, num_stages=1)
        args = args | self.shared | last
        return checked(program.Launch(kernel, programs, args, constants, options))

    def over_rows(self, kernel: Any, args: dict[str, Any], **constants: Any) -> program.Launch:
        """A kernel before or after that of the gradients, over tiles of ROWS queries."""
        tile = self.rows
        options = dict(num_warps=16 if max(tile.BLOCK_D, tile.BLOCK_DV) > 128 else 8)
        constants = dict(FEATURES=self.plan.features, TILE=tile) | constants
        return checked(program.Launch(kernel, self.tiles, args, constants, options))
