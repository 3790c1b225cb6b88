"""Configurations that were measured, and a default rule for everything else.

Key fields: architecture, kernel, padded head dim, element bits, band closed on the right (causal).
A row without a measured figure does not belong here: the default rule below serves it. Figures are
TFLOP/s at seqlen 1Ki / 4Ki / 16Ki with 16Ki tokens and hidden size 2048, counting the matmuls that
the kernel itself does (2 forward, 4 for dK and dV, 3 for dQ). One configuration serves all lengths.
"""

from __future__ import annotations

from .config import SHARED_MEMORY, Config, Key

# NVIDIA H200, Triton 3.6, bf16, 2026-11-20. Descriptors cost about a microsecond a program and save
# address registers: they pay where programs are long.
_H200 = [
    (("fwd", 64, 16, False), (128, 64, 8, 3), "382 / 415 / 435"),
    (("fwd", 64, 16, True), (64, 64, 4, 2), "312 / 382 / 401"),
    (("fwd", 128, 16, False), (128, 64, 8, 3), "405 / 486 / 494"),
    (("fwd", 128, 16, True), (64, 64, 4, 3, True), "287 / 428 / 497"),
    (("bwd_dkdv", 64, 16, False), (64, 64, 4, 2, True), "420 / 519 / 532"),
    (("bwd_dkdv", 64, 16, True), (64, 64, 4, 3), "344 / 442 / 475"),
    (("bwd_dkdv", 128, 16, False), (64, 64, 4, 2, True), "470 / 580 / 617"),
    (("bwd_dkdv", 128, 16, True), (64, 64, 4, 2), "406 / 528 / 641"),
    (("bwd_dq", 64, 16, False), (128, 64, 8, 3), "576 / 568 / 649"),
    (("bwd_dq", 64, 16, True), (64, 64, 4, 3), "414 / 555 / 550"),
    (("bwd_dq", 128, 16, False), (128, 64, 8, 3), "518 / 621 / 590"),
    (("bwd_dq", 128, 16, True), (128, 64, 8, 3), "380 / 550 / 660"),
]

TABLE: dict[Key, Config] = {Key("sm90", *key): Config(*config) for key, config, _ in _H200}

# Below this a tile's operands leave no room for pipelining, and the rule takes smaller tiles.
ROOMY = 160_000


def default(key: Key) -> Config:
    """Tiles that fit every architecture: half as large where shared memory is small, smaller again
    for fp32 and wide heads.
    """
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
