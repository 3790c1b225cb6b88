"""The portable backend: FlashAttention-2 in Triton, for every GPU that Triton serves, and for CPU
tensors under its interpreter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...emulator.switch import interpreter_is_on
from ...problem import Problem

if TYPE_CHECKING:
    from .launch import backward, captured_grads, forward, prepare, prepare_backward

NAME = "portable"
NEEDS_ALIGNMENT = False
MAX_HEADDIM = 512
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

LAUNCHES = ["backward", "captured_grads", "forward", "prepare", "prepare_backward"]

__all__ = ["NAME", "supports"]
__all__ += ["backward", "captured_grads", "forward", "prepare", "prepare_backward"]


def supports(problem: Problem, device: torch.device) -> str | None:
    """None, or why these kernels do not serve the problem."""
    if device.type == "cpu" and not interpreter_is_on():
        return (
            "its kernels run on GPUs; on CPU tensors only inside tilewise.testing.use_interpreter()"
        )
    if device.type not in ("cpu", "cuda"):
        return f"its kernels run on CUDA and ROCm GPUs, not on {device.type}"
    if problem.dtype not in DTYPES:
        return f"dtype {problem.dtype} has no kernel; cast to float16, bfloat16 or float32"
    widest = max(problem.headdim, problem.headdim_v)
    if widest > MAX_HEADDIM:
        return f"headdim {widest} is over {MAX_HEADDIM}, the widest tile that fits the registers"
    # Without Triton the ImportError is the reason
    from ..common.building import INTERPRETED, is_interpreted

    if device.type != "cpu" and is_interpreted():
        return INTERPRETED
    from . import launch  # noqa: F401

    return None


def __getattr__(name: str) -> Any:
    """Attributes of `launch`, imported lazily: CPU calls import no Triton."""
    if name not in LAUNCHES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import launch

    globals()[name] = getattr(launch, name)
    return globals()[name]
