"""Memory that is written: elements that share it, and tensors that do, are refused by name, exactly
where there is an address twice.
"""

import contextlib
import itertools
import random

import pytest
import torch

import tilewise
from tilewise import cache
from tilewise.errors import ArgumentError
from tilewise.kernels.common.shared_memory import overlaps, share_memory, span_of
from tilewise.testing import use_emulator, use_interpreter

POOL = torch.zeros(8192, dtype=torch.uint8)
STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 48)


def drawn(rng, dtype):
    """A tensor with any strides, somewhere in a pool that all are in."""
    shape = [rng.randint(0 if rng.random() < 0.02 else 1, 4) for _ in range(rng.randint(1, 4))]
    pool = POOL.view(dtype)
    return pool.as_strided(shape, [rng.choice(STEPS) for _ in shape], rng.randint(0, 60))


def bytes_of(x):
    """The addresses of each element's bytes."""
    for place in itertools.product(*map(range, x.shape)):
        first = x.data_ptr() + x.itemsize * sum(i * s for i, s in zip(place, x.stride()))
        yield range(first, first + x.itemsize)


@pytest.mark.parametrize("seed", range(8))
def test_both_are_exact(seed):
    """Whether an address is there twice, as counting says."""
    rng, outcomes = random.Random(seed), set()
    for _ in range(100):
        x, y = (drawn(rng, rng.choice((torch.uint8, torch.float16, torch.float32))) for _ in "xy")
        first, second = (list(itertools.chain(*bytes_of(z))) for z in (x, y))
        assert overlaps(x) == (len(set(first)) < len(first))
        if not first or not second:
            continue
        is_shared = not set(first).isdisjoint(second)
        assert share_memory(x, y) == share_memory(y, x) == is_shared
        assert span_of(x) == (min(first), max(first) + 1)
        outcomes.add((overlaps(x), is_shared))
    assert len(outcomes) == 4


def test_caches_in_one_allocation_share_nothing():
    """Neither pages side by side, nor layers, nor heads: what engines have."""
    pool = torch.zeros(5, 2, 16, 3, 2, 8)
    for dim in (0, 1, 3, 4):
        views = pool.unbind(dim)
        assert not any(map(overlaps, views))
        assert not any(share_memory(x, y) for x, y in itertools.combinations(views, 2))
    assert not share_memory(*torch.zeros(4, 2, 3, 24).split([8, 16], -1))


SHAPE = 1, 2, 2, 16  # of q and out
STRIDES = {"expanded": (0, 0, 0, 1), "rows": (64, 31, 16, 1), "heads": (64, 32, 8, 1)}
OUTS = {
    **{
        name: lambda q, k, x=x: torch.zeros_like(q).as_strided(SHAPE, x)
        for name, x in STRIDES.items()
    },
    "q": lambda q, k: q,
    "part of k": lambda q, k: k[:, 3:5],
    "negated": lambda q, k: torch._neg_view(torch.zeros_like(q)),
}


@pytest.mark.parametrize("backend", ["cpu", "portable", "hopper"])
@pytest.mark.parametrize("kind", OUTS)
def test_out_is_memory_of_its_own(kind, backend):
    q, k = torch.randn(SHAPE).half(), torch.randn(1, 64, 2, 16).half()
    table, used = (torch.tensor(x, dtype=torch.int32) for x in ([[0]], [9]))
    options = dict(page_table=table, seqused_k=used, backend=backend)
    with use_interpreter(), use_emulator():
        with pytest.raises(ArgumentError, match="^out (has|is)"):
            tilewise.attention(q, k, k.clone(), out=OUTS[kind](q, k), **options)
        out = torch.zeros_like(q)
        assert tilewise.attention(q, k, k.clone(), out=out, **options) is out


def one_token():
    k_cache, v_cache, k, v = torch.zeros(4, 2, 8, 1, 4).clone().unbind(0)
    return dict(k_cache=k_cache, v_cache=v_cache, k=k[:, :1] + 1, v=v[:, :1] + 2)


APPENDS = {
    "k_cache has shape": lambda x: dict(k_cache=x["k_cache"][:1].expand(2, -1, -1, -1)),
    "v_cache has shape": lambda x: dict(v_cache=x["v_cache"][:, :1].expand(-1, 8, -1, -1)),
    "k_cache is written and shares memory with v_cache": lambda x: dict(v_cache=x["k_cache"]),
    "k_cache is written and shares memory with k:": lambda x: dict(k=x["k_cache"][:, 3:4]),
    "v_cache is written and shares memory with v:": lambda x: dict(v=x["v_cache"][:, :1]),
    "v_cache is written and shares memory with k:": lambda x: dict(k=x["v_cache"][:, :1]),
    "k_cache is a lazily negated view": lambda x: dict(k_cache=torch._neg_view(x["k_cache"])),
}


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("message", APPENDS)
def test_an_append_writes_memory_of_its_own(message, interpreted):
    arguments = one_token()
    arguments |= APPENDS[message](arguments)
    used = torch.tensor([3, 4], dtype=torch.int32)
    with use_interpreter() if interpreted else contextlib.nullcontext():
        with pytest.raises(ArgumentError, match=f"^{message}"):
            cache.append(**arguments, seqused_k=used)


def test_scales_that_are_written_are_no_others():
    k_cache, v_cache = torch.zeros(2, 2, 8, 1, 4, dtype=torch.int8).unbind(0)
    new, used = torch.ones(2, 1, 1, 4), torch.tensor([3, 4], dtype=torch.int32)
    scales = torch.ones(2, 8, 1)
    with pytest.raises(ArgumentError, match="^k_descale is written and shares .* v_descale"):
        arguments = k_cache, v_cache, new, new
        cache.append(*arguments, seqused_k=used, k_descale=scales, v_descale=scales)


@pytest.mark.parametrize("apart", [0, 1, 2])
def test_pages_of_one_pool_take_an_append(apart):
    """As transformers' continuous batching has them: page n of V is page n + 1 of K."""
    pool = torch.zeros(6, 8, 1, 4)
    k_cache, v_cache = pool[: 6 - apart], pool[apart:]
    arguments = one_token() | dict(k_cache=k_cache, v_cache=v_cache)
    arguments |= dict(page_table=torch.tensor([[0], [3 - apart]], dtype=torch.int32))
    arguments |= dict(seqused_k=torch.tensor([3, 4], dtype=torch.int32))
    if not apart:
        with pytest.raises(ArgumentError, match="^k_cache is written and shares memory"):
            cache.append(**arguments)
        return
    cache.append(**arguments)
    expected = torch.zeros(6, 8)
    for page, row, value in ((0, 2, 1), (3 - apart, 3, 1), (apart, 2, 2), (3, 3, 2)):
        expected[page, row] = value
    assert torch.equal(pool[:, :, 0, 0], expected)


def test_a_cache_in_one_allocation_takes_an_append():
    pool = torch.zeros(2, 2, 8, 1, 4)
    used = torch.tensor([3, 4], dtype=torch.int32)
    one = one_token()
    cache.append(*pool.unbind(1), one["k"], one["v"], seqused_k=used)
    assert pool.sum((0, 2, 3, 4)).tolist() == [8.0, 16.0]


def test_merged_results_are_written_to_memory_of_their_own():
    out, lse = torch.randn(2, 1, 3, 2, 8), torch.randn(2, 1, 3, 2)
    with pytest.raises(ArgumentError, match="^out has shape"):
        rows = torch.zeros(64).as_strided((1, 3, 2, 8), (48, 15, 8, 1))
        tilewise.flash_attn_combine(out, lse, rows)
