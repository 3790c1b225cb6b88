"""`tilewise.batch_invariant`: a context and a switch, part of a call's signature and of the guards
of a compiled graph.
"""

import importlib.util

import pytest
import torch

import tilewise
from tilewise.frontend import invariance
from tilewise.kernels.cpu import cache as cpu_cache
from tilewise.ops import calls


@pytest.fixture(autouse=True)
def restored():
    before = invariance.is_on
    yield
    invariance.is_on = before


@pytest.fixture
def sizes(monkeypatch):
    """The split_size of each call, 0 where none is asked for."""
    seen, forward = [], cpu_cache.forward

    def noted(cached, out, lse):
        seen.append(cached.split_size)
        return forward(cached, out, lse)

    monkeypatch.setattr(cpu_cache, "forward", noted)
    return seen


def call(**options):
    q, k = torch.randn(1, 2, 12, 16), torch.randn(1, 9, 2, 16)
    used = torch.tensor([9], dtype=torch.int32)
    return tilewise.flash_attn_with_kvcache(q, k, k, cache_seqlens=used, causal=True, **options)


def test_blocks_nest_and_what_was_before_comes_back(sizes):
    call()
    with tilewise.batch_invariant():
        call()
        with tilewise.batch_invariant(False):
            call()
        call()
        with pytest.raises(ZeroDivisionError), tilewise.batch_invariant(False):
            raise ZeroDivisionError
        call()
    call()
    assert sizes == [0, 1024, 0, 1024, 1024, 0]


def test_a_switch(sizes):
    tilewise.batch_invariant()
    call()
    tilewise.batch_invariant(False)
    call()
    assert sizes == [1024, 0]
    with pytest.raises(tilewise.ArgumentError, match="enabled=2"):
        tilewise.batch_invariant(2)


def test_a_split_size_of_a_calls_own_wins(sizes):
    q, k = torch.randn(1, 2, 12, 16), torch.randn(1, 9, 2, 16)
    at = dict(page_table=torch.zeros(1, 1, dtype=torch.int32))
    with tilewise.batch_invariant():
        tilewise.attention(q, k, k, split_size=4, **at)
        tilewise.attention(q, k, k, **at)
    tilewise.attention(q, k, k, split_size=4, **at)
    assert sizes == [4, 1024, 4]


def test_a_block_again_and_a_decorator(sizes):
    block = tilewise.batch_invariant()
    for _ in range(5):
        with block:
            call()
        call()
    decorated = tilewise.batch_invariant()(call)
    call()
    decorated()
    call()
    assert sizes == [1024, 0] * 5 + [0, 1024, 0]


def test_blocks_that_overlap_are_an_error(sizes):
    first = tilewise.batch_invariant()
    first.__enter__()
    second = tilewise.batch_invariant()
    second.__enter__()
    for block in (first, second):
        with pytest.raises(RuntimeError, match="overlap"):
            block.__exit__(None, None, None)
        call()
    assert sizes == [1024, 1024] and invariance.depth == 0  # bits are kept


@pytest.mark.parametrize("value, expected", [("1", True), ("0", False), (None, False)])
def test_the_environment_says_it_at_import(value, expected, monkeypatch):
    monkeypatch.delenv("TILEWISE_BATCH_INVARIANT", raising=False)
    if value is not None:
        monkeypatch.setenv("TILEWISE_BATCH_INVARIANT", value)
    spec = importlib.util.spec_from_file_location(invariance.__name__, invariance.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.is_on is expected


def test_known_calls_are_found_by_it(monkeypatch):
    """A warm call finds no step that was made under the other."""
    calls._entry.cache_clear()
    words = []
    find = tilewise.frontend.kv_cache.find

    def noted(tensors, plain, **options):
        words.append(plain)
        return find(tensors, plain=plain, **options)

    monkeypatch.setattr(tilewise.frontend.kv_cache, "find", noted)
    monkeypatch.setattr(tilewise.frontend.attention, "find", noted)
    for enabled in (True, False):
        with tilewise.batch_invariant(enabled):
            call()
            tilewise.attention(*torch.randn(3, 1, 2, 2, 16))
    assert words[0] != words[2] and len(words) == 4
    assert [x.count(True) - y.count(True) for x, y in zip(words[:2], words[2:])] == [1, 1]


def test_a_compiled_graph_is_guarded_by_it():
    graphs = []

    def backend(graph, inputs):
        calls = [x for x in graph.graph.nodes if "flash_attn_cache" in str(x.target)]
        graphs.extend(x.kwargs["split_size"] for x in calls)
        return graph.forward

    q, k = torch.randn(1, 2, 12, 16), torch.randn(1, 9, 2, 16)
    table = torch.zeros(1, 1, dtype=torch.int32)
    step = torch.compile(tilewise.attention, backend=backend, fullgraph=True)
    for enabled in (False, True, False, True):
        with tilewise.batch_invariant(enabled):
            step(q, k, k, page_table=table)

    def inside(q, k, table):
        with tilewise.batch_invariant():
            return tilewise.attention(q, k, k, page_table=table)

    torch.compile(inside, backend=backend, fullgraph=True)(q, k, table)
    assert graphs == [0, 1024, 1024] and not invariance.is_on
