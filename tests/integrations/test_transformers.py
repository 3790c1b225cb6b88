"""Tiny random models, with tilewise and with eager attention: same logits, same tokens."""

import copy

import pytest
import torch
from helpers.transformers_words import CACHE

transformers = pytest.importorskip("transformers")

import tilewise  # noqa: E402
from tilewise import ArgumentError  # noqa: E402
from tilewise.integrations import transformers as integration  # noqa: E402
from tilewise.integrations.transformers.visible import Band, Lengths, Visible  # noqa: E402

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


def config_of(name):
    make = transformers.AutoConfig.for_model
    if name == "llama":
        return make("llama", **SIZES, **TOKENS)
    if name == "mistral":
        return make("mistral", **SIZES, **TOKENS, sliding_window=5)
    if name == "gemma2":
        capped = dict(head_dim=8, sliding_window=5, attn_logit_softcapping=2.0)
        return make("gemma2", **SIZES, **TOKENS, **capped, query_pre_attn_scalar=8)
    if name == "gpt_oss":
        experts = dict(num_local_experts=2, num_experts_per_tok=1, head_dim=8, sliding_window=5)
        return make("gpt_oss", **SIZES, **TOKENS, **experts)
    if name == "gpt2":
        sizes = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        return make("gpt2", **sizes, **TOKENS, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    if name == "modernbert":
        sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
        return make("modernbert", **sizes, **TOKENS, local_attention=6)
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    return make("bert", **sizes, pad_token_id=0)


def pair(config, kind=None):
    """One set of weights, twice: eager and tilewise. The config is copied, as models share it."""
    integration.register()
    kind = kind or transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    eager = kind.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = kind.from_config(copy.deepcopy(config), attn_implementation="tilewise").eval()
    ours.load_state_dict(eager.state_dict())
    for name, weight in eager.named_parameters():  # sinks are born as zeros or as garbage
        if "sink" in name:
            torch.nn.init.normal_(weight)
            ours.get_parameter(name).data.copy_(weight.data)
    assert eager.config._attn_implementation == "eager"
    return eager, ours


def tokens(batch=3, seqlen=12):
    return torch.randint(3, 64, (batch, seqlen))


def padded(side, lengths=(12, 7, 4), seqlen=12):
    mask = torch.zeros(len(lengths), seqlen, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    return mask if side == "right" else mask.flip(1)


DECODERS = ["llama", "mistral", "gemma2", "gpt_oss", "gpt2"]


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoder_logits(name, padding):
    eager, ours = pair(config_of(name))
    ids = tokens()
    mask = torch.ones_like(ids) if padding == "none" else padded(padding)
    with torch.no_grad():
        expected = eager(ids, attention_mask=mask).logits
        got = ours(ids, attention_mask=mask).logits
    real = mask.bool()
    torch.testing.assert_close(got[real], expected[real], atol=1e-5, rtol=1e-5)


def test_a_call_a_row_says_so(monkeypatch):
    monkeypatch.setattr(tilewise.errors, "_said", set())
    _, ours = pair(config_of("llama"))
    with torch.no_grad(), pytest.warns(tilewise.PerformanceWarning, match="once per row") as said:
        ours(tokens(), attention_mask=padded("left"))
        ours(tokens(), attention_mask=padded("right"))
    assert len(said) == 1


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_generates_the_same_tokens(name, padding, cache):
    eager, ours = pair(config_of(name))
    ids = tokens()
    mask = torch.ones_like(ids) if padding == "none" else padded(padding)
    how = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
    expected = eager.generate(ids, **how)
    assert torch.equal(ours.generate(ids, **how, cache_implementation=cache), expected)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_static_cache_logits(name):
    """Slots that are not written yet are no keys, in the prompt and in each step after it."""
    eager, ours = pair(config_of(name))
    ids = tokens(batch=2)
    cache = transformers.StaticCache(config=ours.config, max_cache_len=32)
    with torch.no_grad():
        expected = eager(ids).logits
        first = ours(ids[:, :7], **{CACHE: cache}, use_cache=True).logits
        rest = [
            ours(ids[:, i : i + 1], **{CACHE: cache}, use_cache=True).logits
            for i in range(7, ids.shape[1])
        ]
    got = torch.cat([first, *rest], 1)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_encoder_states(name, side):
    eager, ours = pair(config_of(name), transformers.AutoModel)
    ids, mask = tokens(), padded(side)
    with torch.no_grad():
        expected = eager(ids, attention_mask=mask).last_hidden_state
        got = ours(ids, attention_mask=mask).last_hidden_state
    real = mask.bool()
    torch.testing.assert_close(got[real], expected[real], atol=1e-5, rtol=1e-5)


def test_vision():
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
    )
    eager, ours = pair(config, transformers.AutoModel)
    image = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected, got = eager(image).last_hidden_state, ours(image).last_hidden_state
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_gradients():
    eager, ours = pair(config_of("gpt_oss"))
    ids = tokens()
    for model in (eager, ours):
        model.train()
        model(ids, labels=ids).loss.backward()
    for (name, one), other in zip(eager.named_parameters(), ours.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_dropout_is_drawn_in_training_alone():
    config = config_of("llama")
    config.attention_dropout = 0.5
    _, ours = pair(config)
    ids = tokens()
    assert torch.equal(ours(ids).logits, ours(ids).logits)
    ours.train()
    assert not torch.equal(ours(ids).logits, ours(ids).logits)


def test_unknown_arguments_are_refused_by_name():
    module = torch.nn.Module()
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="block_indices"):
        integration.attention_forward(module, x, x, x, None, block_indices=torch.zeros(1))


def test_which_logits_are_kept_says_nothing_of_attention():
    x = torch.randn(1, 2, 4, 8)
    expected, _ = integration.attention_forward(torch.nn.Module(), x, x, x, None)
    got, _ = integration.attention_forward(torch.nn.Module(), x, x, x, None, logits_to_keep=1)
    assert torch.equal(got, expected)


def test_windows_of_a_layer_and_its_mask():
    """On both sides a window counts the keys of one side; else it counts the query's own, too."""
    x, module = torch.randn(1, 2, 9, 8), torch.nn.Module()
    for band in ((4, 4), (3, 0)):
        mask = Visible(Band._make(band), 0, Lengths(9, 9))
        got, _ = integration.attention_forward(module, x, x, x, mask, sliding_window=4)
        assert torch.equal(got, tilewise.attention(*[x.transpose(1, 2)] * 3, window=band))
        with pytest.raises(NotImplementedError, match="whose mask has a window of"):
            integration.attention_forward(module, x, x, x, mask, sliding_window=3)


def test_names_that_transformers_would_look_up_elsewhere():
    with pytest.raises(ArgumentError, match="flash"):
        integration.register("tilewise_flash")
    assert integration.is_registered()


@pytest.mark.slow
def test_compiles_whole():
    """The forward without a padding mask is one graph; so is a step over a static cache."""
    eager, ours = pair(config_of("llama"))
    ids = tokens(batch=2)
    step = torch.compile(ours, fullgraph=True, backend="aot_eager")
    cache = transformers.StaticCache(config=ours.config, max_cache_len=32)
    with torch.no_grad():
        expected = eager(ids).logits
        got = step(ids, use_cache=False).logits
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        ours(ids[:, :7], **{CACHE: cache}, use_cache=True)
        for i in range(7, 12):
            last = step(ids[:, i : i + 1], **{CACHE: cache}, use_cache=True).logits
    torch.testing.assert_close(last[:, 0], expected[:, -1], atol=1e-5, rtol=1e-5)
