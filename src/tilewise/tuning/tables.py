"""Configurations that were measured, and a default rule for everything else.

Key fields: architecture, kernel, padded head dim, element bits, band closed on the right.
A row without a measured figure does not belong here: the default rule below serves it.
"""

from __future__ import annotations

from .config import SHARED_MEMORY, Config, Key

TABLE: dict[Key, Config] = {}

# Below this a tile's operands leave no room for pipelining, and the rule takes smaller tiles.
ROOMY = 160_000


def default(key: Key) -> Config:
    """Tiles that fit every architecture: half as large where shared memory is small, smaller again for fp32 and wide heads."""
    if key.arch == "interpreter":
        return Config(64, 64, 4, 1)
    if key.kernel == "bwd_delta":
        return Config(max(16, 8192 // key.block_d), 16, 4, 1)
    is_roomy = SHARED_MEMORY.get(key.arch, 0) >= ROOMY
    wide = key.block_d * key.bits // 16  # in 16-bit elements
    if wide <= 64:
        config = Config(128, 64, 4, 3)
    elif wide <= 128:
        config = Config(128, 64, 8, 3) if is_roomy else Config(64, 64, 4, 2)
    elif wide <= 256:
        config = Config(64, 64, 8, 2) if is_roomy else Config(32, 32, 4, 2)
    else:
        config = Config(32, 32, 8, 1) if is_roomy else Config(16, 16, 4, 1)
    if key.kernel == "bwd_dkdv":  # keys stay, queries stream
        return Config(config.BLOCK_N, config.BLOCK_M, config.num_warps, min(config.num_stages, 2))
    return config
