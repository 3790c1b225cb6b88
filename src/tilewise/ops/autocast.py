"""Autocast: calls and the operator take q, k and v in its dtype."""

from __future__ import annotations

from typing import Any

import torch

from ..features import FLOATS
from .schema import FORWARD, LIBRARY

Tensor = torch.Tensor
CAST = FLOATS[:3]  # but fp64


def is_any_autocast_on() -> bool:
    """Whether autocast is on for some device."""
    return torch._C._is_any_autocast_enabled()


def autocast(q: Tensor, k: Any, v: Any, cache: Tensor | None = None) -> tuple[Tensor, Any, Any]:
    """q, k and v in the autocast dtype where autocast is on (fp64 stays, as in torch), and their
    cache, which is not cast, has that dtype.
    """
    device = q.device.type
    if device not in ("cpu", "cuda") and not torch.amp.is_autocast_available(device):
        return q, k, v  # torch raises where a device, meta among them, knows no autocast
    dtype = torch.get_autocast_dtype(device)
    if torch.is_autocast_enabled(device) and (cache is None or cache.dtype == dtype):
        q, k, v = (t.to(dtype) if getattr(t, "dtype", 0) in CAST else t for t in (q, k, v))
    return q, k, v


def cast_bias(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """A bias in the dtype of q where autocast is on and both have 16 bits; fp32 stays, as any
    q takes it.
    """
    halves = torch.float16, torch.bfloat16
    if not isinstance(bias, Tensor) or bias.dtype not in halves or q.dtype not in halves:
        return bias
    return bias.to(q.dtype) if torch.is_autocast_enabled(q.device.type) else bias


def _autocast_rule(key: str):
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
        torch._C.DispatchKey.AutocastCUDA
    )

    def forward(*args):
        arguments = dict(zip(FORWARD, args))
        q, k, v = autocast(arguments["q"], arguments["k"], v=arguments["v"])
        arguments |= {"q": q, "k": k, "v": v, "bias": cast_bias(arguments["bias"], q)}
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return torch.ops.tilewise.flash_attn_forward(**arguments)

    LIBRARY.impl("flash_attn_forward", forward, key)


_autocast_rule("AutocastCPU")
_autocast_rule("AutocastCUDA")
