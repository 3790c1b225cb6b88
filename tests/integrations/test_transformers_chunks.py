"""Chunked attention (Llama 4), and the masks that a compiled graph has to assume."""

import pytest
import torch
from helpers.transformers_words import CACHE

transformers = pytest.importorskip("transformers")

from integrations.test_transformers import (  # noqa: E402
    SIZES,
    TOKENS,
    config_of,
    padded,
    pair,
    tokens,
)
from integrations.test_transformers_packed import (  # noqa: E402
    LENGTHS,
    TOLD,
    alone,
    packed,
    told_by_lengths,
    told_by_positions,
)

from tilewise import ArgumentError  # noqa: E402
from tilewise.integrations.transformers.chunks import Span, chunk_starts, kept_keys  # noqa: E402


def llama4(chunk=4):
    """Three layers with chunks, and one without."""
    experts = dict(num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=48, head_dim=8)
    sizes = SIZES | TOKENS | dict(num_hidden_layers=4, attn_temperature_tuning=False)
    return transformers.Llama4TextConfig(**sizes, **experts, attention_chunk_size=chunk)


@pytest.mark.parametrize("chunk", [4, 7, 64])
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_logits(padding, chunk):
    eager, ours = pair(llama4(chunk))
    ids = tokens()
    mask = torch.ones_like(ids) if padding == "none" else padded(padding)
    with torch.no_grad():
        expected = eager(ids, attention_mask=mask).logits
        got = ours(ids, attention_mask=mask).logits
    real = mask.bool()
    torch.testing.assert_close(got[real], expected[real], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_generates_the_same_tokens(padding, cache):
    eager, ours = pair(llama4())
    ids = tokens()
    mask = torch.ones_like(ids) if padding == "none" else padded(padding)
    how = dict(attention_mask=mask, max_new_tokens=10, do_sample=False, eos_token_id=None)
    expected = eager.generate(ids, **how)
    assert torch.equal(ours.generate(ids, **how, cache_implementation=cache), expected)


def test_a_prompt_in_parts():
    """Queries of several chunks behind keys of earlier ones."""
    eager, ours = pair(llama4())
    ids = tokens(2)
    with torch.no_grad():
        expected = eager(ids).logits
        first = ours(ids[:, :3], use_cache=True)
        got = ours(ids[:, 3:], **{CACHE: getattr(first, CACHE)}, use_cache=True).logits
    torch.testing.assert_close(got, expected[:, 3:], atol=1e-5, rtol=1e-5)


def test_gradients():
    """Of real tokens: eager lets a padded query see the average of all keys."""
    eager, ours = pair(llama4())
    ids, mask = tokens(), padded("left")
    labels = ids.masked_fill(mask.cumsum(1) < 2, -100)
    for model in (eager, ours):
        model.train()
        model(ids, attention_mask=mask, labels=labels).loss.backward()
    for (name, one), other in zip(eager.named_parameters(), ours.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("told", TOLD)
def test_each_packed_sequence_has_chunks_of_its_own(told):
    """With a cache, too, where only lengths tell of them: its layers are handed no position ids."""
    eager, ours = pair(llama4())
    ids = tokens(1, sum(LENGTHS))
    if told == "numbered":  # seq_idx alone reaches the layers
        with pytest.raises(NotImplementedError, match="seq_idx: packed sequences"):
            packed(ours, ids, **TOLD[told])
        return
    with torch.no_grad():
        expected = alone(eager, ids)
        for use_cache in (False, True) if "cu_seq_lens_q" in TOLD[told] else (False,):
            got = packed(ours, ids, use_cache, **TOLD[told])
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_chunks_and_lengths_that_disagree():
    _, ours = pair(llama4())
    ids = tokens(1, sum(LENGTHS))
    with pytest.raises(ArgumentError, match="different sequences"):
        packed(ours, ids, **told_by_positions(), **told_by_lengths((5, 1, 6, 3)))
    first = ours(ids[:, :3], use_cache=True)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q and chunked attention"):
        packed(ours, ids[:, 3:], True, **{CACHE: getattr(first, CACHE)}, **told_by_lengths((12,)))


def test_padding_on_the_right_is_no_part_of_a_chunk():
    length, stops = 10, [10, 5, 0]
    row = Span(0, length)
    starts = chunk_starts(4, torch.tensor([0, 2, 0]), queries=row, keys=row).keys
    kept = kept_keys(starts, torch.tensor(stops), length).tolist()
    for start, end, count in zip(starts, starts[1:], kept, strict=False):
        keys = range(int(start), int(end))
        assert count == sum(key % length < stops[key // length] for key in keys)


@pytest.mark.parametrize("queries,keys", [(Span(0, 9), Span(0, 9)), (Span(6, 3), Span(2, 10))])
def test_where_chunks_begin(queries, keys):
    """Against the predicate, written out: every query sees what its segment holds before it."""
    padding, chunk = torch.tensor([0, 2, 5]), 4
    (first, count), (first_key, key_count), rows = queries, keys, len(padding)
    starts_q, starts_k = (x.tolist() for x in chunk_starts(chunk, padding, queries, keys))
    seen = torch.zeros(rows, count, key_count, dtype=torch.bool)
    for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        for q in range(q0, q1):
            for k in range(k0, k1 - (q1 - 1 - q)):
                assert q // count == k // key_count
                seen[q // count, q % count, k % key_count] = True
    q = torch.arange(first, first + count)[:, None]
    k = torch.arange(first_key, first_key + key_count)
    pad = padding[:, None, None]
    assert torch.equal(seen, ((q - pad) // chunk == (k - pad) // chunk) & (k <= q))
    assert (starts_q[-1], starts_k[-1]) == (rows * count, rows * key_count)


COMPILED = {
    "modernbert": (config_of("modernbert"), transformers.AutoModel, "last_hidden_state"),
    "llama4": (llama4(), transformers.AutoModelForCausalLM, "logits"),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_whole(name, batch, backend):
    """Windows to both sides, and chunks; then a step over a static cache."""
    config, kind, what = COMPILED[name]
    torch._dynamo.reset()
    eager, ours = pair(config, kind)
    ids = tokens(batch)
    step = torch.compile(ours, fullgraph=True, backend=backend)
    how = dict(use_cache=False) if name == "llama4" else {}
    with torch.no_grad():
        expected = getattr(eager(ids, **how), what)
        torch.testing.assert_close(getattr(step(ids, **how), what), expected, atol=1e-5, rtol=1e-5)
        if name != "llama4" or batch == 1:
            return
        cache = transformers.StaticCache(config=ours.config, max_cache_len=32)
        ours(ids[:, :7], **{CACHE: cache}, use_cache=True)
        for i in range(7, 12):
            last = step(ids[:, i : i + 1], **{CACHE: cache}, use_cache=True).logits
            torch.testing.assert_close(last[:, 0], expected[:, i], atol=1e-5, rtol=1e-5)
