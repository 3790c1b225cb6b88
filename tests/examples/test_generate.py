"""examples/generate: the page allocator, the scheduler, one step's tensors, and whose tokens."""

import json
import random

import pytest
import torch

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

from examples.generate import (  # noqa: E402
    command,
    expected,
    graph,
    workload,
)
from examples.generate.batch import NO_PAGE, batch_of  # noqa: E402
from examples.generate.model import PagedLlama  # noqa: E402
from examples.generate.pages import Pages  # noqa: E402
from examples.generate.requests import Request  # noqa: E402
from examples.generate.scheduler import Chunk, Scheduler  # noqa: E402

# the page allocator


def test_pages_are_handed_out_once_and_taken_back():
    pages = Pages(6, 4)
    first, second = [], []
    assert pages.extend(first, 9) and pages.extend(second, 4)
    assert (len(first), len(second), pages.free) == (3, 1, 2)
    assert not set(first) & set(second)
    assert pages.extend(first, 12) and len(first) == 3  # the last page has room
    assert not pages.extend(second, 17) and len(second) == 1  # all or nothing
    pages.release(first)
    assert (first, pages.free) == ([], 5)
    assert pages.extend(second, 24) and sorted(second) == list(range(6))


# the scheduler


def record(scheduler, chunks):
    scheduler.record(chunks, [7] * len(chunks), [0.0] * len(chunks))


def steps(scheduler, requests, most=100):
    """(request, first, last) of each step's chunks, until all have ended."""
    seen = []
    while (scheduler.running or scheduler.waiting) and len(seen) < most:
        chunks = scheduler.plan()
        seen.append([(requests.index(one.request), one.first, one.last) for one in chunks])
        record(scheduler, chunks)
    return seen


def test_decodes_share_a_step_with_chunks_of_prefill():
    requests = [Request([1] * 5, 3), Request([1] * 9, 1)]
    scheduler = Scheduler(Pages(8, 4), 8)
    for request in requests:
        scheduler.add(request)
    assert steps(scheduler, requests) == [
        [(0, 0, 5), (1, 0, 3)],
        [(0, 5, 6), (1, 3, 9)],
        [(0, 6, 7)],
    ]
    assert [request.generated for request in requests] == [[7, 7, 7], [7]]
    assert scheduler.pages.free == 8


def test_the_youngest_gives_way_and_is_computed_again():
    old, young = requests = [Request([1] * 4, 4), Request([2] * 4, 3)]
    scheduler = Scheduler(Pages(3, 4), 8)
    for request in requests:
        scheduler.add(request)
    # Both want a second page, and one is free.
    assert steps(scheduler, requests, most=2) == [[(0, 0, 4), (1, 0, 4)], [(0, 4, 5)]]
    assert list(scheduler.waiting) == [young]
    assert (young.preemptions, young.pages, young.cached, young.generated) == (1, [], 0, [7])
    # Its generated token is part of a longer prompt.
    assert steps(scheduler, requests) == [[(0, 5, 6)], [(0, 6, 7)], [(1, 0, 5)], [(1, 5, 6)]]
    assert young.generated == [7, 7, 7] and old.preemptions == 0


def test_a_request_without_room_is_refused():
    with pytest.raises(ValueError, match="needs 4 pages and the pool has 3"):
        Scheduler(Pages(3, 4), 8).add(Request([1] * 12, 2))


