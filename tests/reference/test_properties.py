"""What attention is, whatever computes it: properties that hold at any size."""

import functools

import pytest
import torch
from helpers.tiers import sample_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.bench.timer import one_thread
from tilewise import attention, merge_states
from tilewise.emulation import use_interpreter

# A tile costs the interpreter 3 ms, so that it gets small tensors and few of them.
EXAMPLES = [("cpu", 20), ("cpu", 60), ("portable", 3), ("portable", 10)]

pytestmark = pytest.mark.parametrize(
    "backend, examples", sample_rows(EXAMPLES, ("cpu", 20), ("portable", 3))
)
seqlens = st.integers(1, 90)
headdims = st.sampled_from([1, 8, 16, 33])
heads = st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)])
seeds = st.integers(0, 2**16)


def examples(**strategies):
    """`given`, with as many examples as the backend can afford."""

    def wrap(test):
        @functools.wraps(test)
        def run(backend, examples):
            def example(**drawn):
                test(backend, **drawn)

            limited = settings(max_examples=examples, deadline=None, database=None)
            with use_interpreter():
                limited(given(**strategies)(example))()

        del run.__wrapped__  # pytest reads the signature
        return run

    return wrap


def qkv(seed, seqlen_q, seqlen_k, headdim, heads, batch=2):
    generator = torch.Generator().manual_seed(seed)
    nheads, nheads_k = heads
    return (
        torch.randn(batch, seqlen_q, nheads, headdim, generator=generator),
        torch.randn(batch, seqlen_k, nheads_k, headdim, generator=generator),
        torch.randn(batch, seqlen_k, nheads_k, headdim, generator=generator),
    )


def close(x, y):
    torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5)


@examples(seed=seeds, q=seqlens, k=seqlens, d=headdims, h=heads, causal=st.booleans())
def test_permuting_the_batch_permutes_the_result(backend, seed, q, k, d, h, causal):
    """To the bit, but for torch's kernel for the CPU: it is so itself only in one thread, and where
    each row of the batch begins at a multiple of 64 bytes (torch 2.13 on an AMD EPYC; else two
    units in the last place).
    """
    inputs = qkv(seed, q, k, d, h, batch=3)
    order = torch.tensor([2, 0, 1])
    permuted = [x[order] for x in inputs]
    with one_thread():
        out, lse = attention(*inputs, causal=causal, backend=backend, return_lse=True)
        out2, lse2 = attention(*permuted, causal=causal, backend=backend, return_lse=True)
    is_aligned = all(x.stride(0) * x.itemsize % 64 == 0 for x in inputs)
    ulps = 0.0 if backend == "portable" or is_aligned else 1e-6
    for before, after in ((out, out2), (lse, lse2)):
        torch.testing.assert_close(before[order], after, rtol=ulps, atol=ulps)


@examples(seed=seeds, q=seqlens, k=st.integers(2, 90), d=headdims, h=heads, cut=st.floats(0, 1))
def test_merging_over_any_cut_is_the_whole(backend, seed, q, k, d, h, cut):
    queries, keys, values = qkv(seed, q, k, d, h)
    at = round(cut * k)
    whole = attention(queries, keys, values, backend=backend, return_lse=True)
    left, right = (
        attention(queries, keys[:, s], values[:, s], backend=backend, return_lse=True)
        for s in (slice(0, at), slice(at, None))
    )
    for merged, expected in zip(merge_states(*left, *right), whole):
        close(merged, expected)


@examples(seed=seeds, q=seqlens, k=seqlens, d=headdims, causal=st.booleans())
def test_gqa_is_repeated_keys(backend, seed, q, k, d, causal):
    queries, keys, values = qkv(seed, q, k, d, (6, 2))
    shared = attention(queries, keys, values, causal=causal, backend=backend)
    keys, values = (x.repeat_interleave(3, dim=2) for x in (keys, values))
    close(shared, attention(queries, keys, values, causal=causal, backend=backend))


@examples(seed=seeds, q=seqlens, k=seqlens, d=headdims, h=heads, more=st.integers(0, 100))
def test_a_window_as_long_as_the_sequence_is_causal(backend, seed, q, k, d, h, more):
    inputs = qkv(seed, q, k, d, h)
    windowed = attention(*inputs, window=(max(q, k) + more, 0), backend=backend)
    close(windowed, attention(*inputs, causal=True, backend=backend))


@examples(seed=seeds, q=seqlens, k=seqlens, d=headdims, h=heads)
def test_a_high_softcap_is_none(backend, seed, q, k, d, h):
    inputs = qkv(seed, q, k, d, h)
    capped = attention(*inputs, softcap=1e3, backend=backend)
    torch.testing.assert_close(capped, attention(*inputs, backend=backend), rtol=1e-3, atol=1e-3)


@examples(seed=seeds, q=seqlens, k=seqlens, d=headdims, h=heads)
def test_keys_have_no_order(backend, seed, q, k, d, h):
    queries, keys, values = qkv(seed, q, k, d, h)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    out, lse = attention(queries, keys, values, backend=backend, return_lse=True)
    out2, lse2 = attention(
        queries, keys[:, order], values[:, order], backend=backend, return_lse=True
    )
    close(out, out2)
    close(lse, lse2)


@examples(seed=seeds, q=seqlens, k=seqlens, d=headdims, h=heads, shift=st.floats(-20, 20))
def test_ones_average_to_one(backend, seed, q, k, d, h, shift):
    """Rows of P sum to 1, however large the scores."""
    queries, keys, values = qkv(seed, q, k, d, h)
    out = attention(queries * shift, keys, torch.ones_like(values), backend=backend)
    close(out, torch.ones_like(out))


@examples(seed=seeds, q=seqlens, k=seqlens, d=headdims, h=heads, at=st.floats(0, 1))
def test_the_future_changes_nothing(backend, seed, q, k, d, h, at):
    """Causal: what row i gives does not depend on keys after its diagonal, bit by bit."""
    queries, keys, values = qkv(seed, q, k, d, h)
    before = attention(queries, keys, values, causal=True, backend=backend)
    key = round(at * (k - 1))
    keys[:, key], values[:, key] = 7.0, -7.0
    after = attention(queries, keys, values, causal=True, backend=backend)
    rows = max(0, key - (k - q))
    assert torch.equal(before[:, :rows], after[:, :rows])
