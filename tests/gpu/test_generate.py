"""A served Llama on a GPU: tokens of transformers' eager attention, and no wait in a step."""

import inspect

import pytest
from helpers.waits import nothing_waits
from integrations.test_transformers import pair
from integrations.test_transformers_continuous import (
    alone,
    assert_same_tokens,
    calls,  # noqa: F401
    config_with_large_weights,
    prompts,
)

pytest.importorskip("rich")
pytest.importorskip("transformers")

from tilewise.cli import generate as command
from tilewise.cli.generate import workload
from tilewise.cli.generate.batch import batch_of
from tilewise.cli.generate.model import PagedLlama
from tilewise.cli.generate.requests import Request
from tilewise.cli.generate.scheduler import Chunk

pytestmark = pytest.mark.gpu


def test_tokens_are_those_of_transformers_alone():
    sizes = dict(hidden_size=256, num_hidden_layers=2, vocab_size=128)
    model = workload.llama(0, "cuda", **sizes)
    requests = workload.draw_requests(8, 0, 128, 128)
    pages = command.few_pages(requests, 16)
    settings = dict(pages=pages, page_size=16, split_size=128, max_tokens=256)
    results = command.run(command.console(True), model, requests, settings, "cuda")
    assert results["ok"], command.summary(results)
    assert results["served"]["mixed_steps"] > 0


def test_nothing_waits_in_a_step():
    model = workload.llama(0, "cuda", num_hidden_layers=2)
    paged = PagedLlama(model, 64, 16, 256)
    decoding = Request([1] * 300, 4, generated=[2], pages=list(range(20)), cached=300)
    starting = Request([3] * 500, 4, pages=list(range(20, 60)))
    batch = batch_of([Chunk(decoding, 300, 301), Chunk(starting, 0, 200)], paged.width, "cuda")
    paged.step(batch)
    with nothing_waits():
        paged.step(batch)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_transformers_continuous_batching(name, use_cuda_graph, calls):  # noqa: F811
    import transformers

    config = transformers.ContinuousBatchingConfig
    if "page_size" not in inspect.signature(config).parameters:
        pytest.skip(f"transformers {transformers.__version__} does not take a page's size")
    eager, ours = (model.cuda() for model in pair(config_with_large_weights(name)))
    texts = prompts()
    assert alone(eager, texts[0], 2).is_cuda
    options = dict(max_blocks_per_request=8, use_cuda_graph=use_cuda_graph)
    assert_same_tokens(eager, ours, texts, **options)
    has_pages = name == "llama"  # transformers has no page table for windows
    assert ("flash_attn_with_kvcache" in calls) == has_pages
