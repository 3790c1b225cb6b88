"""flash-attn 2's functions as drop-in replacements, argument for argument. Each translates its
convention into a call of `tilewise.attention`.
"""

from .frontend.flash_attn import flash_attn_func, flash_attn_varlen_func
from .frontend.flash_attn_packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .frontend.flex import flex_attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flex_attention",
]
