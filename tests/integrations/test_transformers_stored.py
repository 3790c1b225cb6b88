"""Masks that are no band: holes, four dimensions, windows of 0."""

import dataclasses

import pytest
import torch
from helpers.transformers_words import CACHE

transformers = pytest.importorskip("transformers")

from integrations.stored_models import (  # noqa: E402
    CLOSE,
    SLOW,
    WAYS,
    checkpoint,
    generated_agree,
    given,
    gradients_agree,
    holes,
    labels_of,
    sdpa,
    some,
)
from integrations.test_transformers import (  # noqa: E402
    DECODERS,
    SIZES,
    TOKENS,
    config_of,
    padded,
    pair,
    tokens,
)
from integrations.test_transformers_chunks import llama4  # noqa: E402
from integrations.test_transformers_packed import (  # noqa: E402
    LENGTHS,
    alone,
    packed,
    told_by_lengths,
    told_by_positions,
)
from integrations.test_transformers_refusals import models  # noqa: E402

import tilewise  # noqa: E402
from tilewise import attention  # noqa: E402
from tilewise.integrations import transformers as integration  # noqa: E402
from tilewise.integrations.transformers.visible import Visible  # noqa: E402


@pytest.mark.parametrize("name", some([*DECODERS, "llama4"], ["llama", "gpt_oss", "llama4"]))
def test_holes(name):
    eager, ours = pair(llama4() if name == "llama4" else config_of(name))
    ids, mask = tokens(), holes()
    with torch.no_grad():
        expected = eager(ids, attention_mask=mask).logits
        got = ours(ids, attention_mask=mask).logits
    real = mask.bool()
    torch.testing.assert_close(got[real], expected[real], **CLOSE)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_holes_in_encoders(name):
    eager, ours = pair(config_of(name), transformers.AutoModel)
    ids, mask = tokens(), holes()
    with torch.no_grad():
        expected = eager(ids, attention_mask=mask).last_hidden_state
        got = ours(ids, attention_mask=mask).last_hidden_state
    real = mask.bool()
    torch.testing.assert_close(got[real], expected[real], **CLOSE)


@pytest.mark.parametrize("reentrant", some([None, True, False], [None, True]))
@pytest.mark.parametrize("name", some(["gpt_oss", "llama4", "mistral"], ["gpt_oss"]))
def test_gradients_with_holes(name, reentrant):
    eager, ours = pair(llama4() if name == "llama4" else config_of(name))
    ids, mask = tokens(), holes()
    checkpoint(reentrant, eager, ours)
    gradients_agree(eager, ours, input_ids=ids, attention_mask=mask, labels=labels_of(ids, mask))


@pytest.mark.parametrize("cache", some(["dynamic", "static"], ["static"]))
@pytest.mark.parametrize("name", some(DECODERS, ["gemma2"]))
def test_generates_behind_holes(name, cache):
    generated_agree(*pair(config_of(name)), tokens(), cache, attention_mask=holes())


@pytest.mark.parametrize("way", some(WAYS, ["greedy", "beams"]))
@pytest.mark.parametrize("name", some(["llama", "gpt2"], ["llama"]))
def test_generates_from_prompts_padded_on_the_right(name, way):
    """The mask grows ones behind the padding, and the first token follows a padded query."""
    eager, ours = pair(config_of(name))
    generated_agree(eager, ours, tokens(), attention_mask=padded("right"), **WAYS[way])


def test_one_prompt_padded_on_both_sides():
    eager, ours = pair(config_of("llama"))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 0, 0, 0]])
    for rows in (mask, torch.cat([mask, mask.flip(1)])):
        generated_agree(eager, ours, tokens(len(rows), 10), attention_mask=rows)


@pytest.mark.parametrize("goes_on", some([False, True], [False]))
@pytest.mark.parametrize("name", some(["mistral", "llama4", "gemma3"], ["mistral", "llama4"]))
def test_queries_that_see_no_key(name, goes_on):
    """Padding past a window or a chunk: every query, padded ones too, is as with sdpa."""
    config = llama4() if name == "llama4" else config_of("mistral")
    if name == "gemma3":
        config = transformers.Gemma3TextConfig(**SIZES, **TOKENS, head_dim=8, sliding_window=5)
    eager, ours = pair(config)
    plain, ids, mask = sdpa(eager), tokens(), padded("right")
    with torch.no_grad():
        expected = plain(ids, attention_mask=mask).logits
        torch.testing.assert_close(ours(ids, attention_mask=mask).logits, expected, **CLOSE)
    if goes_on:
        generated_agree(plain, ours, ids, attention_mask=mask)


