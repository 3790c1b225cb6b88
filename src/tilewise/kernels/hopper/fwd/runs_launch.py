"""Host side of the forward of runs (`runs`): one launch for all, whose keys may still arrive.

The tiles of a head are listed here, as the runs of a layout are known: those with the most keys
first, so that short ones fill the tail. The first group of heads begins with the tiles all of whose
keys are there.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch

from ....problem import OPEN, Extras, Problem, Scalars
from ....tile.types import Queue, Runs
from ...common.operand import Provided
from ...common.program import Planned, Program
from ...common.results import outputs_of
from ...common.workspace import Workspace
from ..launch import programs_of
from ..padded import Readable, is_readable
from ..tile_counter import tile_counter
from . import runs as on_device_runs
from .launch import arguments, heads_per_l2_group, launch_of, plan_for

Tensor = torch.Tensor
FORWARD = "q", "k", "v", "alibi_slopes", "sinks", "words"  # what a call passes, in this order
INTO = *FORWARD, "out", "lse"  # of some heads: where their results go
SHIFT = on_device_runs.SHIFT.value  # 2^SHIFT keys are at least those of a block


class Run(NamedTuple):
    """Rows of queries, and the keys of the sequence that they see some of."""

    first_q: int
    rows: int
    first_k: int
    keys: int
    diagonal: int  # the key on the diagonal of its first row


class Walk(NamedTuple):
    """The runs of a call, and in which order their keys arrive; the same for each group of heads.
    `waits` has for each 2^SHIFT keys how many pieces of the group must have arrived, 0 where all
    are there before the launch.
    """

    runs: tuple[Run, ...]
    seqlen: int
    heads: int  # key heads of a group
    waits: tuple[int, ...]
    pieces: int  # of each group


def prepare(
    problem: Problem, scalars: Scalars, walk: Walk, limit: int, fields: tuple[str, ...] = FORWARD
) -> Planned:
    """The forward of one walk of one signature, of tensors in the order of FORWARD: `out` and `lse`
    of q (1, rows, nheads, headdim); or of INTO, which are written. k and v are (groups, seqlen,
    ..., heads, headdim), whose rows are dense. A wait ends after `limit` nanoseconds. `words` are
    those of `Runs`.
    """
    plan = functools.partial(forward_program, problem, scalars, walk=walk, limit=limit)
    return Planned(fields, plan)


def forward_program(
    problem: Problem,
    scalars: Scalars,
    *,
    walk: Walk,
    limit: int,
    q: Any,
    k: Any,
    v: Any,
    alibi_slopes: Any,
    sinks: Any,
    words: Any,
    out: Any = None,
    lse: Any = None,
    **beside: Any,
) -> Program:
    """The forward's one launch, of operands, behind a copy of a q that TMA cannot read. In the
    emulator `beside` is what arrives meanwhile.
    """
    problem, extras = problem._replace(is_packed=True), Extras(alibi_slopes, sinks)
    work = Workspace(q.device)
    readable, names, outputs = Readable(work), INTO, []
    if out is None:
        names, outputs = FORWARD, outputs_of(problem, q)
        out, lse = outputs
    (q,) = readable.copied((q,), [not is_readable(q)])
    plan = plan_for(problem, q, extras)
    plan = plan._replace(features=plan.features._replace(RUNS=True))
    k, v = map(all_rows, (k, v))
    args = arguments(problem, plan, q, k, v, out, lse, extras=extras, scalars=scalars)
    block_m, nheads = plan.tile.BLOCK_M, q.shape[2]
    tiles = count_tiles(walk, block_m) * nheads
    # The kernel reads how many tiles there are, and is not compiled again for a number that is
    # no multiple of 16
    args["queue"] = Queue(tile_counter(), -(-tiles // 16) * 16, nheads, nheads, 1)
    table = table_of(walk, scalars, block_m, mixed=mixed_heads(problem, walk), device=q.device)
    runs = Runs(Provided("table", lambda *_: table), words, limit)
    args["optionals"] = args["optionals"]._replace(runs=runs)
    launch = launch_of(plan, args, **beside)._replace(programs=programs_of(tiles, q.device))
    return Program(names, [*readable.steps, launch], work, outputs)


def all_rows(x: Any) -> Any:
    """The rows of all groups as one sequence of a batch."""
    groups, seqlen, step = *x.shape[:2], x.stride(1)
    rows = groups * seqlen
    return x.as_strided((1, rows, *x.shape[-2:]), (rows * step, step, *x.stride()[-2:]))


def mixed_heads(problem: Problem, walk: Walk) -> int:
    """Query heads of a group whose tiles are interleaved: as many as on one GPU."""
    heads, sharing = walk.heads * problem.group, problem.group
    return heads_per_l2_group(problem, walk.seqlen, heads, sharing)


def serves(problem: Problem) -> bool:
    """Whether all it reads can be read by TMA as it is allocated, and nothing depends on the number
    of a head but ALiBi and sinks.
    """
    in_rows = problem.headdim % 8 == 0 and problem.headdim_v % 8 == 0
    return in_rows and not problem.is_modified and problem.dtype.itemsize == 2


def count_tiles(walk: Walk, block_m: int) -> int:
    """The tiles of a head. None has rows of two runs."""
    return sum(-(-run.rows // block_m) for run in walk.runs)


@functools.lru_cache(maxsize=256)
def table_of(
    walk: Walk, scalars: Scalars, block_m: int, mixed: int, device: torch.device
) -> Tensor:
    """`Runs.table`: how many tiles a head has, key heads a group, keys the sequence and pieces a
    group, and how many query heads are interleaved; then of each tile its first row in the run, the
    run's rows, where they begin, its first key, how many it has, and the diagonal; then
    `Walk.waits`.
    """
    is_late = [0, *itertools.accumulate(x > 0 for x in walk.waits)]
    tiles = []
    for run in walk.runs:
        for m_start in range(0, run.rows, block_m):
            middle = m_start + run.diagonal
            first, stop = 0, run.keys
            if scalars.left != OPEN:
                first = min(max(middle - scalars.left, 0), stop)
            if scalars.right != OPEN:
                stop = min(max(middle + block_m + scalars.right, first), stop)
            a, b = run.first_k + first, run.first_k + max(stop, first + 1) - 1
            waits = is_late[min(b, walk.seqlen - 1) // 2**SHIFT + 1] > is_late[a // 2**SHIFT]
            tiles.append((waits, first - stop, (m_start, run.rows, run.first_q, *run[2:])))
    by_keys = [x[2] for x in sorted(tiles, key=lambda x: x[1])]
    by_arrival = [x[2] for x in sorted(tiles, key=lambda x: x[:2])]
    head = len(tiles), walk.heads, walk.seqlen, walk.pieces, mixed
    flat = itertools.chain.from_iterable((head, *by_arrival, *by_keys, walk.waits))
    return torch.tensor(list(flat), dtype=torch.int32, device=device)
