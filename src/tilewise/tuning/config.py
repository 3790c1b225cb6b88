"""The shape of a kernel's tiles and how it is launched: everything that changes speed and no
result.
"""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    """BLOCK_M queries by BLOCK_N keys, on num_warps warps, loads pipelined num_stages deep,
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
