"""Fields that the names of sizes do not tell, by the type of model."""

HIERARCHY = dict(embed_dim=32, depths=[1, 2], num_heads=[2, 4], window_size=4, patch_size=4)
HIERARCHY |= dict(encoder_stride=4)
BACKBONE = dict(model_type="resnet", depths=[1] * 4, hidden_sizes=[8, 8, 16, 16])
BACKBONE |= dict(embedding_size=8, layer_type="basic", out_features=["stage4"])
DETR = dict(backbone_config=BACKBONE, backbone=None, use_timm_backbone=False, num_queries=6)
LEVELS = DETR | dict(backbone_config=BACKBONE | dict(out_features=["stage2", "stage3", "stage4"]))
ROPE = dict(rope_type="default", rope_theta=1e4)
HYBRID = dict(attention_hidden_size=64, attention_head_dim=16)
PERCEIVER = dict(num_latents=8, d_latents=32, num_self_attends_per_block=1, d_model=32)

CHANGES: dict[str, dict] = {
    "bamba": dict(mamba_n_heads=4, attn_layer_indices=[1]),
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(sliding_attention=ROPE, full_attention=ROPE),
    ),
    "conditional_detr": DETR,
    "dab-detr": DETR,
    "dbrx": dict(attn_config=dict(rope_theta=1e4, clip_qkv=8.0)),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "deformable_detr": LEVELS,
    "detr": DETR,
    "donut-swin": HIERARCHY,
    "dots1": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
    "dots3_note_text": dict(num_key_value_heads=4),
    "encoder-decoder": dict(decoder=dict(is_decoder=True, add_cross_attention=True)),
    "esm": dict(vocab_size=64, pad_token_id=0, mask_token_id=50),
    "esmc": dict(num_key_value_heads=4),
    "granitemoehybrid": dict(mamba_n_heads=4, layer_types=["linear_attention", "full_attention"]),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "mamba2": dict(num_heads=8, head_dim=8, n_groups=1),
    "mobilebert": dict(true_hidden_size=32, intra_bottleneck_size=32, initializer_range=0.1),
    "mobilevitv2": dict(image_size=64),
    "musicgen_decoder": dict(num_codebooks=1),
    "musicgen_melody_decoder": dict(num_codebooks=1),
    "nemotron": dict(num_key_value_heads=2),
    "neomme": dict(head_dim=16),
    "perceiver": PERCEIVER,
    "qwen4_exp_text": dict(
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=8,
        indexer_compress_ratio=2,
    ),
    "recurrent_gemma": dict(num_hidden_layers=3),
    "reformer": dict(axial_pos_embds=False, attn_layers=["local", "lsh"]),
    "swin": HIERARCHY,
    "swin2sr": HIERARCHY | dict(patch_size=1),
    "swinv2": HIERARCHY | dict(pretrained_window_sizes=[0, 0]),
    "table-transformer": DETR,
    "vibevoice_asr": dict(acoustic_tokenizer_chunk_size=3200),
    "xlstm": dict(chunk_size=16),
    "xmod": dict(default_language="en_XX"),
    "zamba": HYBRID
    | dict(num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2),
    "zamba2": HYBRID,
}
