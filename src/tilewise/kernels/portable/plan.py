"""Launches without their configuration, which one call looks up and `tilewise tune` tries many
of.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton

from ...mods.flat import loads_per_pair
from ...problem import Problem
from ...tile.types import Tile
from ...tuning.select import architecture, overrides, select
from ...tuning.tables import SHORT, Config, Key, columns_at_once, has_little_room
from ..common.arguments import features_of, fits_descriptor
from ..common.program import Launch, checked


class Plan(NamedTuple):
    """A launch without its configuration: a program for each `block` of `rows`, `copies`
    times.
    """

    name: str  # as the tuning tables call the kernel
    kernel: Any
    problem: Problem
    block: str  # "BLOCK_M" or "BLOCK_N"
    rows: int
    copies: int  # heads times batch
    packed: int  # sequences in these rows, each with a ragged end; 0 where they are no sequences
    operands: tuple[Any, ...]  # that are read in tiles
    args: dict[str, Any]  # by the kernel's parameters
    arch: str = ""  # of another GPU than the operands'

    def key(self) -> Key:
        """What the tables look up."""
        problem, widest = self.problem, max(padded_headdims(self.problem))
        arch = self.arch or architecture(self.operands[0].device)
        bits = problem.dtype.itemsize * 8
        is_short = self.rows // max(self.packed, 1) <= SHORT
        # The same, more or less
        same = dict(bwd_dbias="bwd_dq", bwd_captured="bwd_dq", bwd_rest="fwd")
        name = same.get(self.name, self.name)
        return Key(arch, name, widest, bits, problem.is_causal, is_short)

    def config(self) -> Config:
        """What the tables say, cut where there is no room for more."""
        key = self.key()
        return fit_to_memory(select(key, self.operands[0].device), key, self.problem, self.block)

    def tile(self, config: Config) -> Tile:
        """The tile shape; descriptors only where every tensor read allows them."""
        key = self.key()
        descriptors = config.descriptors and all(map(fits_descriptor, self.operands))
        block_m, block_n = config.BLOCK_M, config.BLOCK_N
        chunk = columns_at_once(key, self.name == "bwd_dbias")
        if self.problem.has_dropout and key.block_d <= 256:
            block_n = max(block_n, 32)  # its random numbers come for 32 keys at a time
        if self.problem.mods.block != (0, 0):  # what a mask lists is made up of whole tiles
            rows, keys = self.problem.mods.block
            block_m, block_n = math.gcd(block_m, rows), math.gcd(block_n, keys)
        block_d, block_dv = padded_headdims(self.problem)
        return Tile(
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            DESCRIPTORS=descriptors and not chunk,
            CHUNK=chunk,
        )

    def programs(self, tile: Tile) -> int:
        """How many programs cover the problem."""
        blocks = triton.cdiv(self.rows, getattr(tile, self.block))
        return (blocks + self.packed) * self.copies

    def configured(self, config: Config | None = None) -> Launch:
        """The launch in a configuration, by default that of the tables."""
        config = config or self.config()
        tile = self.tile(config)
        options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
        constants = dict(FEATURES=features_of(self.problem), TILE=tile)
        return checked(Launch(self.kernel, self.programs(tile), self.args, constants, options))


def fit_to_memory(config: Config, key: Key, problem: Problem, side: str) -> Config:
    """A configuration of a kernel that holds `side` and walks the other one, cut.

    Numbers of a whole tile of scores lie in shared memory, a tile a stage: Triton's pipeliner puts
    them there. Rows of a head that is no multiple of 16 come through registers, since Triton knows
    strides only by 16: 64 of them spill 11,990 bytes on sm80 with a block mask, and 32 of them
    none. A forced tile is not cut.
    """
    walked = "BLOCK_N" if side == "BLOCK_M" else "BLOCK_M"
    most = {side: getattr(config, side), walked: getattr(config, walked)}
    stages = config.num_stages
    is_read_in_tiles = problem.has_bias or loads_per_pair(problem.mods)
    is_padded = problem.headdim % 16 or problem.headdim_v % 16
    if is_read_in_tiles:
        # Two stages of headdim 256 take more than sm100 has, dQ 238,592 bytes, and Triton 3.6
        # makes no LLVM code of the forward's for gfx942
        is_one = key.block_d == 256 and key.arch in ("sm100", "gfx942")
        most[walked], stages = min(64, most[walked]), min(1 if is_one else 2, stages)
    if is_padded and not overrides:
        most[walked] = min(32, most[walked])
        if key.block_d > 256:  # headdim 260, the forward on sm90: 1,832 bytes spilled, and none
            most = {side: min(32, most[side]), walked: 16}
    # Headdim 512 on sm89: dK and dV of 32 keys have 128 bytes too many with a captured table
    if (is_read_in_tiles or is_padded) and has_little_room(key) and not overrides:
        most = dict.fromkeys(most, 16)
    return config._replace(**most, num_stages=stages)


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
