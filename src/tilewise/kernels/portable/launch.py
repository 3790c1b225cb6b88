"""Host side: allocates results, picks the tiles, launches.

A `Plan` is a launch that lacks its configuration. The same plans serve a call, which looks its
configuration up, and `tilewise tune`, which tries many.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import torch
import triton

from ...emulation import interpret, interpreter_is_on
from ...mods.codegen import captured_of, function_of, place_function_of
from ...mods.derivative import by_loads
from ...mods.expressions import Node, intern, nodes_of
from ...mods.flatten import take_apart
from ...problem import Extras, Grads, Problem, Saved, Scalars
from ...tile.types import Tile
from ...tuning.config import SHORT, Config, Key
from ...tuning.select import architecture, is_overridden, select
from ...tuning.tables import columns_at_once
from ..common.arguments import (
    bias_of,
    features_of,
    fits_descriptor,
    numbers_of,
    optionals_of,
    sizes_of,
    strided,
)
from ..common.building import first_launch
from ..common.bwd_dbias import attn_bwd_dbias_kernel, sharing_of
from ..common.bwd_delta import bwd_delta_kernel
from ..common.bwd_rest import attn_bwd_rest_kernel
from ..common.outputs import empty_grads, empty_out
from ..common.relaunch import (
    Launched,
    Relaunch,
    addresses_of,
    distinct_extras,
    distinct_views,
    may_relaunch,
    relaunches_of,
)
from .bwd_captured import CapturedLoad, attn_bwd_captured_kernel
from .bwd_dkdv import attn_bwd_dkdv_kernel
from .bwd_dq import attn_bwd_dq_kernel
from .fit import fit_to_memory
from .fwd import attn_fwd_kernel

Tensor = torch.Tensor


class Plan(NamedTuple):
    """A launch without its configuration: a program for each `side` block of `rows`, `copies`
    times.
    """

    name: str  # as the tuning tables call the kernel
    kernel: Any
    problem: Problem
    side: str  # "BLOCK_M" or "BLOCK_N"
    rows: int
    copies: int  # heads times batch
    packed: int  # sequences in these rows, each with a ragged end; 0 where they are no sequences
    read: tuple[Tensor, ...]  # tensors read in tiles
    args: tuple

    def key(self) -> Key:
        """What the tables look up."""
        problem, widest = self.problem, max(padded_headdims(self.problem))
        arch, bits = architecture(self.read[0].device), problem.dtype.itemsize * 8
        is_short = self.rows // max(self.packed, 1) <= SHORT
        # The same, more or less
        same = dict(bwd_dbias="bwd_dq", bwd_captured="bwd_dq", bwd_rest="fwd")
        name = same.get(self.name, self.name)
        return Key(arch, name, widest, bits, problem.is_causal, is_short)

    def config(self) -> Config:
        """What the tables say, cut where there is no room for more."""
        key = self.key()
        return fit_to_memory(select(key, self.read[0].device), key, self.problem, self.side)

    def tile(self, config: Config, arch: str = "") -> Tile:
        """The tile shape; descriptors only where every tensor read allows them. `arch`: on another
        GPU.
        """
        key = self.key()
        key = key._replace(arch=arch or key.arch)
        descriptors = config.descriptors and all(map(fits_descriptor, self.read))
        block_m, block_n = config.BLOCK_M, config.BLOCK_N
        chunk = columns_at_once(key, self.name == "bwd_dbias")
        if self.problem.has_dropout and key.block_d <= 256:
            block_n = max(block_n, 32)  # its random numbers come for 32 keys at a time
        if self.problem.mods.block != (0, 0):  # what a mask lists is made up of whole tiles
            rows, keys = self.problem.mods.block
            block_m, block_n = math.gcd(block_m, rows), math.gcd(block_n, keys)
        return Tile(
            block_m, block_n, *padded_headdims(self.problem), descriptors and not chunk, chunk
        )

    def programs(self, tile: Tile) -> int:
        """How many programs cover the problem."""
        blocks = triton.cdiv(self.rows, getattr(tile, self.side))
        return (blocks + self.packed) * self.copies


def padded_headdims(problem: Problem) -> tuple[int, int]:
    """Both head dims as matmuls take them: powers of two, at least 16, of 8 bits at least 32.

    A V tile under 64 columns is made as wide as K's: Triton 3.6 compiles O += P V wrongly for sm_90
    where V's tile is narrower than both and not copied asynchronously. Outputs are then off by 1,
    or addresses illegal (H200, 2026-11-20; K of 32 to 128 columns, V of 16 to 32; cause unknown).
    """
    least = 32 if problem.dtype.itemsize == 1 else 16
    block_d, block_dv = (
        max(least, triton.next_power_of_2(d)) for d in (problem.headdim, problem.headdim_v)
    )
    return block_d, max(block_dv, min(block_d, 64))


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, scalars: Scalars
) -> tuple[Tensor, Tensor]:
    """`out` and `lse`; allocates nothing else."""
    return Forward(problem, scalars)(q, k, v, extras)


def backward(problem: Problem, saved: Saved, extras: Extras, scalars: Scalars) -> Grads:
    """Gradients by recomputation; allocates them, delta, and one float a tile for the sinks."""
    return Backward(problem, scalars)(saved, extras)


def prepare(problem: Problem, scalars: Scalars, q: Tensor, k: Tensor) -> Forward:
    """The forward of all calls of one signature."""
    return Forward(problem, scalars)


def prepare_backward(problem: Problem, scalars: Scalars) -> Backward:
    """The backward of one signature."""
    return Backward(problem, scalars)


class Forward:
    """Forwards of one signature: the first as Triton launches it, later ones straight to its
    kernel.
    """

    def __init__(self, problem: Problem, scalars: Scalars) -> None:
        self.problem = problem
        self.scalars = scalars
        self.device: int | None = None
        self.relaunches: list[Relaunch] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        out, lse = empty_out(self.problem, q)
        if self.relaunches is not None and may_relaunch(self.device) and not is_overridden():
            triton.set_allocator(_scratch)
            row = q, k, v, out, lse, *extras.tensors
            stream = torch._C._cuda_getCurrentRawStream(self.device)
            self.relaunches[0].launch(stream, addresses_of(row))
            return out, lse
        row = distinct_views((q, k, v, out, lse))
        extras = distinct_extras(extras)
        launched = run(plan_forward(self.problem, *row, extras, self.scalars))
        if not is_overridden():
            self.device = q.device.index
            self.relaunches = relaunches_of([launched], (*row, *extras.tensors))
        return out, lse


class Backward:
    """The backward of one signature, as `Forward`."""

    def __init__(self, problem: Problem, scalars: Scalars) -> None:
        self.problem = problem
        self.scalars = scalars
        self.device: int | None = None
        self.relaunches: list[Relaunch] | None = None
        self.scratch: tuple[
            tuple[int, ...] | None, ...
        ] = ()  # shapes of delta, those parts and the rest of lse

    def __call__(self, saved: Saved, extras: Extras) -> Grads:
        problem = self.problem
        grads = empty_grads(problem, saved.q, saved.k, saved.v, extras)
        if saved.dout.stride(-1) != 1:  # such as the expanded gradient of a sum
            saved = saved._replace(dout=saved.dout.contiguous())
        if saved.dlse is not None:
            saved = saved._replace(dlse=saved.dlse.contiguous())
        if self.relaunches is not None and may_relaunch(self.device) and not is_overridden():
            triton.set_allocator(_scratch)
            scratch = [None if x is None else saved.lse.new_empty(x) for x in self.scratch]
            parts = scratch[1]
            row = addresses_of((*saved, *extras.tensors, *grads, *scratch))
            stream = torch._C._cuda_getCurrentRawStream(self.device)
            for relaunch in self.relaunches:
                relaunch.launch(stream, row)
        else:
            parts = self._first(Saved(*distinct_views(saved)), distinct_extras(extras), grads)
        if grads.dsinks is not None and parts is not None:
            grads.dsinks.copy_(parts.sum((0, 2)))
        return grads

    def _first(self, saved: Saved, extras: Extras, grads: Grads) -> Tensor | None:
        """As Triton launches it; parts of the gradient of the sinks."""
        problem = self.problem
        delta, parts, first = run_delta(problem, saved, extras, grads.dsinks is not None)
        rest, launched_rest = run_rest(problem, saved, extras, self.scalars)
        inputs = saved.dout, saved.q, saved.k, saved.v, (saved.lse, delta, rest), grads
        plans = [*plan_backward(problem, *inputs, extras, self.scalars)]
        if grads.dbias is not None and grads.dbias.numel():
            plans.append(plan_dbias(problem, *inputs, extras, self.scalars))
        launched = first, *launched_rest, *(run(plan) for plan in plans)
        if not is_overridden():
            self.device = saved.q.device.index
            scratch = delta, parts, rest
            self.scratch = tuple(None if x is None else x.shape for x in scratch)
            row = *saved, *extras.tensors, *grads, *scratch
            self.relaunches = relaunches_of(launched, row)
        return parts


def plan_forward(problem, q, k, v, out, lse, extras: Extras, scalars: Scalars) -> Plan:
    """Tiles of queries."""
    sizes, numbers = sizes_of(q, k, extras), numbers_of(scalars, q, k)
    optionals = optionals_of(extras, problem.mods)
    args = (*map(strided, (q, k, v, out)), lse, optionals, sizes, numbers)
    copies = q.shape[0] * q.shape[2]
    of_rows = q.shape[1], copies, sizes.packed
    return Plan("fwd", attn_fwd_kernel, problem, "BLOCK_M", *of_rows, (q, k, v), args)


def plan_backward(
    problem, dout, q, k, v, stats, grads: Grads, extras: Extras, scalars: Scalars
) -> tuple[Plan, Plan]:
    """Tiles of keys for dK and dV, then tiles of queries for dQ."""
    sizes = sizes_of(q, k, extras)
    shared = (stats, optionals_of(extras, problem.mods), sizes, numbers_of(scalars, q, k))
    read = (q, k, v, dout)
    keys = Plan(
        "bwd_dkdv",
        attn_bwd_dkdv_kernel,
        problem,
        "BLOCK_N",
        k.shape[1],
        k.shape[0] * k.shape[2],
        sizes.packed,
        read,
        (*map(strided, (q, k, v, dout, grads.dk, grads.dv)), *shared),
    )
    queries = Plan(
        "bwd_dq",
        attn_bwd_dq_kernel,
        problem,
        "BLOCK_M",
        q.shape[1],
        q.shape[0] * q.shape[2],
        sizes.packed,
        read,
        (*map(strided, (q, k, v, dout, grads.dq)), *shared),
    )
    return keys, queries


def run_delta(
    problem: Problem, saved: Saved, extras: Extras, has_parts: bool
) -> tuple[Tensor, Tensor | None, Launched]:
    """delta, shaped as lse, and, of sinks, the parts of their gradient."""
    out, lse = saved.out, saved.lse
    batch, nheads, seqlen_q = lse.shape
    delta = torch.empty_like(lse)
    of_rows = seqlen_q, batch * nheads, 0  # a row's delta needs no sequence
    plan = Plan("bwd_delta", bwd_delta_kernel, problem, "BLOCK_M", *of_rows, (out,), ())
    m_blocks = triton.cdiv(seqlen_q, plan.tile(plan.config()).BLOCK_M)
    parts = lse.new_empty(batch, nheads, m_blocks) if has_parts else None
    shared = optionals_of(extras, problem.mods), sizes_of(out, out)
    read = strided(out), strided(saved.dout), lse, saved.dlse
    return delta, parts, run(plan._replace(args=(*read, delta, None, None, parts, *shared)))


def run_rest(
    problem: Problem, saved: Saved, extras: Extras, scalars: Scalars
) -> tuple[Tensor | None, list[Launched]]:
    """What the lse of large scores has lost, where a bias or a score function may make such, and
    the launch.
    """
    if not (problem.has_bias or problem.mods.score):
        return None, []
    q, k, v, lse = saved.q, saved.k, saved.v, saved.lse
    rest, sizes = torch.empty_like(lse), sizes_of(q, k, extras)
    shared = optionals_of(extras, problem.mods), sizes, numbers_of(scalars, q, k)
    args = (*map(strided, (q, k, v)), lse, rest, *shared)
    of_rows = q.shape[1], q.shape[0] * q.shape[2], sizes.packed
    kernel = attn_bwd_rest_kernel
    return rest, [run(Plan("bwd_rest", kernel, problem, "BLOCK_M", *of_rows, (q, k, v), args))]


def plan_dbias(
    problem, dout, q, k, v, stats, grads: Grads, extras: Extras, scalars: Scalars
) -> Plan:
    """The gradient of the bias, in tiles as dQ is computed in."""
    numbers = sizes_of(q, k, extras), numbers_of(scalars, q, k)
    read = q, k, v, dout
    plan = Plan("bwd_dbias", attn_bwd_dbias_kernel, problem, "BLOCK_M", 0, 0, 0, read, ())
    tile = plan.tile(plan.config())
    sharing, tiles = sharing_of(grads.dbias, q, k, tile)
    args = (*map(strided, read), bias_of(grads.dbias), stats)
    args = (*args, optionals_of(extras, problem.mods), *numbers, sharing)
    return plan._replace(rows=tile.BLOCK_M, copies=tiles, args=args)


def captured_grads(
    problem: Problem, saved: Saved, extras: Extras, scalars: Scalars, wanted: list[int]
) -> list[Tensor]:
    """Gradients of those tensors that the score function captured, by their numbers."""
    dout, dlse, q, k, v, _, lse = saved
    rest, _ = run_rest(problem, saved, extras, scalars)
    scaled = torch.empty(dout.shape, dtype=dout.dtype, device=dout.device)
    dout = torch.mul(dout, torch.exp2(-rest).transpose(1, 2).unsqueeze(-1), out=scaled)
    dlse = lse.new_zeros(1) if dlse is None else dlse
    dlse = torch.where(lse.isneginf(), 0, dlse)  # a row that saw no key has no gradient
    tensors = take_apart(problem.mods, extras.captured).score
    grads = {i: torch.zeros_like(tensors[i], dtype=lse.dtype) for i in wanted}
    stats = lse, dlse, rest
    for plan in plan_captured(problem, dout, q, k, v, stats, grads, extras, scalars):
        run(plan)
    return [grads[i].to(tensors[i].dtype) for i in wanted]


def plan_captured(
    problem, dout, q, k, v, stats, grads: dict[int, Tensor], extras: Extras, scalars: Scalars
) -> list[Plan]:
    """A launch for each place where the score function reads a tensor whose gradient is among
    `grads`: tiles of queries.
    """
    sizes, read = sizes_of(q, k, extras), (q, k, v, dout)
    shared = stats, optionals_of(extras, problem.mods), sizes, numbers_of(scalars, q, k)
    of_rows = q.shape[1], q.shape[0] * q.shape[2], sizes.packed
    plans = []
    for load, slope in by_loads(problem.mods.score):
        if (slot := load.value[0]) in grads:
            target = captured_of((grads[slot],))[0]
            of_load = load_of(load, slope, grads[slot].numel() >= 1 << 31)
            args = *map(strided, read), target, *shared, of_load
            kernel = attn_bwd_captured_kernel
            plans.append(Plan("bwd_captured", kernel, problem, "BLOCK_M", *of_rows, read, args))
    return plans


def load_of(load: Node, slope: Node, is_wide: bool) -> CapturedLoad:
    """A load, and the score function's slope there, as kernels take it."""
    indices_used = {node.op for node in nodes_of(load)}
    functions = function_of(intern(slope)), place_function_of(intern(load))
    return CapturedLoad(*functions, "q_idx" in indices_used, "k_idx" in indices_used, is_wide)


def run(plan: Plan) -> Launched:
    """Launches a plan as the tables say; on CPU tensors goes through the interpreter."""
    config = plan.config()
    tile = plan.tile(config)
    programs, features, device = plan.programs(tile), features_of(plan.problem), plan.read[0].device
    constants = dict(FEATURES=features, TILE=tile)
    launched = Launched(None, programs, (*plan.args, *constants.values()))
    if programs == 0:
        return launched
    if interpreter_is_on() and device.type == "cpu":
        interpret(plan.kernel)[(programs,)](*plan.args, **constants)
        return launched
    with on_device(device):
        compiled = first_launch(
            plan.kernel,
            programs,
            *plan.args,
            **constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,  # the exponent's cost counts on it; Triton 3.10 turns it off
        )
    return launched._replace(compiled=compiled)


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Makes `device` current, with scratch memory for the descriptors that kernels make."""
    triton.set_allocator(_scratch)  # per thread, and autograd's backward runs in its own
    is_current = device.index in (None, torch.cuda.current_device())
    return contextlib.nullcontext() if is_current else torch.cuda.device(device)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
