"""Models that pick their attention from a table of their own classes, by the name of the attention.

transformers' registry is not asked there, so that another name is a KeyError. Of Falcon, GPT-J,
GPT-Neo and Data2VecVision the tables get a class that calls tilewise: their weights, another
computation. Of the others they get one that says what to do.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import Any

import torch
from transformers.models.data2vec import modeling_data2vec_vision as data2vec
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.gpt_neo import modeling_gpt_neo as gpt_neo
from transformers.models.gptj import modeling_gptj as gptj

from .forward import attention_forward, refuse
from .opaque import ANOTHER
from .visible import Band, Lengths, Visible

Tensor = torch.Tensor
OTHERS = {  # modules, and what their tables are called before _ATTENTION_CLASSES
    "bark.modeling_bark": "BARK",
    "deepseek_ocr2.modeling_deepseek_ocr2": "DEEPSEEK_OCR2_SAM_VISION",
    "git.modeling_git": "GIT_SELF",
    "sam.modeling_sam": "SAM_VISION",
    "sam_hq.modeling_sam_hq": "SAM_HQ_VISION",
    "superglue.modeling_superglue": "SUPERGLUE_SELF",
    "unlimited_ocr.modeling_unlimited_ocr": "UNLIMITED_OCR_SAM_VISION",
}


def fill_tables(name: str) -> None:
    """Enters tilewise under this name in the tables of classes."""
    for module, table, attention_class in (
        (falcon, "FALCON", FalconAttention),
        (gptj, "GPTJ", GPTJAttention),  # from transformers 5.24 on it asks the registry
        (gpt_neo, "GPT_NEO", GPTNeoSelfAttention),
        (data2vec, "DATA2VEC_VISION_SELF", Data2VecVisionSelfAttention),
    ):
        _table_of(module, table)[name] = attention_class
    for path, table in OTHERS.items():
        try:
            module = importlib.import_module(f"transformers.models.{path}")
        except ImportError:  # another version of transformers
            continue
        _table_of(module, table)[name] = _refusing(path)


def _table_of(module: Any, name: str) -> dict[str, Any]:
    """A module's table; one that nothing reads where the module asks transformers' registry."""
    return getattr(module, f"{name}_ATTENTION_CLASSES", {})


def _refusing(path: str):
    family = path.partition(".")[0]

    def make(*args, **kwargs):
        raise NotImplementedError(
            f"{family}: this model picks its attention from a table of its own classes, and none "
            f"of them calls tilewise: {ANOTHER} (for the part of a larger model by the name of its "
            "config: attn_implementation={'': 'tilewise', 'vision_config': 'eager'})"
        )

    return make


class FalconAttention(falcon.FalconAttention):
    """Falcon's attention without ALiBi, which the model adds to the mask itself."""

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor | Visible | None,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        if alibi is not None or position_embeddings is None:
            raise NotImplementedError(f"alibi: this model adds it to the mask itself; {ANOTHER}")
        parts = self._split_heads(self.query_key_value(hidden_states))
        q, k, v = (x.transpose(1, 2) for x in parts)
        cos, sin = position_embeddings
        q, k = falcon.apply_rotary_pos_emb(q, k, cos, sin)
        if layer_past is not None:
            k, v = layer_past.update(k, v, self.layer_idx)
        kwargs.update(position_ids=position_ids, output_attentions=output_attentions)
        out, _ = attention_forward(self, q, key=k, value=v, attention_mask=attention_mask, **kwargs)
        return self.dense(out.flatten(2)), None


class WithoutWeights(torch.nn.Module):
    """A `forward` that refuses to return attention weights."""

    def forward(self, *args, output_attentions: bool | None = False, **kwargs):
        refuse(dict(output_attentions=output_attentions))
        return super().forward(*args, **kwargs)


class GPTJAttention(WithoutWeights, gptj.GPTJAttention):
    """GPT-J's `forward`, with another product of q, k and v; before transformers 5.24."""

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None):
        layer: Any = self  # which has other members from 5.24 on
        dropout, scale = layer.attn_dropout.p if self.training else 0.0, 1 / layer.scale_attn
        out, _ = attention_forward(
            self, query, key, value, attention_mask, dropout=dropout, scaling=scale
        )
        return out.transpose(1, 2), None


class GPTNeoSelfAttention(WithoutWeights, gpt_neo.GPTNeoSelfAttention):
    """Its `forward`, with another product of q, k and v. Scores are not scaled, and each layer has
    a band of its own, of which the mask need not know.
    """

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask=None):
        is_local = self.attention_type == "local"
        lengths = Lengths(query.shape[2], key.shape[2])
        band = Band(self.config.window_size - 1 if is_local else None, 0)
        visible = Visible(band, lengths.keys - lengths.queries, lengths)
        bias = None
        if isinstance(attention_mask, Visible):
            visible = dataclasses.replace(attention_mask, band=visible.band)
        elif attention_mask is not None and attention_mask.dtype == torch.bool:
            visible = dataclasses.replace(visible, mask=attention_mask)
        else:
            bias = attention_mask
        dropout = self.attn_dropout.p if self.training else 0.0
        out, _ = attention_forward(
            self, query, key, value, visible, dropout=dropout, scaling=1.0, position_bias=bias
        )
        return out.transpose(1, 2), None


class Data2VecVisionSelfAttention(data2vec.Data2VecVisionSelfAttention):
    """Data2Vec's attention: biases of relative positions are added to the scores."""

    def forward(
        self,
        hidden_states: Tensor,
        output_attentions: bool = False,
        relative_position_bias: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, ...] | None = None,
    ) -> tuple[Tensor]:
        split = (*hidden_states.shape[:-1], -1, self.attention_head_size)
        projected = (f(hidden_states) for f in (self.query, self.key, self.value))
        q, k, v = (x.view(split).transpose(1, 2) for x in projected)
        bias = relative_position_bias
        if self.has_relative_position_bias:
            patch: Any = self.config.patch_size  # in these models a number
            window = tuple(size // patch for size in resolution or ())
            table_bias = self.relative_position_bias(
                window, interpolate_pos_encoding, dim_size=hidden_states.shape[1]
            )
            bias = table_bias if bias is None else table_bias + bias
        out, _ = attention_forward(
            self,
            q,
            key=k,
            value=v,
            attention_mask=None,
            dropout=self.dropout.p if self.training else 0.0,
            scaling=1 / math.sqrt(self.attention_head_size),
            is_causal=False,
            position_bias=bias,
            output_attentions=output_attentions,
        )
        return (out.flatten(2),)
