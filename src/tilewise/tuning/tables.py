"""Configurations that were measured, and a default rule for everything else.

A row without a measured figure does not belong here: the default rule below serves it. Figures are
TFLOP/s with 16Ki tokens and hidden size 2048, counting the matmuls that the kernel itself does (2
forward, 4 for dK and dV, 3 for dQ). One configuration serves all lengths, unless a row for short
ones is measured as well.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..hardware import SHARED_MEMORY


class Config(NamedTuple):
    """The shape of a kernel's tiles and how it is launched, all of which changes speed and no
    result: BLOCK_M queries by BLOCK_N keys, on num_warps warps, loads pipelined num_stages deep,
    through tensor descriptors where the tensors' alignment allows them.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    descriptors: bool = False


SHORT = 1024  # rows that the portable kernels call few


class Key(NamedTuple):
    """What a measured row is for."""

    arch: str  # "sm90", "gfx942", ... ; "interpreter" on CPU tensors
    kernel: str  # "fwd", "bwd_dkdv", "bwd_dq" or "bwd_delta"
    block_d: int  # the larger head dim, padded to a power of two
    bits: int  # 16 or 32: the width of an element
    is_causal: bool  # the band is closed on the right
    is_short: bool = False  # few rows to cover: a program's start and end weigh more


_sm90 = functools.partial(Key, "sm90")

# NVIDIA H200, Triton 3.6, bf16, 2026-11-20, at seqlen 1Ki / 4Ki / 16Ki; one figure: 4Ki. Three
# descriptors cost a program about 4 us, and save it the registers of its addresses.
_H200 = [
    (_sm90("fwd", 32, 16, False), Config(128, 64, num_warps=4, num_stages=3), "283"),
    (_sm90("fwd", 32, 16, True), Config(64, 64, num_warps=4, num_stages=2), "268"),
    (_sm90("fwd", 64, 16, False), Config(128, 64, num_warps=8, num_stages=3), "388 / 396 / 431"),
    (_sm90("fwd", 64, 16, True), Config(64, 64, num_warps=4, num_stages=2), "305 / 373 / 397"),
    (_sm90("fwd", 128, 16, False), Config(128, 128, num_warps=8, num_stages=3), "401 / 466 / 501"),
    (_sm90("fwd", 128, 16, False, True), Config(64, 64, num_warps=4, num_stages=3), "414 at 1Ki"),
    (_sm90("fwd", 128, 16, True), Config(64, 64, num_warps=4, num_stages=3), "327 / 402 / 454"),
    (_sm90("fwd", 256, 16, False), Config(128, 64, num_warps=8, num_stages=2), "509"),
    (_sm90("fwd", 256, 16, True), Config(128, 64, num_warps=8, num_stages=2), "460"),
    (_sm90("hopper_fwd", 64, 16, False), Config(192, 128, 12, 3), "470 / 499 / 511"),
    (_sm90("hopper_fwd", 64, 16, True), Config(192, 128, 12, 4), "432 / 488 at 4Ki / 16Ki"),
    (_sm90("hopper_fwd", 64, 16, True, True), Config(128, 128, 8, 2), "344 / 402 at 1Ki / 2Ki"),
    (_sm90("hopper_fwd", 128, 16, False), Config(128, 128, 8, 2), "655 / 635 / 662"),
    (_sm90("hopper_fwd", 128, 16, True), Config(128, 128, 8, 2), "463 / 562 / 614"),
    # of 192, with 128 of V: an H100, 16 heads
    (_sm90("hopper_fwd", 192, 16, False), Config(128, 128, 8, 2), "617 / 733 / 781"),
    (_sm90("hopper_fwd", 192, 16, True), Config(128, 128, 8, 2), "455 / 648 / 728"),
    (_sm90("hopper_fwd", 256, 16, False), Config(128, 64, 8, 2), "628 / 663 / 685"),
    (_sm90("hopper_fwd", 256, 16, True), Config(128, 64, 8, 2), "438 / 580 / 647"),
    (_sm90("bwd_dkdv", 32, 16, False), Config(64, 128, num_warps=4, num_stages=3), "399"),
    (_sm90("bwd_dkdv", 32, 16, True), Config(128, 64, num_warps=4, num_stages=3), "348"),
    (_sm90("bwd_dkdv", 64, 16, False), Config(64, 64, 4, 3, True), "406 / 459 / 488"),
    (_sm90("bwd_dkdv", 64, 16, True), Config(64, 64, num_warps=4, num_stages=3), "341 / 434 / 465"),
    (_sm90("bwd_dkdv", 128, 16, False), Config(64, 64, 4, 2, True), "496 / 557 / 585"),
    (_sm90("bwd_dkdv", 128, 16, True), Config(64, 64, 4, 2, True), "405 / 528 / 607"),
    (_sm90("bwd_dkdv", 256, 16, False), Config(64, 64, 8, 2, True), "322"),
    (_sm90("bwd_dkdv", 256, 16, True), Config(64, 64, 8, 2, True), "314"),
    (_sm90("bwd_dq", 32, 16, False), Config(64, 64, num_warps=4, num_stages=3), "431"),
    (_sm90("bwd_dq", 32, 16, True), Config(64, 64, num_warps=4, num_stages=2), "388"),
    (_sm90("bwd_dq", 64, 16, False), Config(128, 64, num_warps=8, num_stages=3), "536 / 588 / 553"),
    (_sm90("bwd_dq", 64, 16, True), Config(64, 64, 4, 2, True), "406 / 540 / 534"),
    (_sm90("bwd_dq", 128, 16, False), Config(128, 64, 8, 3), "512 / 572 / 613"),
    (_sm90("bwd_dq", 128, 16, True), Config(128, 64, num_warps=8, num_stages=3), "376 / 535 / 593"),
    (_sm90("bwd_dq", 256, 16, False), Config(64, 64, 4, 2, True), "485"),
    (_sm90("bwd_dq", 256, 16, True), Config(64, 64, 4, 2, True), "440"),
]

