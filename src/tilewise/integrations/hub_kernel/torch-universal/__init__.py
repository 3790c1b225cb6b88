"""tilewise as a kernel of the `kernels` library: flash-attn's functions, of the package."""

from tilewise import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
