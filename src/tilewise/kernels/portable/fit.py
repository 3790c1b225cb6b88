"""Tile shapes reduced to fit registers and shared memory, given what else a problem keeps there."""

from __future__ import annotations

from ...mods.flat import loads_per_pair
from ...problem import Problem
from ...tuning.config import Config, Key
from ...tuning.select import overrides
from ...tuning.tables import has_little_room


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
