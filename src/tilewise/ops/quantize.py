"""Which module quantises: plain torch on every device, and what a compiler traces."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ..kernels.cpu import quantize as plain

# By device type, the module with kernels for `quantize` and `transposed_values`
QUANTIZERS: dict[str, str] = {}


def quantizer_for(x: torch.Tensor) -> Any:
    """The module with `quantize` and `transposed_values` for a tensor."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return plain
    name = QUANTIZERS.get(x.device.type)
    return plain if name is None else importlib.import_module(name)
