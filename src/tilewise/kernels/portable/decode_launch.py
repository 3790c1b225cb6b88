"""Host side of attention beside a cache: nothing here knows a length."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from ...cache_checks import Cached
from ...paging import batch_of, capacity
from ...problem import Problem
from ...testing.switch import interpreter_is_on
from ...tile.types import Sizes, Strided, Tile
from ..arguments import features_of, numbers_of, optionals_of
from ..building import first_launch
from .decode import Cache, Partials, attn_fold_kernel, attn_split_kernel
from .launch import on_device, padded_headdims

Tensor = torch.Tensor
WORKSPACE = 256 * 2**20  # bytes of what lies between the launches; a longer walk needs none
NUM_WARPS, NUM_STAGES = 4, 2


class SplitPlan(NamedTuple):
    """A launch."""

    kernel: Any
    programs: int
    args: tuple
    constants: dict


def tile_of(problem: Problem) -> Tile:
    """One tile for a problem, whatever its lengths: a row's bits depend on it."""
    block_d, block_dv = padded_headdims(problem)
    block_n = 64 if max(block_d, block_dv) <= 128 else 32
    if problem.dtype.itemsize == 4:
        block_n //= 2
    return Tile(max(16, triton.next_power_of_2(problem.group)), block_n, block_d, block_dv, False)


def forward(cached: Cached, out: Tensor, lse: Tensor) -> None:
    """Writes `out` and `lse` of all queries that belong to a sequence."""
    if not out.numel():
        return
    for plan in plans_of(cached, out, lse):
        run(plan, cached.q.device)


def plans_of(cached: Cached, out: Tensor, lse: Tensor, workspace: int = WORKSPACE) -> list:
    """One launch or two, by how many pieces there may be and whether their states have room."""
    problem = cached.problem
    tile, features = tile_of(problem), features_of(problem)
    q, k, extras = cached.q, cached.k, cached.extras
    batch, room = batch_of(q, extras.cu_seqlens_q), capacity(k, cached.page_table)
    if k.shape[0] == 0:
        room = 0
    is_packed = extras.cu_seqlens_q is not None
    rows = q.shape[-3]
    sizes = Sizes(batch if is_packed else 0, problem.nheads_k, rows, room)
    reach = max(rows, room)
    numbers = numbers_of(cached.scalars, q[None] if is_packed else q, k)
    left, right = (min(side, reach) for side in cached.scalars[2:4])
    numbers = numbers._replace(left=left, right=right)
    shared = optionals_of(extras, problem.mods), sizes, numbers, min(cached.split_size, 2**30)
    tokens = tile.BLOCK_M // problem.group
    tiles = (triton.cdiv(rows, tokens) + sizes.packed) * problem.nheads_k
    tiles *= 1 if is_packed else batch
    pieces = triton.cdiv(room, cached.split_size)
    all_rows = q.shape[:-2].numel() * problem.nheads
    need = pieces * all_rows * (problem.headdim_v + 2) * 4
    in_one = pieces <= 1 or need > workspace
    partials = Partials(None, None, None, 0) if in_one else _partials(cached, pieces, all_rows)
    tensors = cache_of(cached.k, cached.v, cached.page_table), partials, strided_of(out), lse
    constants = dict(FEATURES=features, TILE=tile)
    programs = tiles if in_one else tiles * pieces
    args = strided_of(q), *tensors, 1 if in_one else pieces, *shared
    plans = [SplitPlan(attn_split_kernel, programs, args, constants)]
    if not in_one:
        plans.append(SplitPlan(attn_fold_kernel, tiles, (*tensors, *shared), constants))
    return plans


def _partials(cached: Cached, pieces: int, rows: int) -> Partials:
    found = cached.q.new_empty(pieces * rows * (cached.v.shape[3] + 2), dtype=torch.float32)
    acc_o, m_i, l_i = found.split([pieces * rows * n for n in (cached.v.shape[3], 1, 1)])
    return Partials(acc_o, m_i, l_i, rows)


def cache_of(k: Tensor, v: Tensor, table: Tensor | None) -> Cache:
    """A cache as kernels take it."""
    table = table if table is None or table.stride(1) == 1 else table.contiguous()
    width, stride = (1, 0) if table is None else (table.shape[1], table.stride(0))
    return Cache(strided_of(k), strided_of(v), table, stride, width, *k.shape[:2])


def strided_of(x: Tensor) -> Strided:
    """A batch, pages, or packed rows as a batch of one."""
    return Strided(x, *x.stride()[:3]) if x.dim() == 4 else Strided(x, 0, *x.stride()[:2])


def run(plan: SplitPlan, device: torch.device) -> None:
    """Launches; on CPU tensors in the interpreter."""
    if plan.programs == 0:
        return
    if device.type == "cpu" and interpreter_is_on():
        from ...testing.interpreter import interpret

        interpret(plan.kernel)[(plan.programs,)](*plan.args, **plan.constants)
        return
    with on_device(device):
        first_launch(
            plan.kernel,
            plan.programs,
            *plan.args,
            **plan.constants,
            **dict(num_warps=NUM_WARPS, num_stages=NUM_STAGES, enable_fp_fusion=True),
        )
