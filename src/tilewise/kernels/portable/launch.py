"""Host side: groups the arguments, picks the tiles, allocates what comes back, launches."""

from __future__ import annotations

import contextlib
import functools
import math

import torch
import triton

from ...problem import Extras, Grads, Problem, Scalars
from ...testing.switch import interpreter_is_on
from ...tile.types import Features, Numbers, Optionals, Sizes, Strided, Tile
from ...tuning.config import Config
from ...tuning.select import select
from ..outputs import empty_grads, empty_out
from .bwd_delta import bwd_delta_kernel
from .bwd_dkdv import attn_bwd_dkdv_kernel
from .bwd_dq import attn_bwd_dq_kernel
from .fwd import attn_fwd_kernel

LOG2_E = math.log2(math.e)
Tensor = torch.Tensor


def forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, extras: Extras, scalars: Scalars
) -> tuple[Tensor, Tensor]:
    """`out` and `lse`; allocates nothing else."""
    out, lse = empty_out(problem, q)
    config, tile = tile_of("fwd", problem, q, k, v)
    sizes, numbers = sizes_of(q, k), numbers_of(scalars, q, k)
    tiles = triton.cdiv(q.shape[1], tile.BLOCK_M) * q.shape[2] * q.shape[0]
    args = (*map(strided, (q, k, v, out)), lse, optionals_of(extras), sizes, numbers)
    launch(
        attn_fwd_kernel, tiles, config, q.device, *args, FEATURES=features_of(problem), TILE=tile
    )
    return out, lse


def backward(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Extras,
    scalars: Scalars,
) -> Grads:
    """Gradients by recomputation; allocates them, delta, and one float a tile for the sinks."""
    dq, dk, dv, dsinks = empty_grads(q, k, v, extras.sinks)
    if dout.stride(-1) != 1:  # such as the expanded gradient of a sum
        dout = dout.contiguous()
    features, optionals = features_of(problem), optionals_of(extras)
    sizes, numbers = sizes_of(q, k), numbers_of(scalars, q, k)

    delta = torch.empty_like(lse)
    config, tile = tile_of("bwd_delta", problem, q)
    batch, seqlen_q, nheads, _ = q.shape
    m_blocks = triton.cdiv(seqlen_q, tile.BLOCK_M)
    parts = None if dsinks is None else lse.new_empty(batch, nheads, m_blocks)
    dlse = None if dlse is None else dlse.contiguous()
    args = (strided(out), strided(dout), lse, dlse, delta, parts, optionals, sizes)
    launch(
        bwd_delta_kernel,
        m_blocks * nheads * batch,
        config,
        q.device,
        *args,
        FEATURES=features,
        TILE=tile,
    )
    if dsinks is not None:
        dsinks.copy_(parts.sum((0, 2)))

    stats = lse, delta
    config, tile = tile_of("bwd_dkdv", problem, q, k, v, dout)
    tiles = triton.cdiv(k.shape[1], tile.BLOCK_N) * problem.nheads_k * batch
    args = (*map(strided, (q, k, v, dout, dk, dv)), stats, optionals, sizes, numbers)
    launch(attn_bwd_dkdv_kernel, tiles, config, q.device, *args, FEATURES=features, TILE=tile)

    config, tile = tile_of("bwd_dq", problem, q, k, v, dout)
    tiles = triton.cdiv(seqlen_q, tile.BLOCK_M) * nheads * batch
    args = (*map(strided, (q, k, v, dout, dq)), stats, optionals, sizes, numbers)
    launch(attn_bwd_dq_kernel, tiles, config, q.device, *args, FEATURES=features, TILE=tile)
    return Grads(dq, dk, dv, dsinks)


def launch(kernel, tiles: int, config: Config, device: torch.device, *args, **constants) -> None:
    """One program a tile; on CPU tensors through the interpreter."""
    if tiles == 0:
        return
    if interpreter_is_on() and device.type == "cpu":
        from ...testing.interpreter import interpret

        interpret(kernel)[(tiles,)](*args, **constants)
        return
    triton.set_allocator(_scratch)  # per thread, and autograd's backward runs in its own
    here = device.index in (None, torch.cuda.current_device())
    with contextlib.nullcontext() if here else torch.cuda.device(device):
        # fusing multiply and add is what the exponent's cost counts on; Triton 3.10 turns it off by
        # default
        kernel[(tiles,)](
            *args,
            **constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            enable_fp_fusion=True,
        )


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Device memory that descriptors made in a kernel live in."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def tile_of(kernel: str, problem: Problem, q: Tensor, *read: Tensor) -> tuple[Config, Tile]:
    """The kernel's configuration and its tile, head dims padded to what a matmul takes.

    Descriptors are used only where every tensor read allows them.
    """
    block_d, block_dv = (
        max(16, triton.next_power_of_2(d)) for d in (problem.headdim, problem.headdim_v)
    )
    config = select(kernel, q.device, problem.dtype, max(block_d, block_dv), problem.is_causal)
    return config, Tile(
        config.BLOCK_M,
        config.BLOCK_N,
        block_d,
        block_dv,
        config.descriptors and all(map(fits_descriptor, (q, *read))),
    )


@functools.lru_cache(maxsize=4096)
def features_of(problem: Problem) -> Features:
    """The constexpr record that selects a kernel's code."""
    return Features(
        HEADDIM=problem.headdim,
        HEADDIM_V=problem.headdim_v,
        GROUP=problem.group,
        LEFT=problem.has_left,
        RIGHT=problem.has_right,
        TOP_LEFT=problem.align == "top_left",
        SOFTCAP=problem.has_softcap,
        ALIBI=problem.has_alibi,
        SINKS=problem.has_sinks,
        SEQUSED_K=problem.has_seqused_k,
        PRECISION="ieee",
    )


def fits_descriptor(x: Tensor) -> bool:
    """Whether a tensor descriptor can read each head of x: aligned rows that do not repeat."""
    aligned = all(stride * x.itemsize % 16 == 0 for stride in x.stride()[:3])
    return aligned and x.stride(1) > 0 and x.data_ptr() % 16 == 0


def strided(x: Tensor) -> Strided:
    """A (batch, seqlen, nheads, headdim) tensor as kernels take it."""
    return Strided(x, *x.stride()[:3])


def sizes_of(q: Tensor, k: Tensor) -> Sizes:
    """The call's lengths."""
    return Sizes(q.shape[2], q.shape[1], k.shape[1])


def numbers_of(scalars: Scalars, q: Tensor, k: Tensor) -> Numbers:
    """Scale and softcap in base 2; window sides cut to what the lengths can reach, so that index
    sums stay in 32 bits.
    """
    reach = q.shape[1] + k.shape[1]
    ratio = scalars.scale / scalars.softcap if scalars.softcap > 0 else 0.0
    left, right = min(scalars.left, reach), min(scalars.right, reach)
    return Numbers(
        scalars.scale, scalars.scale * LOG2_E, scalars.softcap * LOG2_E, ratio, left, right
    )


def optionals_of(extras: Extras) -> Optionals:
    """The optional tensors as kernels take them."""
    slopes, sinks, used = extras
    per_batch = slopes is not None and slopes.dim() == 2
    slopes, sinks, used = (None if x is None else x.contiguous() for x in (slopes, sinks, used))
    return Optionals(slopes, slopes.stride(0) if per_batch else 0, sinks, used)
