"""Masks of image tokens, which see each other in blocks, and of prefixes."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from integrations.stored_models import (  # noqa: E402
    CLOSE,
    SLOW,
    generated_agree,
    gradients_agree,
    shaken,
    some,
)
from integrations.test_transformers import (  # noqa: E402
    SIZES,
    TOKENS,
    pair,
)

VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
VISION |= dict(image_size=16, patch_size=4, vision_use_head=False)
IMAGE = 60


def models_of(name):
    text = SIZES | TOKENS | dict(head_dim=8)
    if name == "gemma3":
        text |= dict(sliding_window=5, query_pre_attn_scalar=8)
        text |= dict(layer_types=["sliding_attention", "full_attention"])
        config = transformers.Gemma3Config(
            text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_index=IMAGE
        )
    else:
        vision = VISION | dict(model_type="siglip_vision_model", projection_dim=32)
        config = transformers.PaliGemmaConfig(
            text_config=text | dict(model_type="gemma"),
            vision_config=vision,
            image_token_index=IMAGE,
            projection_dim=32,
            hidden_size=32,
        )
    return shaken(*pair(config, transformers.AutoModelForImageTextToText))


def images(name, side=None):
    """Two images in the second row of Gemma 3; one a row in PaliGemma, with a prefix behind it."""
    ids = torch.randint(3, 59, (2, 24))
    ids[:, 2:6] = ids[1, 9:13] = IMAGE
    count = 3
    if name == "paligemma":
        ids[:, 2:18], count = IMAGE, 2
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :2] = 0
    if side == "right":
        mask[0, -2:] = 0
    kinds = (ids == IMAGE).long()
    if name == "paligemma":
        kinds = (torch.arange(24) >= 20).long().expand(2, -1)
    pixels = torch.randn(count, 3, 16, 16)
    return dict(input_ids=ids, attention_mask=mask, pixel_values=pixels, token_type_ids=kinds)


@pytest.mark.parametrize("side", some([None, "left", "right"], ["left"]))
@pytest.mark.parametrize("name", ["gemma3", "paligemma"])
def test_blocks_of_image_tokens(name, side):
    eager, ours = models_of(name)
    batch = images(name, side)
    if name == "paligemma":
        del batch["token_type_ids"]
    with torch.no_grad():
        expected, got = eager(**batch).logits, ours(**batch).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(got[real], expected[real], **CLOSE)


@SLOW
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", ["gemma3", "paligemma"])
def test_continues_what_has_images(name, side):
    eager, ours = models_of(name)
    batch = images(name, side)
    ids = batch.pop("input_ids")
    if name == "paligemma":
        del batch["token_type_ids"]
    for cache in ("dynamic", "static"):
        generated_agree(eager, ours, ids, cache, **batch)


@pytest.mark.parametrize("name", some(["gemma3", "paligemma"], ["paligemma"]))
def test_gradients_with_images(name):
    eager, ours = models_of(name)
    batch = images(name)
    ids = batch["input_ids"]
    gradients_agree(eager, ours, **batch, labels=ids.masked_fill(ids == IMAGE, -100))


@SLOW
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_blocks_of_image_tokens_compile_whole():
    torch._dynamo.reset()
    eager, ours = models_of("gemma3")
    batch = images("gemma3")
    step = torch.compile(ours, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(step(**batch).logits, eager(**batch).logits, **CLOSE)
