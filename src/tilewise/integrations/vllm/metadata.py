"""The tensors of a step, as vLLM's model runner hands them over. Nothing is read or copied here, so
the metadata of a captured graph is right for every batch that the graph replays.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from ..engines import Step
from .shards import ContextLengths

Tensor = torch.Tensor
OTHERS = "serve this model with --attention-backend TRITON_ATTN"
# Fields of vLLM's metadata that ask for another mask
MASKS = {
    "mm_req_doc_ranges": "image tokens that attend to later ones (PrefixLM)",
    "rswa_prefix_lens": "reference sliding windows (R-SWA)",
}


class TilewiseMetadata(Step):
    """A step, and what a layer needs to know of it besides."""

    def __init__(self, common: CommonAttentionMetadata) -> None:
        for name, mask in MASKS.items():
            if getattr(common, name, None) is not None:
                raise NotImplementedError(f"tilewise does not support {mask}: {OTHERS}")
        if isinstance(common.causal, Tensor):
            raise NotImplementedError(
                "tilewise does not support batches in which some requests are causal and some are "
                f"not: {OTHERS}"
            )
        super().__init__(
            common.query_start_loc,
            seqused_k=common.seq_lens,
            page_table=common.block_table_tensor,
            max_seqlen_q=common.max_query_len,
        )
        self.causal = common.causal
        self.num_actual_tokens = common.num_actual_tokens
        self.slot_mapping = common.slot_mapping
        self.context: Step | None = None  # where ranks have parts of the keys


class TilewiseBuilder(AttentionMetadataBuilder[Any]):
    """Makes the metadata of a group of layers."""

    _cudagraph_support: ClassVar = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.lengths = None
        if getattr(kv_cache_spec, "dcp_sharded", False):
            if vllm_config.parallel_config.decode_context_parallel_size > 1:
                self.lengths = ContextLengths(vllm_config, device)
                self.supports_draft_decode_metadata_update = False

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TilewiseMetadata:
        metadata = TilewiseMetadata(common_attn_metadata)
        if self.lengths is not None:
            metadata.context = self.lengths.of(metadata)
        return metadata

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> TilewiseMetadata:
        """Metadata of a graph. vLLM gives the bound of all batches that it will replay for: the
        queries of a decode, or all tokens.
        """
        common_attn_metadata.seq_lens.fill_(1)  # the longest would make the capture slow
        return self.build(0, common_attn_metadata)

    def update_block_table(
        self, metadata: TilewiseMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> TilewiseMetadata:
        updated = copy.copy(metadata)
        updated.page_table, updated.slot_mapping = blk_table, slot_mapping
        if updated.context is not None:
            updated.context = copy.copy(updated.context)
            updated.context.page_table = blk_table
        return updated

    def update_draft_decode_metadata(self, metadata: TilewiseMetadata) -> None:
        """Nothing: the tensors are vLLM's own, which it has updated."""
