"""Models that compute with their mask, or with keys that it does not know: right, or refused."""

import copy
import operator
import warnings

import pytest
import torch
from helpers.transformers_words import CACHE

transformers = pytest.importorskip("transformers")

from integrations.test_transformers import (  # noqa: E402
    SIZES,
    TOKENS,
    config_of,
    padded,
    pair,
    tokens,
)

from tilewise.integrations import transformers as integration  # noqa: E402
from tilewise.integrations.transformers.opaque import MaskError  # noqa: E402
from tilewise.integrations.transformers.visible import Band, Lengths, Visible  # noqa: E402

WAY_OUT = "attn_implementation='sdpa' or 'eager'"
HEADS = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"} | TOKENS
BART = TOKENS | dict(vocab_size=64, d_model=32, max_position_embeddings=128)
BART |= {
    f"{side}_{what}": size
    for side in ("encoder", "decoder")
    for what, size in dict(layers=2, attention_heads=4, ffn_dim=48).items()
}
GPT = dict(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, **TOKENS)
SMALL = HEADS | dict(embedding_size=32)
# Layers of every kind, and rates under which 12 tokens are compressed.
DEEPSEEK_V4 = dict(moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4)
DEEPSEEK_V4 |= dict(vocab_size=64, hidden_size=32, num_key_value_heads=1, head_dim=16)
DEEPSEEK_V4 |= dict(q_lora_rank=16, o_lora_rank=16, o_groups=2, n_routed_experts=4)
DEEPSEEK_V4 |= dict(num_experts_per_tok=2, sliding_window=5, index_n_heads=2, index_head_dim=8)
DEEPSEEK_V4 |= dict(index_topk=4, max_position_embeddings=64, num_nextn_predict_layers=0)
DEEPSEEK_V4 |= dict(compress_rate_csa=2, compress_rate_hca=4, **TOKENS)
DEEPSEEK_V4 |= dict(layer_types=["compressed_sparse_attention", "heavily_compressed_attention"])

CAUSAL = {
    "bloom": GPT,
    "codegen": dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, **TOKENS),
    "xglm": dict(vocab_size=64, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, **TOKENS),
    "trocr": BART | dict(is_decoder=True),
    "mvp": BART | dict(is_decoder=True),
    "bigbird_pegasus": BART | dict(attention_type="original_full", is_decoder=True),
    "gpt_neox_japanese": HEADS | dict(intermediate_multiple_size=2),
    "deepseek_v4": DEEPSEEK_V4,
    "mpt": dict(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
}
BOTH_WAYS = {
    "big_bird": HEADS | dict(attention_type="original_full"),
    "megatron-bert": HEADS,
    "rembert": HEADS | dict(input_embedding_size=32, output_embedding_size=32),
    "roformer": SMALL,
    "convbert": SMALL,
    "ibert": HEADS,
    "mpnet": HEADS,
    "squeezebert": SMALL
    | {f"{part}_groups": 2 for part in "q k v post_attention intermediate output".split()},
    "tapas": HEADS,
    "nystromformer": HEADS | dict(num_landmarks=2, segment_means_seq_len=12),
    "longformer": HEADS | dict(attention_window=4),
}
FAST = ("bloom", "xglm", "mpt", "nystromformer")  # by `+`, `.size`, `.to`, and without padding
EVERY = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
    for name in (*CAUSAL, *BOTH_WAYS)
]


def models(name):
    """Eager and tilewise with the same weights, of which none is 0."""
    causal = name in CAUSAL
    config = transformers.AutoConfig.for_model(name, **(CAUSAL if causal else BOTH_WAYS)[name])
    for field in vars(config):
        if "dropout" in field:
            setattr(config, field, 0.0)
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForMaskedLM
    eager, ours = pair(config, kind)
    torch.manual_seed(1)
    for weight in eager.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.05)
    ours.load_state_dict(eager.state_dict())
    return eager, ours


@pytest.mark.parametrize("name", EVERY)
def test_logits_or_the_sentence(name):
    """With a full mask, too, where transformers would let a flag say it."""
    eager, ours = models(name)
    ids = tokens()
    for padding in ("none", "left", "right"):
        mask = torch.ones_like(ids) if padding == "none" else padded(padding)
        if name == "nystromformer" and padding != "none":
            continue  # eager itself fails: its mask is as long as the keys, not the landmarks
        with torch.no_grad():
            expected = eager(ids, attention_mask=mask).logits
            try:
                got = ours(ids, attention_mask=mask).logits
            except NotImplementedError as refused:
                assert WAY_OUT in str(refused)
                continue
        real = mask.bool()
        torch.testing.assert_close(got[real], expected[real], atol=5e-5, rtol=1e-5)


def test_keys_that_the_mask_does_not_know_are_refused():
    """DeepSeek-V4 appends compressed keys in its layers, and widens no mask but a tensor."""
    _, ours = models("deepseek_v4")
    with pytest.raises(NotImplementedError, match="keys, and its mask is made for 12 and 12") as no:
        ours(tokens(), attention_mask=torch.ones(3, 12, dtype=torch.long))
    assert WAY_OUT in str(no.value)


