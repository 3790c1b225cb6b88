"""The Hopper backend: FlashAttention-3's forward and backward in Gluon, for sm_90, and for CPU
tensors in the emulator.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ...emulation import emulator_seed
from ...errors import Avoidable, Slower
from ...problem import Problem

NAME = "hopper"
MAX_HEADDIM = 256
TILE_M = 128  # queries of a tile that takes a block mask
DTYPES = (torch.float16, torch.bfloat16)

FP8_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)

# The files of what calls launch, which import Triton
LAUNCHES = {"prepare": "fwd.launch", "prepare_backward": "bwd.launch"}
LAUNCHES |= dict.fromkeys(("prepare_fp8", "takes_values"), "fwd.fp8_launch")


def supports(problem: Problem, device: torch.device) -> str | None:
    """None, or why this kernel does not serve the problem."""
    if reason := _no_device(device):
        return reason
    if problem.dtype not in DTYPES:
        return f"{problem.dtype} has no exact matmul there; float16 and bfloat16 have"
    for name, headdim in (("headdim", problem.headdim), ("headdim_v", problem.headdim_v)):
        if headdim > MAX_HEADDIM:
            return f"{name} {headdim} is over {MAX_HEADDIM}, the widest tile that fits"
    if problem.mods.block != (0, 0):
        rows, keys = problem.mods.block
        multiple = 128 if max(problem.headdim, problem.headdim_v) <= 128 else 64
        if rows != TILE_M or keys % multiple:
            return Avoidable(
                f"its tiles of {TILE_M} queries and {multiple} keys do not divide the blocks of "
                f"{rows} x {keys} of a block mask: create_block_mask(..., block=(128, 128))"
            )
        if problem.deterministic:
            return Avoidable("the gradients of a block mask are added in no fixed order there")
    if reason := _no_kernels(device):
        return reason
    from .fwd import launch  # noqa: F401

    if max(problem.headdim, problem.headdim_v) <= 32:
        return Slower(
            "its tiles are 64 columns wide: up to headdim 32 the portable kernel is faster"
        )
    return None


def why_copied(problem: Problem) -> str | None:
    """Why q, k and v that are not aligned are copied; None where they are refused."""
    for name, headdim in (("headdim", problem.headdim), ("headdim_v", problem.headdim_v)):
        if headdim % 8:
            return (
                f"{name} {headdim} is not a multiple of 8 (16 bytes), so q, k, sometimes v, and "
                "gradients are copied: pad it with zeros, or let rows, heads and batches start "
                "at multiples of 8"
            )
    return None


def supports_fp8(problem: Problem, device: torch.device, out_dtype: torch.dtype) -> str | None:
    """None, or why this kernel does not serve the problem in FP8."""
    if reason := _no_device(device) or _no_kernels(device):
        return reason
    if out_dtype not in FP8_OUTPUTS:
        return f"out_dtype {out_dtype} is not bfloat16, float16 or float32"
    for name, headdim in (("headdim", problem.headdim), ("headdim_v", problem.headdim_v)):
        if headdim > MAX_HEADDIM or headdim % 16:
            return (
                f"{name} {headdim} is not a multiple of 16 (16 bytes, for TMA) up to {MAX_HEADDIM}"
            )
    if problem.is_modified:
        return "its FP8 kernel supports no bias, mask function, score function or dropout"
    return None


def _no_device(device: torch.device) -> str | None:
    if device.type == "cpu" and emulator_seed() is None:
        return (
            "its kernel runs on Hopper GPUs; on CPU tensors only in tilewise.testing.use_emulator()"
        )
    if device.type == "cuda" and not _is_hopper(device):
        return "its instructions (wgmma, TMA) are those of Hopper GPUs, sm_90"
    if device.type not in ("cpu", "cuda"):
        return f"its kernel runs on CUDA GPUs, not on {device.type}"
    return None


def _no_kernels(device: torch.device) -> str | None:
    """Why nothing compiles here; without Triton the ImportError is the reason."""
    from ..common.building import INTERPRETED, is_interpreted

    return INTERPRETED if device.type != "cpu" and is_interpreted() else None


def _is_hopper(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def __getattr__(name: str) -> Any:
    """A function of LAUNCHES, imported lazily: CPU calls import no Triton."""
    if name not in LAUNCHES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{LAUNCHES[name]}", __name__)
    globals()[name] = getattr(module, name)
    return globals()[name]