@pytest.mark.parametrize("seed", range(30))
def test_any_requests_end_in_any_pool_that_holds_the_longest(seed):
    """Pages are never shared, keys always have one, no step is too long, tokens come in order."""
    rng = random.Random(seed)
    page_size, budget = rng.choice([1, 3, 16]), rng.choice([1, 7, 64])
    requests = [
        Request([i] * rng.randint(1, 60), rng.randint(1, 20), rng.randint(0, 40)) for i in range(12)
    ]
    most = max(-(-request.longest // page_size) for request in requests)
    pages = Pages(rng.randint(most, 2 * most), page_size)
    scheduler, coming, now = Scheduler(pages, budget), list(requests), 0
    while coming or scheduler.waiting or scheduler.running:
        for request in [request for request in coming if request.arrival <= now]:
            scheduler.add(request)
            coming.remove(request)
        chunks = scheduler.plan()
        assert sum(chunk.last - chunk.first for chunk in chunks) <= budget
        assert chunks or not (scheduler.waiting or scheduler.running)
        used = [page for request in requests for page in request.pages]
        assert len(used) == len(set(used)) == pages.count - pages.free
        for chunk in chunks:
            assert chunk.first == chunk.request.cached < chunk.last <= chunk.request.length
            assert len(chunk.request.pages) * page_size >= chunk.last
        record(scheduler, chunks)
        now += 1
        assert now < 20_000
    assert all(request.is_done for request in requests)
    assert pages.free == pages.count


# one step


def test_chunks_as_tensors():
    decoding = Request([1, 2, 3], 4, generated=[4], pages=[5], cached=3)
    starting = Request([6, 7, 8], 4, pages=[2, 0])
    batch = batch_of([Chunk(decoding, 3, 4), Chunk(starting, 0, 3)], 3, "cpu")
    assert [x.tolist() for x in batch] == [
        [4, 6, 7, 8],
        [3, 0, 1, 2],
        [0, 1, 4],
        [4, 3],
        [[5, NO_PAGE, NO_PAGE], [2, 0, NO_PAGE]],
    ]


# tokens

SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=64)
SETTINGS = dict(pages=16, page_size=16, split_size=32, max_tokens=48)


def served(seed=0, count=6):
    pytest.importorskip("transformers")
    model = workload.llama(seed, "cpu", **SMALL)
    requests = workload.draw_requests(count, seed, 32, 64)
    for request in requests:
        request.new_tokens = min(request.new_tokens, 24)
    return model, requests, command.run(command.console(True), model, requests, SETTINGS, "cpu")


@pytest.fixture(scope="module")
def plain():
    """What is served without graphs."""
    return served()


def test_tokens_are_those_of_transformers_alone(plain):
    model, requests, results = plain
    assert results["ok"], command.summary(results)
    assert results["preemptions"] > 0
    assert results["served"]["mixed_steps"] > 0
    assert results["served"]["most_pages"] >= 15
    assert all(len(request.prompt) > 2 * 32 for request in requests)
    assert results["smallest_gap"] > 4 * results["largest_error"]  # equality is no luck
    # Distant keys count: another first token of the prompt is another text.
    request = requests[0]
    other = Request([request.prompt[0] % 63 + 1, *request.prompt[1:]], request.new_tokens)
    assert expected.eager_tokens(model, other).tokens != request.generated


def test_padded_steps_give_the_same_tokens(plain, monkeypatch):
    """What a graph is captured of: rows without a request, and tokens that belong to none."""
    _, requests, expected_results = plain
    sizes = []
    step = graph.PaddedStep.step
    monkeypatch.setattr(
        graph.PaddedStep, "step", lambda self, x: (sizes.append(self.tokens), step(self, x))[1]
    )
    monkeypatch.setitem(SETTINGS, "graphs", True)
    _, padded, results = served()
    assert results["ok"], command.summary(results)
    assert [x.generated for x in padded] == [x.generated for x in requests]
    assert results["preemptions"] == expected_results["preemptions"] > 0
    assert {len(padded), SETTINGS["max_tokens"]} == set(sizes)


def test_padding_is_neither_cached_nor_read():
    pytest.importorskip("transformers")
    paged = [PagedLlama(workload.llama(0, "cpu", **SMALL), 8, 4, 8) for _ in range(2)]
    for model in paged:
        for cache in model.caches:
            for x in cache:
                x.fill_(float("nan"))
    padded = graph.PaddedStep(paged[1], 16, 4, "cpu")
    padded.inputs.ids.fill_(5)
    first, second = Request([1] * 9, 4, pages=[3, 1, 6]), Request([2, 4, 3], 4, pages=[0])
    for chunks in ([Chunk(first, 0, 9)], [Chunk(first, 8, 9), Chunk(second, 0, 3)]):
        batch = batch_of(chunks, paged[0].width, "cpu")
        expected = paged[0].step(batch)
        assert torch.allclose(padded.step(batch), expected, atol=1e-5)
    for a, b in zip(*(model.caches for model in paged)):
        for x, y in zip(a, b):
            assert torch.allclose(x, y, atol=1e-5, equal_nan=True)


def test_another_token_is_a_failure():
    request = Request([1], 3, generated=[5, 6, 7], logits=[1.0, 2.0, 9.0])
    same = expected.Expected([5, 6, 7], [1.0, 2.5, 9.0], [0.5, 0.3, 0.4])
    assert expected.compare(request, same) == (True, None, 0.3, 0.5)
    found = expected.compare(request, same._replace(tokens=[5, 8, 7]))
    assert found == (False, 1, 0.3, 0.5)
    row = dict(is_equal=False, differs_at=1, gap=0.3, error=0.5)
    said = command.summary(
        {"ok": False, "requests": [row], "smallest_gap": 0.3, "largest_error": 0.5}
    )
    assert said.startswith("FAIL") and "request 0 at token 1" in said


# the command


def invoke(*arguments):
    return testing.CliRunner().invoke(command.generate, ["--device", "cpu", *arguments])


def test_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = invoke()
    assert done.exit_code == 2
    assert "pip install 'tilewise[hf]'" in " ".join(done.output.split())


def test_what_has_no_room_is_a_usage_error():
    pytest.importorskip("transformers")
    for arguments, word in ((["--pages", "3"], "3 pages"), (["--split-size", "4k"], "context")):
        done = invoke(*arguments)
        assert done.exit_code == 2, done.output
        assert word in done.output


@pytest.mark.slow
def test_sixteen_requests():
    pytest.importorskip("transformers")
    done = invoke("--json")
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)
    assert results["ok"] and len(results["requests"]) == 16
    assert results["preemptions"] > 0
    assert min(one["prompt"] for one in results["requests"]) > 2 * 256
    assert min(results["tokens_per_second"].values()) > 0


def test_exit_code_3_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = testing.CliRunner().invoke(command.generate, ["--device", "cuda"])
    assert done.exit_code == 3 and "tilewise info" in done.output
