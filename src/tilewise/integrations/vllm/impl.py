"""The calls of one attention layer of vLLM: its new keys go to the cache, then its queries attend.

A cache is (num_blocks, nheads_k, block_size, content) with any strides, K and V side by side in the
last dimension; where rows have scales, each of them is followed by 4 bytes, its scale.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from ...frontend.invariance import batch_invariant
from ..engines import Layer
from .metadata import TilewiseMetadata
from .shards import attend_shards

Tensor = torch.Tensor
SCALE_BYTES = 4
PLAIN = "auto", "float16", "bfloat16"
# vLLM's names of caches of 8 bits, and what their bytes are
STORED = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_per_token_head": torch.float8_e4m3fn,
    "int8_per_token_head": torch.int8,
}
ENCODERS = AttentionType.ENCODER, AttentionType.ENCODER_ONLY


def wrong_dtype(kv_cache_dtype: str | None, dtype: torch.dtype) -> str | None:
    """Why a model of `dtype` has no plain cache of another one, or None."""
    if kv_cache_dtype not in PLAIN[1:] or getattr(torch, kv_cache_dtype) is dtype:
        return None
    return (
        f"a cache of {kv_cache_dtype} with a model of {dtype}: tilewise's plain caches have the "
        "model's dtype, so leave out --kv-cache-dtype"
    )


class TilewiseImpl(AttentionImpl[Any]):
    """A layer: its scores are known when it is made, its cache and scales when it is called."""

    can_return_lse_for_decode = supports_dcp = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        is_plain = kv_cache_dtype in PLAIN
        if not is_plain and kv_cache_dtype not in STORED:
            raise NotImplementedError(
                f"tilewise does not support --kv-cache-dtype {kv_cache_dtype}: pass auto or one of "
                f"{', '.join(STORED)}"
            )
        if reason := wrong_dtype(kv_cache_dtype, torch.get_default_dtype()):  # the model's
            raise NotImplementedError(reason)
        self.is_encoder = attn_type in ENCODERS
        if self.is_encoder and not is_plain:
            raise NotImplementedError(
                f"--kv-cache-dtype {kv_cache_dtype} with an encoder, which has no cache: leave it "
                "out"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.stored = STORED.get(kv_cache_dtype)
        self.has_row_scales = kv_cache_dtype.endswith("per_token_head")
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        left = None if sliding_window is None else sliding_window - 1  # vLLM counts the query's own
        scores: dict[str, Any] = dict(scale=self.scale, softcap=logits_soft_cap or None)
        scores |= dict(alibi_slopes=slopes, sinks=sinks)
        scores["window"] = None if left is None else (left, left if self.is_encoder else 0)
        # Batches of a decoder may be either, those of the other kinds of layers are not causal
        self.layers = {causal: Layer(**scores, causal=causal) for causal in (False, True)}
        self._cache: Tensor | None = None  # of which there are views
        self._views: tuple[Tensor, Tensor] = ()  # pyright: ignore[reportAttributeAccessIssue]
        if envs.VLLM_BATCH_INVARIANT:
            batch_invariant()
        if self.dcp_world_size > 1 and not (left is slopes is sinks is None):
            raise NotImplementedError(
                "tilewise does not support windows, ALiBi and sinks with "
                "--decode-context-parallel-size: leave that out, and use tensor parallelism"
            )

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes new keys and values; there are more than slots where a graph is padded."""
        if self.is_encoder:
            return
        tokens = slot_mapping.shape[0]
        if key.shape[0] != tokens:
            key, value = key[:tokens], value[:tokens]
        k_cache, v_cache = self._sides(kv_cache)
        ours = self._scaled(layer, causal=True)
        ours.append(key, value, k_cache=k_cache, v_cache=v_cache, slots=slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TilewiseMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of all queries of a step, written to `output`; padded rows stay as they are."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "tilewise does not quantise its output: turn off vLLM's fuse_attn_quant"
            )
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        if self.is_encoder:
            encode = self.layers[False].attend_within
            return output.copy_(encode(query, key, v=value, step=attn_metadata))
        is_causal = attn_metadata.causal and self.attn_type == AttentionType.DECODER
        k_cache, v_cache = self._sides(kv_cache)
        if attn_metadata.context is not None:
            self._scaled(layer, causal=False)
            new: dict[str, Any] = dict(key=key, value=value, step=attn_metadata)
            out = attend_shards(self.layers, query, **new, k_cache=k_cache, v_cache=v_cache)
            return output.copy_(out)
        ours = self._scaled(layer, causal=is_causal)
        ours.attend(query, attn_metadata, k_cache=k_cache, v_cache=v_cache, out=output)
        return output

    def _scaled(self, layer: Any, causal: bool) -> Layer:
        """Our layer, with the scales of vLLM's, which a new checkpoint may change."""
        ours = self.layers[causal]
        if self.stored is not None and not self.has_row_scales:
            scales = layer._k_scale, layer._v_scale
            # Checkpoints of llm-compressor have one in a row of its own
            k_scale, v_scale = (x.view(()) if x.shape == (1,) else x for x in scales)
            ours.descales = dict(k_descale=k_scale, v_descale=v_scale)
        return ours

    def _sides(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of a cache, (num_blocks, block_size, nheads_k, headdim) each. The scales of rows
        are views, too.
        """
        if kv_cache is self._cache:
            return self._views
        rows = kv_cache.transpose(1, 2)
        rows = rows if self.stored is None else rows.view(self.stored)
        behind = SCALE_BYTES if self.has_row_scales else 0
        start = self.head_size + behind  # of V
        end = rows.shape[-1] - behind
        if behind:
            k_descale, v_descale = (
                rows[..., n : n + behind].view(torch.float32).squeeze(-1)
                for n in (self.head_size, end)
            )
            for ours in self.layers.values():
                ours.descales = dict(k_descale=k_descale, v_descale=v_descale)
        self._cache, self._views = kv_cache, (rows[..., : self.head_size], rows[..., start:end])
        return self._views
