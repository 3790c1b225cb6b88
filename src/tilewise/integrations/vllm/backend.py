"""What vLLM asks a backend before it makes a layer: which arguments tilewise supports.

vLLM refuses the others with its own message. On CPUs it does not ask, so that the layers and the
builder of metadata refuse them, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import vllm
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.kv_cache_layout import KVCacheLayout

from .impl import PLAIN, SCALE_BYTES, STORED, TilewiseImpl, wrong_dtype
from .metadata import TilewiseBuilder

VERSIONS = "0.31", "0.32", "0.33"  # what tests/engines has read or run
MAX_HEADDIM, MAX_HOPPER = 512, 256


def wrong_version(version: str = vllm.__version__) -> str | None:
    """Why tilewise does not serve this vLLM, or None."""
    if ".".join(version.split(".")[:2]) in VERSIONS:
        return None
    return (
        f"tilewise serves vLLM {VERSIONS[0]} to {VERSIONS[-1]} and this is {version}: install one "
        "of those, or a newer tilewise"
    )


class TilewiseBackend(AttentionBackend):
    """tilewise's attention over vLLM's paged cache."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[Any] = [*PLAIN, *STORED]

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enum that is always there."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TilewiseImpl]:
        if reason := wrong_version():  # on CPUs vLLM asks nothing else
            raise NotImplementedError(reason)
        return TilewiseImpl

    @staticmethod
    def get_builder_cls() -> type[TilewiseBuilder]:
        return TilewiseBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """All, as strides are arguments; first the one that keeps a token's heads together."""
        first = KVCacheLayout.LBNHC
        return first, *(layout for layout in KVCacheLayout if layout is not first)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Room for the scales of rows, behind the bytes of K and of V."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
            return spec
        content = spec.head_size + spec.head_size_v + 2 * SCALE_BYTES
        return replace(spec, state_content_bytes=content)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 0 < head_size <= MAX_HEADDIM

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in set(AttentionType)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Prefill, chunks and decoding have the same bits on Hopper and on a CPU."""
        capability = current_platform.get_device_capability()
        return current_platform.is_cpu() or (capability is not None and capability.major == 9)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **rest: Any
    ) -> str | None:
        """Why not these together, or this version of vLLM; the other arguments say nothing more."""
        if reason := wrong_version() or wrong_dtype(kv_cache_dtype, dtype):
            return reason
        unit = 16 if kv_cache_dtype in STORED else 8
        is_plain = dtype.itemsize == 2 and head_size <= MAX_HOPPER and head_size % unit == 0
        if envs.VLLM_BATCH_INVARIANT and not (is_plain or current_platform.is_cpu()):
            return (
                "batch invariance is what Hopper's kernels promise: 16-bit models, head sizes up "
                f"to {MAX_HOPPER} that are multiples of {unit}"
            )
        return None
