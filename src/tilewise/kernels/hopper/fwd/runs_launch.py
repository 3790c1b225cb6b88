"""Host side of the forward of runs (`runs`): one launch for all, whose keys may still arrive.

The tiles of a head are listed here, as the runs of a layout are known: those with the most keys
first, so that short ones fill the tail. The first group of heads begins with the tiles all of whose
keys are there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ....emulation import emulate, emulator_seed
from ....problem import OPEN, Extras, Problem, Scalars
from ....tile.types import Queue, Runs
from ...common.alignment import in_own_memory
from ...common.arguments import aligned, numbers_of, optionals_of, sizes_of
from ...common.building import first_launch, num_sms, on_device
from ...common.outputs import empty_out
from ...common.relaunch import Pattern, addresses_of, distinct_extras, may_relaunch, pattern_of
from .. import assembly
from ..compat import Descriptors, direct_of
from ..descriptors import checked, descriptors
from ..tile_counter import counter, counter_of
from . import runs as on_device_runs
from .kernel import hopper_fwd_kernel
from .launch import ForwardRelaunch, FwdArgs, Plan, heads_per_l2_group, plan_for

Tensor = torch.Tensor
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
        self.device = -1
        self.relaunch: ForwardRelaunch | None = None
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
            self._first(q, k, v, out, lse, distinct_extras(extras), words, limit, beside)
        return out, lse

    def again(
        self, q: Tensor, k: int, v: int, extras: Sequence[Tensor | None], words: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Relaunches for an aligned q and for k and v at these addresses, with ALiBi's slopes and
        sinks: `out` and `lse`, or None before the first launch.
        """
        relaunch, device = self.relaunch, self.device
        if relaunch is None or self.table is None or not may_relaunch(device):
            return None
        out, lse = empty_out(self.problem, q)
        stream = torch._C._cuda_getCurrentRawStream(device)
        of = relaunch.described.at
        row = lse.data_ptr(), counter(q.device, device, stream), self.table.data_ptr()
        row = *row, words.data_ptr(), *addresses_of(extras)
        relaunch.kernel(
            stream,
            *of(0, q.data_ptr()),
            *of(1, k),
            *of(2, v),
            *of(3, out.data_ptr()),
            *relaunch.args(row),
            None,
            *relaunch.constants,
        )
        return out, lse

    def _first(self, q, k, v, out, lse, extras, words, limit, beside) -> None:
        plan = self.plan(q, extras)
        self.table = table_of(self.walk, self.scalars, plan.tile.BLOCK_M, self.mixed, q.device)
        args = self.arguments(plan, (q, k, v, out), lse, extras, words, limit)
        constants = dict(FEATURES=plan.features, TILE=plan.tile, num_warps=4)
        tiles = count_tiles(self.walk, plan.tile.BLOCK_M) * q.shape[2]
        if emulator_seed() is not None and q.device.type == "cpu":
            programs = min(tiles, 4)  # few, so that each works through several tiles
            asm = assembly.ASM | on_device_runs.ASM
            emulated = emulate(hopper_fwd_kernel, asm, **beside)
            emulated[(programs,)](*checked(args), **constants)
            return
        programs = min(tiles, num_sms(q.device))
        with on_device(q.device):
            compiled = first_launch(hopper_fwd_kernel, programs, *checked(args), **constants)
            self.device = torch.cuda.current_device()
        kernel = direct_of(compiled, programs)
        pattern = self.pattern(args, extras)
        if kernel is not None and pattern is not None:
            described = Descriptors(kernel, [args.q, args.k, args.v, args.out])
            constants = plan.features, plan.tile
            self.relaunch = ForwardRelaunch(kernel, described, pattern, True, constants)

    def pattern(self, args: FwdArgs, extras: Extras) -> Pattern | None:
        """The arguments between the descriptors, for the addresses that `__call__` has."""
        runs = args.optionals.runs
        if runs is None:
            return None
        row = args.lse, args.queue.counter, runs.table, runs.words, *extras[:2]
        return pattern_of(tuple(args[4:-1]), row)

    def plan(self, q: Tensor, extras: Extras) -> Plan:
        """What the problem selects."""
        plan = plan_for(self.problem, q, extras)
        return plan._replace(features=plan.features._replace(RUNS=True))

    @property
    def mixed(self) -> int:
        """Query heads of a group whose tiles are interleaved: as many as on one GPU."""
        heads, sharing = self.walk.heads * self.problem.group, self.problem.group
        return heads_per_l2_group(self.problem, self.walk.seqlen, heads, sharing)

    def arguments(
        self, plan: Plan, tensors: tuple, lse: Tensor, extras: Extras, words: Tensor, limit: int
    ) -> FwdArgs:
        """The kernel's arguments; `tensors` are q, k, v and out."""
        q, k = tensors[:2]
        nheads = q.shape[2]
        # The kernel reads how many tiles there are, and is not compiled again for a number that is
        # no multiple of 16
        tiles = -(-count_tiles(self.walk, plan.tile.BLOCK_M) * nheads // 16) * 16
        *described, for_bias = descriptors(self.problem, plan, *tensors)
        return FwdArgs(
            *described,
            lse,
            Queue(counter_of(q.device), tiles, nheads, nheads, 1),
            optionals_of(extras)._replace(runs=Runs(self.table, words, limit)),
            sizes_of(q, k),
            numbers_of(self.scalars, q, k),
            (0, 0),
            0,
            for_bias,
        )


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
