"""A tiny config of any model: sizes by the names of fields, layers of every kind that it has."""

from __future__ import annotations

import re

from transformers import PreTrainedConfig

VOCAB = 64
SPECIAL = 48  # token ids from here on mean something to some model: no input has them
IMAGE = 32

# The first pattern that matches a whole name decides. A number replaces a larger one only.
SIZES = [
    (r"pad_token_id|pad_index", 0),
    (r"bos_token_id|bos_index|decoder_start_token_id", 1),
    (r"eos_token_id|eos_index", 2),
    (r".*vocab_size.*|.*_vocab", VOCAB),
    (r"max_2d_position_embeddings", 1024),
    (r".*max_.*position.*|n_positions|n_ctx|max_seq_len|model_max_length", 128),
    (r"(min_|)sliding_window|local_attention|attention_chunk_size|.*sliding_window_size", 5),
    (r".*window_size|attention_window", 4),
    (r"image_size|pretrain_image_size", IMAGE),
    (r"patch_size", 8),
    (r".*(key_value_heads|kv_heads)|kv_n_heads|num_global_key_value_heads", 2),
    (r".*attention_heads|.*_heads|n_head|heads|num_heads", 4),
    (r".*(num_hidden_layers|num_layers|n_layers?|_layers|depth)|layers", 2),
    (r"qk_head_dim", 16),
    (r"mamba_(head_dim|d_head)", 16),
    (r".*head_dim|d_kv|head_size|d_head|kv_channels|dim_head|attention_head_size", 8),
    (r".*rotary_dim", 4),
    (r"n_groups?|num_expert_group|topk_group|num_groups", 1),
    (r".*lora_rank|.*_rank", 16),
    (r".*(experts_per_tok|experts_per_token|topk|top_k|moe_k)", 2),
    (r".*(num_|n_)(.*_|)experts|n_routed_experts|moe_num_experts", 4),
    (r".*(intermediate|ffn|ff|inner|feed_forward|mlp).*(size|dim|ff)|n_inner|d_ff|dff", 48),
    (r"state_size|ssm_state_size|mamba_d_state|d_state", 8),
    (r".*chunk_size", 8),
    (r".*(hidden_size|d_model|n_embd|embed_dim|emb_dim|hidden_dim|embedding_size).*|dim", 32),
    (r".*projection_dim|.*proj_dim|.*embedding_dim|lru_width|.*output_dim|.*input_dim", 32),
    (r"linear_.*_dim", 8),
]
NOT_SIZES = r"num_labels|num_channels|type_vocab_size|.*_factor|hidden_size_multiplier"
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
MOST_LAYERS = 4
NO_NOISE = r".*(dropout|drop_path|drop_rate|pdrop|jitter|layerdrop|_dropout_prob|noise).*"


def shrunk(config: PreTrainedConfig, changed: dict | None = None) -> PreTrainedConfig:
    """The same kind of config, tiny; `changed` fields have the last word."""
    return type(config)(**_fields(config, changed or {}))


def _fields(config: PreTrainedConfig, changed: dict) -> dict:
    """Arguments of the config's class that make it tiny."""
    usual = vars(PreTrainedConfig())
    fields: dict = {}
    layers = _layers_of(config)
    kept = _kept_layers(config, layers)
    for name, value in vars(config).items():
        if name.startswith("_") or (name in usual and not name.endswith("_token_id")):
            continue
        if isinstance(value, PreTrainedConfig):
            fields[name] = _fields(value, changed.get(name, {})) | dict(model_type=value.model_type)
        elif name == "head_dim" and value is None:
            fields[name] = 8
        elif name in LAYERS and isinstance(value, int):
            fields[name] = min(value, len(kept))
        elif isinstance(value, (list, tuple)) and len(value) == layers:
            fields[name] = type(value)(value[i] for i in kept)
        else:
            new = _tiny(name, value)
            if new is not value:
                fields[name] = new
    own = {name: value for name, value in changed.items() if not _is_part(config, name, value)}
    heads = config.num_attention_heads if hasattr(config, "num_attention_heads") else None
    if heads and getattr(config, "num_key_value_heads", None) == heads:
        fields["num_key_value_heads"] = fields.get("num_attention_heads", heads)
    return _special_tokens(fields, config) | own


def _is_part(config: PreTrainedConfig, name: str, value) -> bool:
    """Whether changes are those of a config within."""
    of_part = isinstance(getattr(config, name, None), PreTrainedConfig)
    return of_part and isinstance(value, dict) and "model_type" not in value


def _tiny(name: str, value):
    """A smaller value for a field, or the very same one."""
    if isinstance(value, (list, tuple)) and name.endswith("size") and value:
        return type(value)(_tiny(name, one) for one in value)
    if isinstance(value, float) and re.fullmatch(NO_NOISE, name):
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int) or re.fullmatch(NOT_SIZES, name):
        return value
    for pattern, size in SIZES:
        if re.fullmatch(pattern, name):
            return size if value > size or name.endswith("token_id") else value
    return value


def _layers_of(config: PreTrainedConfig) -> int:
    return next((n for name in LAYERS if isinstance(n := getattr(config, name, None), int)), 0)


def _kept_layers(config: PreTrainedConfig, layers: int) -> list[int]:
    """The first layer of each kind, two at least."""
    lists = [x for x in vars(config).values() if isinstance(x, (list, tuple)) and len(x) == layers]
    kinds = [str([x[i] for x in lists]) for i in range(layers)]
    first = [i for i in range(layers) if kinds[i] not in kinds[:i]][:MOST_LAYERS]
    return sorted([*first, *(i for i in range(layers) if i not in first)][: max(2, len(first))])


def _special_tokens(fields: dict, config: PreTrainedConfig) -> dict:
    """Ids of images, sounds and so on lie in the vocabulary, and no input has them."""
    told = SPECIAL
    for name, value in vars(config).items():
        known = re.fullmatch(SIZES[0][0] + "|" + SIZES[1][0] + "|" + SIZES[2][0], name)
        if re.fullmatch(r".*token_(id|index)", name) and isinstance(value, int) and not known:
            fields[name] = told
            told = min(told + 1, VOCAB - 1)
    return fields
