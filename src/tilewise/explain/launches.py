"""The launches of a call on a GPU that need not be there: which kernel in which tiles, how many
programs, and what the compiler makes of it.

Only what tuning selects is repeated here; kernels, tiles and arguments are those of the backends.
Of the backward the kernels are shown that do its matmuls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ..problem import Extras
from .call import Call
from .cards import Card, Occupancy, occupancy


class Launch(NamedTuple):
    """A kernel as a call launches it."""

    kernel: str
    block_m: int
    block_n: int
    columns: int  # of K and V together, padded
    stages: int
    tiles: int
    is_persistent: bool  # one program an SM takes tile after tile
    build: Callable[[], Any]  # compiles it offline
    pack: int = 1  # query heads that share a tile, and what it reads of K and V
    built: Built | None = None
    failed: str = ""  # why it is not
    at_once: int = 1  # programs

    @property
    def waves(self) -> float:
        """Tiles over the programs that run at once."""
        return self.tiles / self.at_once

    @property
    def tail(self) -> float:
        """The share of the card's time that SMs are busy."""
        return self.waves / max(1, math.ceil(self.waves))

    @property
    def record(self) -> dict:
        """As JSON takes it."""
        named = self._asdict()
        del named["build"]
        named["built"] = self.built.record if self.built else None
        return {**named, "waves": self.waves, "tail": self.tail}


class Built(NamedTuple):
    """What the compiler made of it."""

    registers: int
    spills: int  # bytes stored a thread
    shared_memory: int
    warps: int
    occupancy: Occupancy | None

    @property
    def record(self) -> dict:
        """As JSON takes it."""
        fits = self.occupancy
        return {**self._asdict(), "occupancy": fits._asdict() if fits else None}


def launches_of(call: Call, backend: str, target: str, passes: tuple[str, ...]) -> list[Launch]:
    """The launches of these passes; none for a backend without kernels."""
    launches: list[Launch] = []
    for direction in passes:
        if backend == "hopper":
            launches += _hopper_launches(call, direction)
        elif backend == "portable":
            launches += [shown(x, target) for x in portable_launches(call, target, direction)]
    return launches


def built_of(compiled: Any, target: str) -> Built:
    """What a kernel from `tilewise.testing.build` needs."""
    from ..testing import stats

    figures = stats(compiled)
    if "registers" not in figures:  # AMD: one file of vector registers and accumulators
        registers, spills, fits = figures["vgpr_count"], figures["vgpr_spill_count"] * 4, None
    else:
        registers, spills = figures["registers"], figures["spill_stores"]
        fits = occupancy(target, registers, shared_memory=figures["smem"], warps=figures["warps"])
    return Built(registers, spills, figures["smem"], figures["warps"], fits)


def at_once(launch: Launch, card: Card | None) -> int:
    """Programs that run at once; one an SM where no compiler said more, one without a card."""
    per_sm, built = 1, launch.built
    if built is not None and built.occupancy is not None and not launch.is_persistent:
        per_sm = max(1, built.occupancy.programs)
    return 1 if card is None else card.sms * per_sm


def operands_for(call: Call, direction: str) -> dict[str, Any]:
    """The operands of a pass, by name."""
    from ..kernels.common.operand import operands_of
    from ..kernels.common.outputs import empty_out
    from ..kernels.common.results import BACKWARD

    inputs = call.q, call.k, call.v
    if direction == "fwd":
        return operands_of(("q", "k", "v", *Extras._fields), (*inputs, *call.extras.tensors))
    out, lse = empty_out(call.q, call.problem.headdim_v)
    return operands_of(BACKWARD, (out, None, *inputs, out, lse, *call.extras.tensors))


def portable_launches(call: Call, target: str, direction: str) -> list:
    """The portable backend's launches of a pass on such a GPU, that of the backward without those
    before and after its matmuls.
    """
    from ..kernels.portable import launch

    operands = operands_for(call, direction)
    if direction == "fwd":
        return launch.forward_program(call.problem, call.scalars, target, **operands).launches
    program = launch.backward_program(call.problem, call.scalars, target, **operands)
    names = "attn_bwd_dkdv_kernel", "attn_bwd_dq_kernel"
    return [x for x in program.launches if x.kernel.__name__ in names]


def build_launch(launch: Any, target: str) -> Any:
    """A launch compiled offline."""
    from ..kernels.common.program import fake_args
    from ..testing import build

    return build(launch.kernel, *fake_args(launch), on=target, **launch.settings)


def shown(launch: Any, target: str) -> Launch:
    """A launch with the sides of its tile, one program for each tile."""
    tile = launch.constants["TILE"]
    return Launch(
        kernel=launch.kernel.__name__,
        block_m=tile.BLOCK_M,
        block_n=tile.BLOCK_N,
        columns=tile.BLOCK_D + tile.BLOCK_DV,
        stages=launch.options.get("num_stages", 1),
        tiles=launch.programs,
        is_persistent=False,
        build=functools.partial(build_launch, launch, target),
    )


def hopper_launch(launch: Any) -> Launch:
    """One of Hopper's, whose programs take tile after tile; stages of a backward are for blocks of
    queries.
    """
    one, tile = shown(launch, "sm90"), launch.constants["TILE"]
    is_forward, tiles = hasattr(tile, "PACK"), launch.args["queue"].tiles
    stages, pack = (tile.STAGES, tile.PACK) if is_forward else (2, 1)
    return one._replace(stages=stages, tiles=tiles, pack=pack, is_persistent=True)


def _hopper_launches(call: Call, direction: str) -> list[Launch]:
    from ..kernels.hopper.bwd.launch import backward_program
    from ..kernels.hopper.fwd.launch import forward_program

    plan = forward_program if direction == "fwd" else backward_program
    program = plan(call.problem, call.scalars, **operands_for(call, direction))
    names = "hopper_fwd_kernel", "hopper_bwd_kernel", "hopper_bwd_query_kernel"
    return [hopper_launch(x) for x in program.launches if x.kernel.__name__ in names]
