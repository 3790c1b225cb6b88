"""C = A B as one persistent kernel on tensor descriptors: the end of the tour's second lesson.

As many programs as the GPU has SMs stay resident and take one tile of C after the other, so that
the loads of a tile begin while the one before it is still being written. Tiles of A and B come by
TMA into a ring of shared memory, tensor cores read them there, and C leaves by TMA in halves, which
takes half the memory. Tiles are numbered in groups of rows, so that those in flight at one time
share their operands in L2 (lesson 02b draws it).

`CONFIGS` holds what may be chosen, `CHOICE` what is; `python -m benchmarks matmul --configs all`
times every one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.errors import ArgumentError
from tilewise.testing import interpret

from .matmul_kernel import matmul_kernel

Tensor = torch.Tensor
PROGRAMS_ON_CPU = 3  # fewer than tiles, so that the interpreter sees a program take several


class Tiles(NamedTuple):
    """What the kernel is compiled for."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int  # rows of tiles in a group
    PARTS: int  # C is written in this many pieces: 1 or 2
    FLATTEN: bool  # the loops over tiles and over K as one, whose loads never pause


class Config(NamedTuple):
    """Tiles, and how they are launched."""

    tiles: Tiles
    warps: int
    stages: int
    per_sm: int = 1  # programs an SM; 0: one program a tile


# By name, for 2-byte inputs unless the name says otherwise. Each was compiled for sm_90 by Triton
# 3.6 and 3.8 without a spill (tests/compile/test_matmul.py).
CONFIGS = {
    "wide": Config(Tiles(128, 256, 64, 8, 2, True), warps=8, stages=4),
    "wide16": Config(Tiles(128, 256, 64, 16, 2, True), warps=8, stages=4),
    "wide3": Config(Tiles(128, 256, 64, 8, 1, True), warps=8, stages=3),
    "tall": Config(Tiles(256, 128, 64, 8, 2, True), warps=8, stages=4),
    "once": Config(Tiles(128, 256, 64, 8, 1, False), warps=8, stages=3, per_sm=0),
    "pair": Config(Tiles(128, 128, 64, 8, 2, True), warps=4, stages=3, per_sm=2),
    "fp8": Config(Tiles(128, 256, 128, 8, 2, True), warps=8, stages=4),
    "tf32": Config(Tiles(128, 256, 32, 8, 2, True), warps=8, stages=3),
    "fp32": Config(Tiles(128, 64, 16, 8, 1, False), warps=8, stages=3),
    "small": Config(Tiles(64, 64, 32, 4, 1, False), warps=4, stages=2, per_sm=0),
}
# Which one serves which inputs on Hopper and later. Older GPUs, whose shared memory is smaller and
# which have no TMA, and the interpreter use "small".
CHOICE = {"float16": "wide", "bfloat16": "wide", "float8_e4m3fn": "fp8", "float32": "tf32"}
FULL_PRECISION = "fp32"  # float32 inputs without tensor cores
OUT = {torch.float8_e4m3fn: torch.bfloat16}  # else the dtype of the inputs


def matmul(a: Tensor, b: Tensor, config: str | None = None, precision: str = "tf32") -> Tensor:
    """A (M, K) times B (K, N): fp32 sums, rounded once to the inputs' dtype (bf16 for fp8).

    `config` is a name of CONFIGS; without one CHOICE is asked. `precision` is for float32 inputs:
    "tf32" leaves the tensor cores 10 bits of their fractions, "ieee" runs without those. On CPU
    tensors the kernel is interpreted, and knows no tf32.
    """
    chosen = CONFIGS[config or config_for(a, precision)]
    by_column = check(a, b, precision)
    m, k = a.shape
    n = b.shape[1]
    out = torch.empty((m, n), dtype=OUT.get(a.dtype, a.dtype), device=a.device)
    launch: Any = matmul_kernel if a.is_cuda else interpret(matmul_kernel)
    launch[(programs(a, n, chosen),)](
        *descriptors(a, b.T if by_column else b, out, chosen.tiles, by_column),
        *(m, n, k),
        TILES=chosen.tiles,
        B_BY_COLUMN=by_column,
        PRECISION=precision,
        num_warps=chosen.warps,
        num_stages=chosen.stages,
        enable_fp_fusion=True,
    )
    return out


def config_for(a: Tensor, precision: str) -> str:
    """The name of the configuration that serves these inputs here."""
    if not a.is_cuda or torch.cuda.get_device_capability(a.device) < (9, 0):
        return "small"
    name = str(a.dtype).removeprefix("torch.")
    if name == "float32" and precision == "ieee":
        return FULL_PRECISION
    if name not in CHOICE:
        raise ArgumentError(f"a is {name}: matmul takes {', '.join(CHOICE)}")
    return CHOICE[name]


def check(a: Tensor, b: Tensor, precision: str) -> bool:
    """Whether B lies by column; ArgumentError for what descriptors and tensor cores cannot read."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ArgumentError(f"a {tuple(a.shape)} times b {tuple(b.shape)}: (M, K) times (K, N)")
    if a.dtype != b.dtype:
        raise ArgumentError(f"a is {a.dtype} and b {b.dtype}: they must be the same")
    if precision not in ("tf32", "ieee"):
        raise ArgumentError(f"precision is {precision!r}: tf32 or ieee")
    by_column = b.stride(0) == 1 and b.stride(1) != 1
    if a.stride(1) != 1 or (b.stride(1) != 1 and not by_column):
        raise ArgumentError("a must lie by row, b by row or by column: call contiguous()")
    if a.itemsize == 1 and not by_column:
        raise ArgumentError("tensor cores read fp8 along K: give b as a transposed (N, K) tensor")
    for name, stride in (("a", a.stride(0)), ("b", b.stride(1 if by_column else 0))):
        if stride * a.itemsize % 16:
            raise ArgumentError(f"a row of {name} has {stride} elements: TMA wants 16 bytes' worth")
    return by_column


def descriptors(
    a: Tensor, b: Tensor, out: Tensor, tiles: Tiles, by_column: bool
) -> list[TensorDescriptor]:
    """How TMA finds the tiles; `b` as it lies in memory."""
    block_b = [tiles.BLOCK_N, tiles.BLOCK_K] if by_column else [tiles.BLOCK_K, tiles.BLOCK_N]
    blocks = (
        *((a, [tiles.BLOCK_M, tiles.BLOCK_K]), (b, block_b)),
        (out, [tiles.BLOCK_M, tiles.BLOCK_N // tiles.PARTS]),
    )
    return [TensorDescriptor.from_tensor(x, block) for x, block in blocks]


def programs(a: Tensor, n: int, config: Config) -> int:
    """How many programs are launched."""
    tiles = -(-a.shape[0] // config.tiles.BLOCK_M) * -(-n // config.tiles.BLOCK_N)
    if config.per_sm == 0:
        return tiles
    if not a.is_cuda:
        return min(tiles, PROGRAMS_ON_CPU)
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    return min(tiles, sms * config.per_sm)
