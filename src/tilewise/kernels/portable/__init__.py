"""The portable backend: FlashAttention-2 in Triton, for every GPU that Triton serves, and for CPU
tensors under its interpreter.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ...emulation import interpreter_is_on
from ...problem import Problem

NAME = "portable"
MAX_HEADDIM = 512
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

MAX_HEADDIM_FP8 = 256

# The files of what calls launch, which import Triton
LAUNCHES = {"captured_grads": "captured_launch", "prepare_fp8": "fp8_launch"}
LAUNCHES |= dict.fromkeys(("prepare", "prepare_backward"), "launch")


def supports(problem: Problem, device: torch.device) -> str | None:
    """None, or why these kernels do not serve the problem."""
    if reason := _why_not_here(device):
        return reason
    if problem.dtype not in DTYPES:
        return (
            f"dtype {problem.dtype} has no kernel; cast to float16, bfloat16 or float32, or call "
            "tilewise.attention_reference, which takes any"
        )
    widest = max(problem.headdim, problem.headdim_v)
    if widest > MAX_HEADDIM:
        return f"headdim {widest} is over {MAX_HEADDIM}, the widest tile that fits the registers"
    return _why_not_by_triton(device)


def supports_fp8(problem: Problem, device: torch.device, out_dtype: torch.dtype) -> str | None:
    """None, or why these kernels do not support a problem of float8_e4m3fn, with V as V^T."""
    if reason := _why_not_here(device):
        return reason
    if problem.dtype != torch.float8_e4m3fn:
        return f"its 8-bit dtype is float8_e4m3fn, not {problem.dtype}"
    if out_dtype not in DTYPES:
        return f"out_dtype {out_dtype} is not supported; float16, bfloat16 and float32 are"
    lacking = {
        "a bias": problem.has_bias,
        "a mask function or a block mask": problem.mods.mask or problem.mods.block != (0, 0),
        "a score function": problem.mods.score,
        "dropout": problem.has_dropout,
    }
    for name, is_asked in lacking.items():
        if is_asked:
            return f"the FP8 kernel does not support {name}; with 16-bit q, k and v it is supported"
    widest = max(problem.headdim, problem.headdim_v)
    if widest > MAX_HEADDIM_FP8:
        return f"headdim {widest} is over {MAX_HEADDIM_FP8}, the widest of the FP8 kernel"
    return _why_not_by_triton(device)


def _why_not_here(device: torch.device) -> str:
    """Why these kernels do not run on a device, or ""."""
    if device.type == "cpu" and not interpreter_is_on():
        return (
            "its kernels run on GPUs; on CPU tensors only inside tilewise.testing.use_interpreter()"
        )
    if device.type not in ("cpu", "cuda"):
        return f"its kernels run on CUDA and ROCm GPUs, not on {device.type}"
    return ""


def _why_not_by_triton(device: torch.device) -> str | None:
    """Why Triton compiles nothing; without Triton the ImportError is the reason."""
    from ..common.building import INTERPRETED, is_interpreted

    if device.type != "cpu" and is_interpreted():
        return INTERPRETED
    from . import launch  # noqa: F401

    return None


def __getattr__(name: str) -> Any:
    """A function of LAUNCHES, imported lazily: CPU calls import no Triton."""
    if name not in LAUNCHES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{LAUNCHES[name]}", __name__)
    globals()[name] = getattr(module, name)
    return globals()[name]
