"""Host side of the forward of runs (`runs`): one launch for all, whose keys may still arrive.

The tiles of a head are listed here, as the runs of a layout are known: those with the most keys
first, so that short ones fill the tail. The first group of heads begins with the tiles all of whose
keys are there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ....problem import OPEN, Extras, Problem, Scalars
from ....tile.types import Queue, Runs
from ...common.alignment import in_own_memory
from ...common.arguments import aligned
from ...common.operand import operands_of
from ...common.outputs import empty_out
from ...common.program import Program
from ...common.relaunch import addresses_of
from ...common.workspace import Workspace
from ..descriptors import Plan
from ..launch import programs_of
from ..tile_counter import tile_counter
from . import runs as on_device_runs
from .launch import arguments, heads_per_l2_group, launch_of, plan_for

Tensor = torch.Tensor
# What a program reads and writes
NAMES = "q", "k", "v", "alibi_slopes", "sinks", "words", "out", "lse", "table"
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


class RunsForward:
    """The forward of one walk of one signature. `words` are those of `Runs`."""

    def __init__(self, problem: Problem, scalars: Scalars, walk: Walk) -> None:
        self.problem = problem._replace(is_packed=True)
        self.scalars, self.walk = scalars, walk
        self.program: Program | None = None
        self.table: Tensor | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, words: Tensor, limit: int, **beside
    ) -> tuple[Tensor, Tensor]:
        """`out` and `lse` of q (1, rows, nheads, headdim). k and v are (1, groups * seqlen, heads,
        headdim), dense. A wait ends after `limit` nanoseconds. In the emulator `beside` is what
        arrives meanwhile.
        """
        q = q if aligned(q) else in_own_memory(q)
        outputs = self.again(q, k.data_ptr(), v.data_ptr(), extras[:2], words)
        if outputs is not None:
            return outputs
        out, lse = empty_out(self.problem, q)
        if self.walk.runs:
            tensors = q, k, v, *extras[:2], words, out, lse
            self._first(tensors, limit, beside)
        return out, lse

    def again(
        self, q: Tensor, k: int, v: int, extras: Sequence[Tensor | None], words: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Relaunches for an aligned q and for k and v at these addresses, with ALiBi's slopes and
        sinks: `out` and `lse`, or None before the first launch.
        """
        program, table = self.program, self.table
        if program is None or table is None or not program.takes_addresses:
            return None
        out, lse = empty_out(self.problem, q)
        row = [q.data_ptr(), k, v, *addresses_of(extras), words.data_ptr()]
        row += out.data_ptr(), lse.data_ptr(), table.data_ptr()
        return (out, lse) if program.again_at(row) else None

    def _first(self, tensors: tuple[Tensor | None, ...], limit: int, beside: dict) -> None:
        """The first launch, of tensors in the order of NAMES but for the table, or any where none
        is done again.
        """
        q, *_ = tensors
        plan = self.plan(q, Extras(*tensors[3:5]))
        mixed = self.mixed
        self.table = table_of(self.walk, self.scalars, plan.tile.BLOCK_M, mixed, q.device)
        tensors = *tensors, self.table
        self.program = self.program_of(plan, operands_of(NAMES, tensors), limit, beside)
        self.program(tensors)

    def plan(self, q: Any, extras: Extras) -> Plan:
        """What the problem selects."""
        plan = plan_for(self.problem, q, extras)
        return plan._replace(features=plan.features._replace(RUNS=True))

    @property
    def mixed(self) -> int:
        """Query heads of a group whose tiles are interleaved: as many as on one GPU."""
        heads, sharing = self.walk.heads * self.problem.group, self.problem.group
        return heads_per_l2_group(self.problem, self.walk.seqlen, heads, sharing)

    def program_of(
        self, plan: Plan, operands: dict[str, Any], limit: int, beside: dict[str, Any]
    ) -> Program:
        """The launch, of operands by NAMES."""
        q, extras = operands["q"], Extras(operands["alibi_slopes"], operands["sinks"])
        tiles = count_tiles(self.walk, plan.tile.BLOCK_M) * q.shape[2]
        tensors = {name: operands[name] for name in ("q", "k", "v", "out", "lse")}
        args = arguments(self.problem, plan, extras=extras, scalars=self.scalars, **tensors)
        # The kernel reads how many tiles there are, and is not compiled again for a number that is
        # no multiple of 16
        args["queue"] = Queue(tile_counter(), -(-tiles // 16) * 16, q.shape[2], q.shape[2], 1)
        args["optionals"] = args["optionals"]._replace(
            runs=Runs(operands["table"], operands["words"], limit)
        )
        launch = launch_of(plan, args, **beside)
        programs = programs_of(tiles, q.device)
        return Program([*operands], [launch._replace(programs=programs)], Workspace(q.device))


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
    flat = itertools.chain(head, *by_arrival, *by_keys, walk.waits)
    return torch.tensor(list(flat), dtype=torch.int32, device=device)
