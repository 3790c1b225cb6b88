"""Exact attention for PyTorch, computed tile by tile, every kernel written in Python."""

from . import cache as cache
from . import mods as mods
from .api import attention
from .errors import ArgumentError, PerformanceWarning
from .faces import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .flex import flex_attention
from .integrations.torch_sdpa import disable_sdpa, enable_sdpa
from .kv_cache import flash_attn_combine, flash_attn_with_kvcache
from .reference import attention_reference, merge_states
from .sdpa import scaled_dot_product_attention

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "PerformanceWarning",
    "attention",
    "attention_reference",
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
    "scaled_dot_product_attention",
]
