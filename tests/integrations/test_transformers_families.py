"""Models that pick their attention from a table of their own classes."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from integrations.stored_models import (  # noqa: E402
    CLOSE,
    SLOW,
    checkpoint,
    generated_agree,
    given,
    gradients_agree,
    holes,
    labels_of,
    shaken,
    some,
)
from integrations.test_transformers import TOKENS, padded, pair, tokens  # noqa: E402

from tilewise.integrations import transformers as integration  # noqa: E402

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
GPT = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64)
NEO = dict(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64)
FAMILIES = {
    "falcon": SIZES | dict(alibi=False),
    "falcon-grouped": SIZES | dict(alibi=False, num_kv_heads=2, new_decoder_architecture=True),
    "gptj": GPT,
    "gpt_neo": NEO | dict(window_size=5, attention_types=[[["global", "local"], 1]]),
}
NO_DROPOUT = ("attn_pdrop", "resid_pdrop", "embd_pdrop")
NO_DROPOUT += ("attention_dropout", "resid_dropout", "embed_dropout")


def config_of(name):
    config = transformers.AutoConfig.for_model(name.partition("-")[0], **FAMILIES[name], **TOKENS)
    for field in NO_DROPOUT:
        if hasattr(config, field):
            setattr(config, field, 0.0)
    return config


@pytest.mark.parametrize("name", some(FAMILIES, ["falcon-grouped", "gptj", "gpt_neo"]))
def test_logits(name):
    eager, ours = pair(config_of(name))
    ids, whole = tokens(), torch.ones(3, 12, dtype=torch.long)
    for mask in (None, padded("left"), padded("right"), holes()):
        with torch.no_grad():
            expected = eager(ids, attention_mask=mask).logits
            got = ours(ids, attention_mask=mask).logits
        real = (whole if mask is None else mask).bool()
        torch.testing.assert_close(got[real], expected[real], **CLOSE)
    seen = given()
    with torch.no_grad():
        scores = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        expected = eager(ids, attention_mask=scores).logits
        for mask in (seen, scores):
            torch.testing.assert_close(ours(ids, attention_mask=mask).logits, expected, **CLOSE)


@pytest.mark.parametrize("reentrant", some([None, True, False], [True]))
@pytest.mark.parametrize("name", some(FAMILIES, ["falcon-grouped", "gpt_neo"]))
def test_gradients(name, reentrant):
    eager, ours = pair(config_of(name))
    checkpoint(reentrant, eager, ours)
    ids, mask = tokens(), holes()
    gradients_agree(eager, ours, input_ids=ids, attention_mask=mask, labels=labels_of(ids, mask))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", some(FAMILIES, []))
def test_generates_the_same_tokens(name, side, cache):
    mask = padded(side, (12, 11, 9))
    generated_agree(*pair(config_of(name)), tokens(), cache, attention_mask=mask)


@SLOW
@pytest.mark.parametrize("name", FAMILIES)
def test_compiles_whole(name):
    torch._dynamo.reset()
    eager, ours = pair(config_of(name))
    step = torch.compile(ours, fullgraph=True, backend="aot_eager")
    ids, mask = tokens(), padded("left")
    labels = labels_of(ids, mask)
    gradients_agree(eager, step, input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)


def test_dropout_is_drawn_in_training_alone():
    config = config_of("gptj")
    config.attn_pdrop = 0.5
    _, ours = pair(config)
    ids = tokens()
    assert torch.equal(ours(ids).logits, ours(ids).logits)
    ours.train()
    assert not torch.equal(ours(ids).logits, ours(ids).logits)


@pytest.mark.parametrize("name", ["falcon", "gptj", "gpt_neo"])
def test_weights_of_attention_are_eagers_alone(name):
    _, ours = pair(config_of(name))
    with pytest.raises(NotImplementedError, match="output_attentions: attention weights are never"):
        ours(tokens(), output_attentions=True)


def test_alibi_in_a_mask_is_refused():
    """Falcon's, of which eager and sdpa make different things."""
    config = transformers.FalconConfig(**SIZES, **TOKENS, alibi=True)
    _, ours = pair(config)
    with pytest.raises(NotImplementedError, match="computes with its attention mask itself"):
        ours(tokens())


VISION = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
VISION |= dict(image_size=16, patch_size=4, drop_path_rate=0.0)
SHARED, OWN = "use_shared_relative_position_bias", "use_relative_position_bias"


@pytest.mark.parametrize("biases", [(), (SHARED,), (OWN,), (SHARED, OWN)])
def test_biases_of_images(biases):
    """Gradients of the tables of biases, too; with larger images, which stretch them."""
    config = transformers.Data2VecVisionConfig(**VISION, **dict.fromkeys(biases, True))
    config.attention_probs_dropout_prob = config.hidden_dropout_prob = 0.0
    eager, ours = shaken(*pair(config, transformers.AutoModel))
    image, weights = torch.randn(2, 3, 16, 16), torch.randn(2, 17, 32)
    for model in (eager, ours):
        (model.train()(image).last_hidden_state * weights).sum().backward()
    for (name, one), other in zip(eager.named_parameters(), ours.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-4, msg=name)
    larger = torch.randn(2, 3, 24, 16)
    with torch.no_grad():
        how = dict(interpolate_pos_encoding=True)
        expected, got = (x(larger, **how).last_hidden_state for x in (eager, ours))
    torch.testing.assert_close(got, expected, **CLOSE)


def test_check_knows_them():
    checked = integration.check(pair(config_of("falcon"))[1])
    assert [(x.kind, x.attention) for x in checked.layers] == [("FalconAttention", "tilewise")] * 2


def test_other_tables_say_what_to_do():
    """And a part of a model is loaded with another attention by the name of its config."""
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    vision = sizes | dict(image_size=32, patch_size=8, output_channels=16, mlp_dim=32)
    prompt = dict(hidden_size=16, image_size=32, patch_size=8)
    decoder = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mlp_dim=16)
    config = transformers.SamConfig(
        vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder
    )
    make = transformers.AutoModel.from_config
    integration.register()
    with pytest.raises(NotImplementedError, match="sam: this model picks its attention from a tab"):
        make(config, attn_implementation="tilewise")
    model = make(config, attn_implementation={"": "tilewise", "vision_config": "eager"})
    found = {layer.kind: layer.attention for layer in integration.check(model).layers}
    assert found == {"SamVisionAttention": "own", "SamAttention": "tilewise"}