USES = {
    "+": lambda m: m + 1,
    "radd": lambda m: torch.ones(2) + m,
    "-": lambda m: 1.0 - m,
    "*": lambda m: torch.ones(2) * m,
    "[]": lambda m: m[:, None],
    "[]=": lambda m: operator.setitem(m, 0, 1),
    "to": lambda m: m.to(torch.bool),
    "dtype": lambda m: m.dtype,
    "device": lambda m: m.device,
    "shape": lambda m: m.shape,
    "size": lambda m: m.size(-1),
    "dim": lambda m: m.dim(),
    "bool": lambda m: m.bool(),
    "if": bool,
    "~": lambda m: ~m,
    "==": lambda m: m == 0,
    "!=": lambda m: m != 0,
    "<": lambda m: m < 0,
    "tensor ==": lambda m: torch.ones(2) == m,
    "iter": lambda m: list(m),
    "unpack": lambda m: (*m,),
    "len": len,
    "in": lambda m: 1 in m,
    "float": float,
    "index": lambda m: [1, 2][m],
    "where": lambda m: torch.where(m, 1.0, 0.0),
    "cat": lambda m: torch.cat([torch.ones(2), m]),
    "pad": lambda m: torch.nn.functional.pad(m, (0, 1)),
    "sdpa": lambda m: torch.nn.functional.scaled_dot_product_attention(
        *torch.ones(3, 1, 1, 2, 2).unbind(), attn_mask=m
    ),
    "masked_fill": lambda m: torch.ones(2).masked_fill(m, 0),
    "index by it": lambda m: torch.ones(2)[m],
    "tensor": torch.as_tensor,
    "numpy": lambda m: m.numpy(),
}


@pytest.mark.parametrize("use", USES)
def test_a_mask_is_no_tensor(use):
    mask = Visible(Band(right=0), 0, Lengths(2, 2))
    with pytest.raises(NotImplementedError) as refused:
        USES[use](mask)
    assert isinstance(refused.value, MaskError) and WAY_OUT in str(refused.value)


def test_what_carries_a_mask_may_handle_it():
    """Copies, trees, hooks that ask whether it can be moved."""
    mask = Visible(Band(right=0), 0, Lengths(2, 2))
    assert not hasattr(mask, "to") and getattr(mask, "shape", None) is None
    assert mask.ndim == 4 and mask.contiguous() is mask
    assert copy.copy(mask).lengths == copy.deepcopy(mask).lengths == (2, 2)
    tree = {"attention_mask": mask, "x": torch.ones(1)}
    moved = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x + 1, tree)
    assert moved["attention_mask"] is mask and len({mask, mask}) == 1


def test_no_mask_is_never_none():
    from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

    _, ours = pair(config_of("llama"))
    x = torch.zeros(2, 5, 32)
    for make in (create_causal_mask, create_bidirectional_mask):
        mask = make(config=ours.config, inputs_embeds=x, attention_mask=None, **{CACHE: None})
        assert isinstance(mask, Visible) and mask.lengths == (5, 5)
    assert mask.band == (None, None)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(reentrant):
    eager, ours = pair(config_of("llama"))
    ids = tokens()
    for model in (eager, ours):
        model.train()
        with warnings.catch_warnings(action="ignore"):  # both names are new ones in later versions
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert model.is_gradient_checkpointing
        model(ids, labels=ids).loss.backward()
    for one, other in zip(eager.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-4)


def test_weights_of_attention_are_eagers_alone():
    _, ours = pair(config_of("llama"))
    with pytest.raises(NotImplementedError, match="attn_implementation='eager'$"):
        ours(tokens(), output_attentions=True)


def checked(kind, config, **how):
    integration.register()
    make = getattr(transformers, f"AutoModelFor{kind}")
    model = make.from_config(config, **({"attn_implementation": "tilewise"} | how))
    return integration.check(model)


def test_check_says_which_layers_reach_it():
    layers = checked("CausalLM", config_of("llama")).layers
    assert [layer.name for layer in layers] == [f"model.layers.{i}.self_attn" for i in range(2)]
    assert {(layer.kind, layer.attention) for layer in layers} == {("LlamaAttention", "tilewise")}
    bert = checked("MaskedLM", config_of("bert"))
    assert str(bert).startswith("2 BertSelfAttention: tilewise (it calls the attention")
    loaded = checked("CausalLM", config_of("llama"), attn_implementation="sdpa").layers
    assert {layer.attention for layer in loaded} == {"sdpa"}


XLNET = dict(vocab_size=64, d_model=32, n_layer=2, n_head=4, d_inner=48)
OWN = {
    "deberta": ("MaskedLM", HEADS, "own"),
    "xlnet": ("CausalLM", XLNET, "own"),
    "bloom": ("CausalLM", GPT, "refused"),
    "rwkv": ("CausalLM", dict(vocab_size=64, hidden_size=32, num_hidden_layers=2), "own"),
}


@pytest.mark.parametrize("name", OWN)
def test_check_says_which_have_their_own(name):
    kind, sizes, what = OWN[name]
    layers = checked(kind, transformers.AutoConfig.for_model(name, **sizes)).layers
    assert [layer.attention for layer in layers] == [what] * 2


def test_check_of_what_it_cannot_tell():
    class SomeAttention(torch.nn.Module):
        """It has no parameters: its parent may compute in its place."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = SomeAttention()

    (layer,) = integration.check(Model()).layers
    assert (layer.name, layer.attention) == ("attn", "unknown")
    assert str(integration.check(torch.nn.Linear(1, 1))) == "no attention modules found"