def test_a_prefix_before_padding():
    """Prefix tuning: keys that were learned, then a prompt that is padded on the left."""
    eager, ours = pair(config_of("llama"))
    ids, mask = tokens(), padded("left")
    learned = torch.randn(2, 2, 3, 2, 3, 8)  # layers, keys and values
    mask = torch.cat([torch.ones(3, 3, dtype=torch.long), mask], 1)
    logits = []
    for model in (eager, ours):
        cache = transformers.DynamicCache(config=model.config)
        for layer, (k, v) in enumerate(learned):
            cache.update(k, v, layer)
        with torch.no_grad():
            logits.append(model(ids, attention_mask=mask, **{CACHE: cache}).logits)
    real = mask[:, 3:].bool()
    torch.testing.assert_close(logits[1][real], logits[0][real], **CLOSE)


@pytest.mark.parametrize("shape", [(3, 1, 12, 12), (1, 4, 12, 12)])
@pytest.mark.parametrize("name", some(["llama", "mistral"], ["mistral"]))
def test_masks_of_four_dimensions(name, shape):
    """They say all: a layer's window does not count, nor do position ids."""
    eager, ours = pair(config_of(name))
    ids, seen = tokens(), given(shape)
    scores = torch.where(seen, torch.randn(shape), torch.finfo(torch.float32).min)
    how = dict(position_ids=torch.arange(12)[None] % 5)
    with torch.no_grad():
        for model, mask in ((sdpa(eager), seen), (eager, scores)):
            expected = model(ids, attention_mask=mask, **how).logits
            torch.testing.assert_close(
                ours(ids, attention_mask=mask, **how).logits, expected, **CLOSE
            )


def test_a_mask_of_scores_for_each_key():
    """LayoutLM makes one of padding."""
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    eager, ours = pair(transformers.LayoutLMConfig(**sizes), transformers.AutoModel)
    ids, mask = tokens(), padded("left")
    with torch.no_grad():
        expected = eager(ids, attention_mask=mask).last_hidden_state
        got = ours(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], **CLOSE)


def test_masks_that_do_not_fit():
    _, ours = pair(config_of("llama"))
    for shape in ((3, 1, 12, 11), (3, 2, 12, 12)):
        with pytest.raises(NotImplementedError, match="broadcast over"):
            ours(tokens(), attention_mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="pass bools"):
        ours(tokens(), attention_mask=torch.ones(3, 1, 12, 12, dtype=torch.long))
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q: with a mask of four"):
        ours(tokens(), attention_mask=given(), **told_by_lengths((12,)))


BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, -1, -1, 1, 1, -1, -1, -1, -1, -1, -1]])


def with_blocks(config, **told):
    """The mask of a row in which image tokens see each other."""
    from transformers.masking_utils import create_causal_mask

    how = dict(inputs_embeds=torch.zeros(1, 15, 32), block_sequence_ids=BLOCKS)
    return create_causal_mask(config, **how, attention_mask=None, **{CACHE: None}, **told)


@pytest.mark.parametrize("what", ["holes", "given", "blocks"])
def test_it_is_said_once(what, monkeypatch):
    monkeypatch.setattr(tilewise.errors, "_said", set())
    _, ours = pair(config_of("llama"))
    masks = dict(holes=holes(), given=given())
    with torch.no_grad(), pytest.warns(tilewise.PerformanceWarning, match="attention") as said:
        for _ in range(2):
            if what == "blocks":
                with_blocks(ours.config)
            else:
                ours(tokens(), attention_mask=masks[what])
    assert len(said) == 1


def test_keys_of_any_strides():
    """Inkling's come from a convolution."""
    q, k, v = torch.randn(3, 2, 2, 8, 6).transpose(-1, -2).unbind(0)
    out, _ = integration.attention_forward(torch.nn.Module(), q, k, v, None, is_causal=True)
    expected = attention(*(x.contiguous() for x in (q, k, v)), causal=True, layout="bhsd")
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_a_stored_mask_is_no_tensor():
    """BLOOM would add it."""
    _, ours = models("bloom")
    with pytest.raises(NotImplementedError, match="computes with its attention mask itself"):
        ours(tokens(), attention_mask=holes())


