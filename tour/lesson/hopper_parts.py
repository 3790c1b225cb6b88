"""What the kernels of lesson 07 share: layouts, barriers, pipelines, launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise import attention_reference

# named differently by Triton 3.6 and 3.8
from tilewise.kernels.hopper.compat import tma_load
from tilewise.testing import SMEM_LIMIT, build, emulate, stats
from tilewise.testing.tolerance import Verdict, judge

Tensor = torch.Tensor
BLOCK_N = 128  # keys of a block
ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
SM_REGISTERS = 65536  # of 32 bits
SM_SMEM = 233472  # bytes; each program takes 1 KiB of them for the system


@gluon.constexpr_function
def accumulator(columns):
    """(64, columns) of fp32 as wgmma leaves it: 16 rows per warp."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def row_of(columns):
    """One number per row, in the threads that hold the row."""
    return gl.SliceLayout(1, accumulator(columns))


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers whose phases end after ARRIVALS arrivals; the caller fences."""
    barriers = gl.allocate_shared_memory(
        gl.int64, [COUNT, 1], mbarrier.MBarrierLayout()
    )
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def load_tile(desc, row, full, tile):
    """Starts a TMA load, rows from `row` on, whose bytes end a phase of `full`."""
    mbarrier.expect(full, desc.block_type.nbytes)
    tma_load(desc, [row, 0], full, tile)


class Pipeline(NamedTuple):
    """Stages of shared memory that a producer warp fills and consumers read."""

    tiles: gl.shared_memory_descriptor  # (STAGES, rows, HEADDIM)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def make_pipeline(desc, STAGES: gl.constexpr, READERS: gl.constexpr):
    """Stages of tiles: full after one arrival, empty after READERS."""
    ROWS: gl.constexpr = desc.block_type.shape[0]
    D: gl.constexpr = desc.block_type.shape[1]
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES, ROWS, D], desc.layout)
    return Pipeline(tiles, make_barriers(STAGES, 1), make_barriers(STAGES, READERS))


@gluon.jit
def wait_full(pipe, i):
    """Waits for block i. Returns its tile."""
    STAGES: gl.constexpr = pipe.tiles.shape[0]
    mbarrier.wait(pipe.full.index(i % STAGES), (i // STAGES) & 1)
    return pipe.tiles.index(i % STAGES)


@gluon.jit
def wait_empty(pipe, i):
    """Waits until block i - STAGES, which had the same stage, has been read."""
    STAGES: gl.constexpr = pipe.tiles.shape[0]
    mbarrier.wait(pipe.empty.index(i % STAGES), ((i // STAGES) & 1) ^ 1)


@gluon.jit
def fill(pipe, i, desc, row):
    """Starts the load of block i into its stage."""
    STAGES: gl.constexpr = pipe.tiles.shape[0]
    load_tile(desc, row, pipe.full.index(i % STAGES), pipe.tiles.index(i % STAGES))


@gluon.jit
def release(pipe, i):
    """This consumer has read block i."""
    STAGES: gl.constexpr = pipe.tiles.shape[0]
    mbarrier.arrive(pipe.empty.index(i % STAGES), count=1)


@gluon.jit
def empty_state(N: gl.constexpr, D: gl.constexpr):
    """The running maximum, sum and output of 64 rows before the first key."""
    m_i = gl.full([64], float("-inf"), gl.float32, row_of(N))
    l_i = gl.zeros([64], gl.float32, row_of(N))
    return m_i, l_i, gl.zeros([64, D], gl.float32, accumulator(D))


@gluon.jit
def left_operand(p, D: gl.constexpr, dtype: gl.constexpr):
    """P, rounded, as wgmma takes it from registers, without a shuffle."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, accumulator(D), 2))


@gluon.jit
def rescale(acc_o, factor):
    """Rows times a factor each."""
    D: gl.constexpr = acc_o.shape[1]
    return acc_o * gl.convert_layout(factor, row_of(D))[:, None]


@gluon.jit
def write_rows(acc_o, l_i, out, row):
    """O = acc / l, 64 rows from `row` on."""
    D: gl.constexpr = acc_o.shape[1]
    rows = row + gl.arange(0, 64, row_of(D))
    columns = gl.arange(0, D, gl.SliceLayout(0, accumulator(D)))
    acc_o = rescale(acc_o, 1.0 / l_i)
    gl.store(
        out + rows[:, None] * D + columns[None, :], acc_o.to(out.dtype.element_ty)
    )


class Step(NamedTuple):
    """A kernel of the ladder, and how many queries one program of it takes."""

    kernel: Any
    rows: int


def describe(x: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of a tensor as a matrix of its rows, in tiles of `rows` rows."""
    layout = gl.NVMMASharedLayout.get_default_for(
        [rows, x.shape[-1]], ELEMENTS[x.dtype]
    )
    return TensorDescriptor.from_tensor(
        x.flatten(0, -2), [rows, x.shape[-1]], layout
    )


def arguments(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> tuple:
    """What every step's kernel takes; tensors are (heads, seqlen, headdim)."""
    seqlen, headdim = q.shape[1:]
    if seqlen % BLOCK_N:
        raise ValueError(
            f"seqlen {seqlen}: these kernels have no masks, take multiples of 128"
        )
    scale_log2 = headdim**-0.5 / math.log(2)  # the softmax is in base 2
    return (
        describe(q, 64),
        describe(k, BLOCK_N),
        describe(v, BLOCK_N),
        out,
        seqlen,
        scale_log2,
    )


def prepare(
    step: Step, q: Tensor, k: Tensor, v: Tensor, **emulation: Any
) -> tuple[Callable[[], None], Tensor]:
    """A launch of the step's kernel, and the output that it fills.

    Compiled for CUDA tensors, else emulated with the options given.
    """
    out = torch.full_like(q, math.nan)
    args = arguments(q, k, v, out)
    grid = q.shape[1] // step.rows, q.shape[0]
    kernel = step.kernel if q.is_cuda else emulate(step.kernel, **emulation)
    return lambda: kernel[grid](*args, num_warps=4), out


def attend(step: Step, q: Tensor, k: Tensor, v: Tensor, **emulation: Any) -> Tensor:
    """The output of one launch."""
    launch, out = prepare(step, q, k, v, **emulation)
    launch()
    return out


def verdict_of(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, rows: int = 256
) -> Verdict:
    """The error of the last rows of the last head against fp64.

    It stands beside that of plain torch code in the same precision.
    """
    if not out.isfinite().all():
        return Verdict(math.nan, 0.0, math.nan, 0.0, False)
    q, out = q[-1:, -rows:], out[-1:, -rows:]
    some = [x[None] for x in (q, k[-1:], v[-1:])]
    oracle = attention_reference(*(x.double() for x in some), layout="bhsd")[0]
    plain = attention_reference(*some, layout="bhsd", upcast=False)[0]
    return judge(out, oracle, plain)


def needs(step: Step, headdim: int) -> dict[str, Any]:
    """What a step needs, compiled for sm_90: see `tilewise.testing.stats`.

    `programs` is how many fit on an SM, by shared memory and by registers.
    """
    x = torch.empty(1, 4096, headdim, dtype=torch.bfloat16)
    found = stats(
        build(step.kernel, *arguments(x, x, x, x), on="sm90", num_warps=4)
    )
    registers = -(-found["registers"] // 8) * 8 * 32 * found["warps"]
    programs = min(SM_SMEM // (found["smem"] + 1024), SM_REGISTERS // registers)
    fits = found["smem"] <= SMEM_LIMIT["sm90"]
    return found | dict(programs=programs if fits else 0)
