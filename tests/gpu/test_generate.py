"""A served Llama on a GPU: tokens of transformers' eager attention, and no wait in a step."""

import inspect

import pytest
import torch
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

from examples.generate import command, serve, workload
from examples.generate.batch import batch_of
from examples.generate.graph import PaddedSteps
from examples.generate.model import PagedLlama
from examples.generate.pages import Pages
from examples.generate.requests import Request
from examples.generate.scheduler import Chunk, Scheduler

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("graphs", [False, True])
def test_tokens_are_those_of_transformers_alone(graphs):
    sizes = dict(hidden_size=256, num_hidden_layers=2, vocab_size=128)
    model = workload.llama(0, "cuda", **sizes)
    requests = workload.draw_requests(8, 0, 128, 128)
    pages = command.few_pages(requests, 16)
    settings = dict(pages=pages, page_size=16, split_size=128, max_tokens=256, graphs=graphs)
    results = command.run(command.console(True), model, requests, settings, "cuda")
    assert results["ok"], command.summary(results)
    assert results["served"]["mixed_steps"] > 0


def many_requests(count: int) -> list[Request]:
    """Arrivals, ends and preemptions for a thousand steps."""
    requests = workload.draw_requests(count, 7, 64, 128)
    for i, request in enumerate(requests):
        request.arrival = 18 * i
    return requests


def served(device: str, dtype: torch.dtype, requests: list[Request], most: int, split_size=64):
    sizes = dict(hidden_size=256, num_hidden_layers=2, vocab_size=128)
    model = workload.llama(0, device, **sizes).to(dtype)
    pages = Pages(command.few_pages(requests[:6], 16), 16)
    paged = PagedLlama(model, pages.count, 16, split_size)
    steps = paged if device == "cpu" else PaddedSteps(paged, most, len(requests), device)
    return serve.serve(steps, Scheduler(pages, most), requests, device)


def test_a_thousand_steps():
    """In fp32 the tokens of the CPU."""
    here, there = many_requests(54), many_requests(54)
    assert served("cuda", torch.float32, here, 128).steps >= 1000
    served("cpu", torch.float32, there, 128)
    assert [x.generated for x in here] == [x.generated for x in there]
    assert sum(x.preemptions for x in here) > 0


def test_the_batch_changes_no_token_of_16_bits():
    """Requests that come one by one, all at once, or in another order have the same tokens. All
    steps have one shape, that of a token a request: products of other shapes have other bits.
    """
    by_arrival = []
    for later in (18, 0, -5):
        requests = many_requests(24)
        for i, request in enumerate(requests):
            request.arrival = later * (i if later >= 0 else i - 23)
        served("cuda", torch.bfloat16, requests, len(requests), 128)
        by_arrival.append([x.generated for x in requests])
    assert by_arrival[0] == by_arrival[1] == by_arrival[2]
    assert len({tuple(tokens[:8]) for tokens in by_arrival[0]}) > 12


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
