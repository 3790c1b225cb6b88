"""The last kernel of lesson 02b: a persistent matmul on tensor descriptors.

As many programs as the GPU has SMs stay resident and compute one tile of C after
the other, so that the loads of a tile begin while the one before it is still being
written. Tiles of A and B come by TMA into stages of shared memory, and C leaves by
TMA in halves, which takes half the memory.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from . import here


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """m_block and n_block of a tile: down GROUP_M rows, then to the right."""
    in_group = GROUP_M * tiles_n
    first_m = tile // in_group * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)  # the last group may be lower
    within = tile % in_group
    return first_m + within % rows, within // rows


@triton.jit
def matmul_kernel(
    a, b, c, M, N, K,
    TILES: tl.constexpr, B_BY_COLUMN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """C = A B for descriptors of A (M, K), B (K, N), or (N, K) by column, and C."""
    BLOCK_M: tl.constexpr = TILES.BLOCK_M
    BLOCK_N: tl.constexpr = TILES.BLOCK_N
    BLOCK_K: tl.constexpr = TILES.BLOCK_K
    FLATTEN: tl.constexpr = TILES.FLATTEN
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    start, step = tl.program_id(0), tl.num_programs(0)
    # A second counter for C: with one, its store would stay between a tile's loads
    # and the next
    stored = start - step
    for tile in tl.range(start, tiles_m * tiles_n, step, flatten=FLATTEN):
        m_block, n_block = grouped_tile(tile, tiles_m, tiles_n, TILES.GROUP_M)
        offs_m, offs_n = m_block * BLOCK_M, n_block * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k_block in range(tl.cdiv(K, BLOCK_K)):
            offs_k = k_block * BLOCK_K
            # (BLOCK_M, BLOCK_K), zeros beyond the edge
            a_tile = a.load([offs_m, offs_k])
            if B_BY_COLUMN:
                b_tile = b.load([offs_n, offs_k]).T
            else:
                b_tile = b.load([offs_k, offs_n])
            acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
        stored += step
        m_block, n_block = grouped_tile(stored, tiles_m, tiles_n, TILES.GROUP_M)
        offs_m, offs_n = m_block * BLOCK_M, n_block * BLOCK_N
        if TILES.PARTS == 1:
            c.store([offs_m, offs_n], acc.to(c.dtype))
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            left, right = tl.split(acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1))
            c.store([offs_m, offs_n], left.to(c.dtype))
            c.store([offs_m, offs_n + HALF], right.to(c.dtype))


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
    is_persistent: bool = True  # one program an SM; else one program a tile


class Format(NamedTuple):
    """A number format, and the configuration that was fastest for it on an H200."""

    dtype: torch.dtype
    precision: str  # of float32 inputs: tf32 or ieee
    by_column: bool  # how B lies: tensor cores read 8 and 32 bits along K alone
    config: Config


WIDE = Config(Tiles(128, 256, 64, 8, 2, True), warps=8, stages=4)
# GPUs before Hopper, which have less shared memory and no TMA, and the interpreter
SMALL = Config(
    Tiles(64, 64, 32, 4, 1, False), warps=4, stages=2, is_persistent=False
)
FORMATS = {
    "fp32": Format(
        torch.float32,
        "ieee",
        False,
        Config(Tiles(128, 64, 16, 8, 1, False), warps=8, stages=3),
    ),
    "tf32": Format(
        torch.float32,
        "tf32",
        True,
        Config(Tiles(128, 256, 32, 8, 2, True), warps=8, stages=3),
    ),
    "fp16": Format(torch.float16, "tf32", False, WIDE),
    "bf16": Format(torch.bfloat16, "tf32", False, WIDE),
    "fp8": Format(
        torch.float8_e4m3fn,
        "tf32",
        True,
        Config(Tiles(128, 256, 128, 8, 2, True), warps=8, stages=4),
    ),
}


def final_matmul(a, b, name="bf16"):
    """A (M, K) times B (K, N): fp32 sums, rounded once (fp8: to bf16)."""
    form = FORMATS[name]
    is_hopper = a.is_cuda and torch.cuda.get_device_capability() >= (9, 0)
    config = form.config if is_hopper else SMALL
    tiles, (m, k), n = config.tiles, a.shape, b.shape[1]
    out = torch.bfloat16 if a.itemsize == 1 else a.dtype
    c = torch.empty((m, n), dtype=out, device=a.device)
    programs = triton.cdiv(m, tiles.BLOCK_M) * triton.cdiv(n, tiles.BLOCK_N)
    if config.is_persistent:
        programs = min(
            programs, torch.cuda.get_device_properties(0).multi_processor_count
        )
    here(matmul_kernel)[(programs,)](
        *descriptors(a, b, c, tiles, form.by_column),
        *(m, n, k),
        TILES=tiles,
        B_BY_COLUMN=form.by_column,
        PRECISION=form.precision,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return c


def descriptors(a, b, c, tiles, by_column):
    """How the TMA finds tiles of A, B and C."""
    block_b = [tiles.BLOCK_K, tiles.BLOCK_N]
    blocks = (
        (a, [tiles.BLOCK_M, tiles.BLOCK_K]),
        (b.T, block_b[::-1]) if by_column else (b, block_b),
        (c, [tiles.BLOCK_M, tiles.BLOCK_N // tiles.PARTS]),
    )
    return [TensorDescriptor.from_tensor(x, block) for x, block in blocks]


def operands(m, n, k, name, device):
    """Normal inputs, rounded to the format's dtype."""
    form, generator = FORMATS[name], torch.Generator(device=device).manual_seed(0)
    a = torch.randn(m, k, device=device, generator=generator).to(form.dtype)
    b = torch.randn(n, k, device=device, generator=generator).to(form.dtype).T
    return a, b if form.by_column else b.contiguous()


def torch_matmul(a, b, name):
    """The product as torch has it: cuBLAS on a GPU."""
    if a.itemsize == 1 and not a.is_cuda:
        return (a.float() @ b.float()).bfloat16()
    if a.itemsize == 1:
        one = torch.ones((), device=a.device)
        return torch._scaled_mm(
            a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        return a @ b
    finally:
        torch.set_float32_matmul_precision(before)


def rounded(x, name):
    """x as a format's tensor cores read it, in fp64; tf32 keeps 10 bits."""
    if name == "tf32":
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32).double()
    return x.to(FORMATS[name].dtype).double()
