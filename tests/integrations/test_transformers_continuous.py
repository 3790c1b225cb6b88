"""transformers' continuous batching with our name: the tokens of eager generation, one by one."""

import functools

import pytest
import torch
from helpers.tiers import sample

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.generation.continuous_batching")

from integrations.test_transformers import config_of, pair  # noqa: E402
from transformers import ContinuousBatchingConfig  # noqa: E402
from transformers import modeling_flash_attention_utils as flash  # noqa: E402
from transformers.generation.continuous_batching import initialization  # noqa: E402

from tilewise.integrations import transformers as integration  # noqa: E402
from tilewise.integrations.transformers import continuous  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(flash, "_flash_with_kvcache_fn"), reason="needs transformers 5.23's interface"
)
SMALL = dict(page_size=16, num_blocks=24, max_batch_tokens=32)


@pytest.fixture
def calls(monkeypatch):
    """How often transformers called each of our functions."""
    counts = {}

    def counted(name):
        function = getattr(continuous, name)

        @functools.wraps(function)
        def call(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **kwargs)

        monkeypatch.setattr(continuous, name, call)

    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        counted(name)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    return counts


def prompts(lengths=(40, 12, 3)):
    return [torch.randint(3, 64, (n,)).tolist() for n in lengths]


def alone(model, prompt, new_tokens):
    ids = torch.tensor([prompt], device=model.device)
    how = dict(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0, len(prompt) :]


def assert_same_tokens(eager, ours, texts, new_tokens=6, **options):
    how = transformers.GenerationConfig(
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    options = ContinuousBatchingConfig(**(SMALL | options))
    results = ours.generate_batch(texts, how, options).values()
    assert [result.error for result in results] == [None] * len(texts)
    found = [result.generated_tokens for result in results]
    assert found == [alone(eager, text, new_tokens).tolist() for text in texts]


def config_with_large_weights(name):
    config = config_of(name)
    config.initializer_range = 0.3  # so that the next token depends on more than the last one
    return config


@pytest.mark.parametrize("name", sample(["llama", "mistral", "gemma2"], "gemma2"))
def test_generates_the_tokens_of_eager_attention(name, calls):
    """Prompts in chunks, decodes beside them, windows and capped scores."""
    eager, ours = pair(config_with_large_weights(name))
    assert_same_tokens(eager, ours, prompts())
    assert calls.keys() == {"flash_attn_varlen_func"}
    assert ours.config._attn_implementation == "tilewise"


def test_decodes_over_its_pages(calls, monkeypatch):
    """On a CPU transformers never asks for them: it is told that there is a GPU, there only."""

    class Torch:
        class cuda:
            is_available = staticmethod(lambda: True)

    monkeypatch.setattr(initialization, "torch", Torch)
    eager, ours = pair(config_with_large_weights("llama"))
    assert_same_tokens(eager, ours, prompts(), max_blocks_per_request=8, use_cuda_graph=False)
    assert calls["flash_attn_with_kvcache"] >= 4 * ours.config.num_hidden_layers


def test_models_without_flash_attention_are_refused():
    integration.register()
    config = config_of("llama")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tilewise")
    model._supports_flash_attn = False
    with pytest.raises(ValueError, match="tilewise is not supported for continuous batching"):
        model.generate_batch(prompts())


@pytest.mark.slow
def test_others_go_on_as_ever():
    integration.register()
    config = config_with_large_weights("llama")
    eager, ours = pair(config)
    ours.set_attn_implementation("sdpa")
    assert_same_tokens(eager, ours, prompts(), auto_switch_to_flash=False)