def test_packed_rows_and_a_stored_mask():
    """A stored mask separates the sequences, or `cu_seq_lens` are refused."""
    _, ours = pair(config_of("llama"))
    q, k, v = torch.randn(3, 1, 2, sum(LENGTHS), 8).unbind(0)

    def out(mask, **told):
        module = torch.nn.Module()
        return integration.attention_forward(module, q, k, v, mask, **told)[0]

    knows = with_blocks(ours.config, **told_by_positions())
    assert knows.mask.shape == (1, 1, 15, 15)
    expected = out(knows)
    for told in (told_by_positions(), told_by_lengths(), told_by_lengths() | told_by_positions()):
        torch.testing.assert_close(out(knows, **told), expected)
    whole = with_blocks(ours.config)
    with pytest.raises(NotImplementedError, match="position_ids restart"):
        out(whole, **told_by_positions())
    with pytest.raises(NotImplementedError, match="does not know of these sequences"):
        out(whole, **told_by_lengths())
    with pytest.raises(NotImplementedError, match="does not know of these sequences"):
        out(dataclasses.replace(knows, agreed=[]), **told_by_lengths((5, 2, 6, 2)))


# A window of 0


def unused_window():
    experts = dict(moe_intermediate_size=16, shared_expert_intermediate_size=16)
    experts |= dict(num_experts=2, num_experts_per_tok=1)
    return transformers.AutoConfig.for_model("qwen2_moe", **SIZES, **TOKENS, **experts)


@pytest.mark.parametrize("padding", ["none", "left", "holes"])
def test_a_window_of_0_that_no_layer_uses(padding):
    eager, ours = pair(unused_window())
    assert ours.config.sliding_window == 0
    ids = tokens()
    mask = {"none": None, "left": padded("left"), "holes": holes()}[padding]
    with torch.no_grad():
        expected = eager(ids, attention_mask=mask).logits
        got = ours(ids, attention_mask=mask).logits
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(got[real], expected[real], **CLOSE)


def test_a_window_of_0_sees_nothing():
    from transformers.masking_utils import create_sliding_window_causal_mask

    _, ours = pair(unused_window())
    x = torch.zeros(2, 5, 32)
    mask = create_sliding_window_causal_mask(
        ours.config, inputs_embeds=x, attention_mask=None, **{CACHE: None}
    )
    assert isinstance(mask, Visible)
    q, k, v = torch.randn(3, 2, 2, 5, 8).unbind(0)
    out, _ = integration.attention_forward(torch.nn.Module(), q, k, v, mask, sliding_window=0)
    assert not out.any()


# torch.compile, which reads no values


COMPILED = {
    "llama": (config_of("llama"), ["none", "left", "right", "holes"]),
    "mistral": (config_of("mistral"), ["left", "holes"]),
    "gpt_oss": (config_of("gpt_oss"), ["left"]),
    "llama4": (llama4(), ["left", "holes"]),
    "qwen2_moe": (unused_window(), ["none", "holes"]),
}


@SLOW
@pytest.mark.parametrize("name,padding", [(n, p) for n, (_, ps) in COMPILED.items() for p in ps])
def test_compiles_whole_with_padding(name, padding):
    torch._dynamo.reset()
    eager, ours = pair(COMPILED[name][0])
    step = torch.compile(ours, fullgraph=True, backend="aot_eager")
    ids, mask = tokens(), torch.ones(3, 12, dtype=torch.long)
    if padding != "none":
        mask = holes() if padding == "holes" else padded(padding)
    gradients_agree(
        *(eager, step),
        input_ids=ids,
        attention_mask=None if padding == "none" else mask,
        labels=labels_of(ids, mask),
        use_cache=False,
    )


@SLOW
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_compiles_whole_over_a_static_cache(name):
    """A prompt that is padded on the left, and steps, in one graph each."""
    torch._dynamo.reset()
    eager, ours = pair(config_of(name))
    step = torch.compile(ours, fullgraph=True, backend="eager")
    ids, mask = tokens(), padded("left")
    cache = transformers.StaticCache(config=ours.config, max_cache_len=16)
    with torch.no_grad():
        expected = eager(ids, attention_mask=mask).logits
        parts = [
            step(
                ids[:, start:stop],
                attention_mask=mask[:, :stop],
                **{CACHE: cache},
                use_cache=True,
            ).logits
            for start, stop in ((0, 8), (8, 9), (9, 10), (10, 11), (11, 12))
        ]
    real = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], expected[real], **CLOSE)


@SLOW
def test_packed_rows_compile_beside_a_given_mask():
    """Sequences of a row by a mask of four dimensions, as some stacks pass them."""
    torch._dynamo.reset()
    eager, ours = pair(config_of("llama"))
    ids = tokens(1, sum(LENGTHS))
    number = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    seen = (number[:, None] == number).tril()[None, None]
    step = torch.compile(ours, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected = alone(eager, ids)
        for model in (ours, step):
            got = packed(model, ids, attention_mask=seen, **told_by_positions())
            torch.testing.assert_close(got, expected, **CLOSE)