TABLE: dict[Key, Config] = {key: config for key, config, _ in _H200}

# Below this much shared memory a tile's operands leave no room for pipelining.
ROOMY = 160_000


def default(key: Key) -> Config:
    """Tiles whose accumulators stay in registers and whose operands fit in shared memory.

    The forward holds S and O, dQ holds S, dP and dQ, and dK and dV one tile more: fewer queries
    each time, and more warps for wide heads.
    """
    if key.arch == "interpreter":
        return Config(64, 64, num_warps=4, num_stages=1)
    if key.kernel == "bwd_delta":
        return Config(max(16, 8192 // key.block_d), 16, num_warps=4, num_stages=1)
    if key.block_d > 256:
        return _widest(key)
    m, n, warps, stages = _forward_tile(key)
    if key.kernel not in ("fwd", "fp8_fwd"):
        m, stages = min(m, 64 if key.kernel == "bwd_dq" else 32), min(stages, 2)
        if key.bits == 16 and key.block_d >= 128:
            warps = 8
    if key.arch.startswith("gfx"):  # a wavefront has 64 lanes, and 4 of them have all registers
        warps = 4
        if key.kernel == "bwd_dkdv" and key.block_d >= 128:
            stages = 1  # loads in flight would take the registers of dK and dV: 177 spilled
    return Config(m, n, num_warps=warps, num_stages=stages)


def _widest(key: Key) -> Config:
    """The configuration for 512 columns: as many scores as still spill next to nothing."""
    if key.bits == 32:
        return Config(16, 16, num_warps=4 if key.arch.startswith("gfx") else 8, num_stages=1)
    if key.arch.startswith("gfx"):
        tiles = {"fwd": (32, 32), "bwd_dq": (32, 16), "bwd_dkdv": (16, 32)}
        block_m, block_n = tiles[key.kernel]
        return Config(block_m, block_n, num_warps=4, num_stages=1)
    if key.kernel == "bwd_dkdv":  # loads in flight take less shared memory than those that are not
        return Config(16, 32, num_warps=8, num_stages=2)
    if not _is_roomy(key):
        return Config(32, 32, 8, 1) if key.kernel == "fwd" else Config(32, 16, 8, 2)
    return Config(64 if key.kernel == "fwd" else 32, 32, num_warps=8, num_stages=2)


def columns_at_once(key: Key, holds_none: bool) -> int:
    """How many columns of a head the backward's S and dP are summed over at a time; 0: all. Few
    where the rows that they are of, four tiles of them, have no room in shared memory or, on
    gfx950, in registers (281 spilled), or where the kernel holds none of them from one tile to the
    next.
    """
    is_wide = key.kernel in ("bwd_dq", "bwd_dkdv") and key.block_d > 256
    is_short_of_room = has_little_room(key) or key.arch.startswith("gfx")
    return 128 if is_wide and (holds_none or (key.bits == 32 and is_short_of_room)) else 0


def has_little_room(key: Key) -> bool:
    """Whether the backward's tiles of wide heads barely fit the shared memory of a GPU."""
    is_wide = key.kernel in ("bwd_dq", "bwd_dkdv") and key.block_d > 256
    return is_wide and key.arch != "interpreter" and not _is_roomy(key)


def _is_roomy(key: Key) -> bool:
    return SHARED_MEMORY.get(key.arch, 0) >= ROOMY


def _forward_tile_of_8_bits(key: Key, is_roomy: bool) -> tuple[int, int, int, int]:
    """By registers as compiled, nothing measured: beside S and O there is P V of a block, and on
    GPUs without a product of 8 bits (sm80, gfx942) a tile of 16 bits.
    """
    if key.block_d > 128:
        return (64, 32, 4, 1) if key.arch == "gfx942" else (64, 64, 8, 2)
    return (128, 64, 8, 3) if is_roomy and key.arch in ("sm90", "sm100") else (64, 64, 4, 2)


def _forward_tile(key: Key) -> tuple[int, int, int, int]:
    is_roomy = _is_roomy(key)
    if key.bits == 8:
        return _forward_tile_of_8_bits(key, is_roomy)
    if key.bits == 32:  # exact fp32 has no tensor cores: operands pass through registers, too
        if key.block_d <= 64:
            return 64, 32, 8, 1
        return (32, 32, 8, 1) if is_roomy or key.block_d <= 128 else (16, 16, 4, 1)
    if key.block_d <= 64:
        return 128, 64, 4, 3
    if key.block_d <= 128:
        return (128, 64, 8, 3) if is_roomy else (64, 64, 4, 2)
    return (64, 64, 8, 2) if is_roomy else (32, 32, 4, 2)
