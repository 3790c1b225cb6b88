"""transformers' Llama, its own weights, computed over a paged cache.

Norms, projections and MLPs are the model's modules. Attention is two calls a layer: `cache.append`
turns the new keys by their positions and writes them and the values to their pages, `attention`
reads the pages. Requests lie end to end, so a step that decodes some and prefills others is one
forward without padding.
"""

from __future__ import annotations

from typing import cast

import torch

from tilewise import attention, cache
from tilewise.tile.rotary import Rotary, rotate

from .batch import Batch

Tensor = torch.Tensor


class PagedLlama:
    """A LlamaForCausalLM and the cache of its layers."""

    def __init__(self, model, num_pages: int, page_size: int, split_size: int | None) -> None:
        config, weight = model.config, model.lm_head.weight
        self.model, self.split_size = model, split_size
        self.headdim = model.model.layers[0].self_attn.head_dim
        shape = num_pages, page_size, config.num_key_value_heads, self.headdim
        layers = range(config.num_hidden_layers)
        self.caches = [weight.new_empty(2, *shape).unbind(0) for _ in layers]
        positions = torch.arange(config.max_position_embeddings, device=weight.device)
        cos, sin = model.model.rotary_emb(weight, positions[None])  # each angle is there twice
        half = cos.shape[-1] // 2
        self.width = -(-config.max_position_embeddings // page_size)  # of a page table
        self.rotary = Rotary(cos[0, :, :half], sin[0, :, :half], interleaved=False)

    @torch.no_grad()
    def step(self, batch: Batch) -> Tensor:
        """Logits of the token after each chunk, (batch, vocabulary)."""
        model = self.model.model
        x = model.embed_tokens(batch.ids)
        for layer, kv in zip(model.layers, self.caches):
            x = x + self._attend(layer.self_attn, kv, layer.input_layernorm(x), batch)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        last = batch.cu_seqlens_q[1:] - 1
        return self.model.lm_head(model.norm(x[last]))

    def _attend(self, module, kv: tuple[Tensor, Tensor], x: Tensor, batch: Batch) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.headdim))  # (tokens, heads, headdim)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        table, used, starts = batch.page_table, batch.seqused_k, batch.cu_seqlens_q
        cache.append(
            *(*kv, k, v),
            rotary=self.rotary,
            page_table=table,
            seqused_k=used,
            cu_seqlens_q=starts,
        )
        out = attention(
            *(rotate(q, self.rotary, batch.positions), *kv),
            causal=True,
            scale=module.scaling,
            split_size=self.split_size,
            page_table=table,
            seqused_k=used,
            cu_seqlens_q=starts,
        )
        return module.o_proj(cast(Tensor, out).flatten(1))
