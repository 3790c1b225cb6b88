"""Exact attention for PyTorch, computed tile by tile, every kernel written in Python."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from . import cache as cache
from . import faces as faces
from . import mods as mods
from . import scores as scores
from . import sparse as sparse
from .errors import ArgumentError, PerformanceWarning
from .faces import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .frontend.attention import attention
from .frontend.combine import flash_attn_combine
from .frontend.flex import flex_attention
from .frontend.invariance import batch_invariant
from .frontend.kv_cache import flash_attn_with_kvcache
from .frontend.quantize import Quantized, quantize
from .frontend.sdpa import scaled_dot_product_attention
from .integrations.torch_sdpa import disable_sdpa, enable_sdpa
from .reference import attention_reference, merge_states

if TYPE_CHECKING:
    from . import bert_padding as bert_padding
    from . import distributed as distributed
    from . import testing as testing

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "PerformanceWarning",
    "Quantized",
    "attention",
    "attention_reference",
    "batch_invariant",
    "disable_sdpa",
    "enable_sdpa",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flex_attention",
    "merge_states",
    "quantize",
    "scaled_dot_product_attention",
]


_ON_FIRST_USE = ("bert_padding", "distributed", "testing")


def __getattr__(name: str) -> ModuleType:
    if name in _ON_FIRST_USE:
        return importlib.import_module(f"{__name__}.{name}")
    reason = f"module {__name__!r} has no attribute {name!r}"
    if name == "bench":
        reason += ": it is benchmarks.bench in a clone of the repository"
    raise AttributeError(reason)
