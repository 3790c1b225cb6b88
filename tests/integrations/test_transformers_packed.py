"""Sequences packed in one row: each gets what it gets alone, and contradictions are refused."""

import pytest
import torch
from helpers.transformers_words import CACHE

transformers = pytest.importorskip("transformers")

from integrations.test_transformers import DECODERS, TOKENS, config_of, padded, pair, tokens  # noqa: E402

from tilewise import ArgumentError  # noqa: E402
from tilewise.integrations import transformers as integration  # noqa: E402

LENGTHS = (5, 1, 7, 2)


def starts_of(lengths=LENGTHS, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def told_by_lengths(lengths=LENGTHS, **how):
    """FlashAttentionKwargs."""
    starts, longest = starts_of(lengths, **how), max(lengths)
    return dict(
        cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=longest, max_length_k=longest
    )


def told_by_positions(lengths=LENGTHS):
    return dict(position_ids=torch.cat([torch.arange(n) for n in lengths])[None])


OPT = transformers.OPTConfig(
    **TOKENS,
    vocab_size=64,
    hidden_size=32,
    word_embed_proj_dim=32,
    ffn_dim=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    dropout=0.0,
)
TOLD = {
    "lengths": told_by_lengths(),
    "positions": told_by_positions(),
    "both": told_by_lengths() | told_by_positions(),
    "long": told_by_lengths(dtype=torch.int64) | told_by_positions(),
    "padded": told_by_lengths((*LENGTHS, 0, 0)) | told_by_positions(),
    "numbered": told_by_positions()
    | dict(seq_idx=torch.tensor([[0] * 5 + [1] + [2] * 7 + [3] * 2])),
}


def alone(model, ids):
    """The logits of each sequence by itself, side by side."""
    parts = ids.split(LENGTHS, dim=1)
    return torch.cat([model(part, use_cache=False).logits for part in parts], 1)


def packed(model, ids, use_cache=False, **told):
    return model(ids, use_cache=use_cache, **told).logits


@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("name", DECODERS)
def test_each_sequence_is_alone(name, told):
    if name == "gpt2" and "position_ids" not in TOLD[told]:
        pytest.skip("it learned a vector for each position, and counts them through the row")
    eager, ours = pair(config_of(name))
    ids = tokens(1, sum(LENGTHS))
    with torch.no_grad():
        expected, got = alone(eager, ids), packed(ours, ids, **TOLD[told])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("told", TOLD)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "opt"])
@pytest.mark.parametrize("hidden_by", ["cache", "mask"])
def test_what_the_mask_is_not_told(hidden_by, name, told):
    """With a cache or a mask of ones transformers looks at no position ids; the layer does."""
    if name == "opt" and "position_ids" not in TOLD[told]:
        pytest.skip("it learned a vector for each position, and counts them through the row")
    eager, ours = pair(OPT if name == "opt" else config_of(name))
    ids = tokens(1, sum(LENGTHS))
    how = (
        dict(use_cache=True) if hidden_by == "cache" else dict(attention_mask=torch.ones_like(ids))
    )
    with torch.no_grad():
        got = packed(ours, ids, **how, **TOLD[told])
        torch.testing.assert_close(got, alone(eager, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("use_cache", [False, True])
def test_each_row_of_a_batch_is_packed(use_cache):
    eager, ours = pair(config_of("mistral"))
    ids = tokens(2, 12)
    lengths = (5, 1, 6), (3, 7, 2)
    positions = torch.cat([told_by_positions(row)["position_ids"] for row in lengths])
    with torch.no_grad():
        rows = [
            torch.cat(
                [eager(part, use_cache=False).logits for part in ids[i : i + 1].split(row, 1)], 1
            )
            for i, row in enumerate(lengths)
        ]
        for each, expected in (
            (positions, torch.cat(rows)),
            (
                positions[1:],
                torch.cat([packed(ours, ids[:1], position_ids=positions[1:]), rows[1]]),
            ),
        ):
            got = packed(ours, ids, use_cache, position_ids=each)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_position_ids_of_one_sequence_are_no_packed_ones():
    """They may begin anywhere, leave a gap, stand still, and restart behind padding."""
    eager, ours = pair(config_of("llama"))
    ids = tokens(2)
    rising = torch.arange(12)[None]
    mask = padded("left", (12, 7))
    for positions in (rising + 5, rising * 2 + 1, rising // 2 + 1, mask.cumsum(1) - 1):
        how = dict(position_ids=positions.clamp(min=0), attention_mask=torch.ones_like(ids))
        if positions.shape[0] == 2:
            how["attention_mask"] = mask
        with torch.no_grad():
            expected, got = eager(ids, **how).logits, ours(ids, **how).logits
        real = how["attention_mask"].bool()
        torch.testing.assert_close(got[real], expected[real], atol=1e-5, rtol=1e-5)


REFUSED = "position_ids restart within a row: packed sequences are supported"


@pytest.mark.parametrize("side", ["left", "right"])
def test_packed_rows_with_padding_are_refused(side):
    _, ours = pair(config_of("llama"))
    positions = told_by_positions((3, 2, 4, 3))["position_ids"].expand(2, -1)
    with pytest.raises(NotImplementedError, match=REFUSED):
        packed(ours, tokens(2), position_ids=positions, attention_mask=padded(side, (12, 10)))


def test_packed_rows_and_other_keys_are_refused():
    _, ours = pair(config_of("llama"))
    ids = tokens(1)
    with pytest.raises(NotImplementedError, match=REFUSED):
        cache = transformers.StaticCache(config=ours.config, max_cache_len=32)
        ours(ids, **{CACHE: cache}, **told_by_positions((5, 7)))
    with pytest.raises(NotImplementedError, match=REFUSED):
        cache = getattr(ours(ids[:, :5]), CACHE)
        ours(ids[:, 5:], **{CACHE: cache}, **told_by_positions((4, 3)))
    with pytest.raises(NotImplementedError, match=REFUSED):
        positions = told_by_positions((5, 7))["position_ids"] + 1
        ours(ids, position_ids=positions, use_cache=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_position_ids_are_read_once_a_forward(monkeypatch, mode):
    from tilewise.integrations.transformers import positions as module

    made, real = [], module.starts_from
    monkeypatch.setattr(module, "starts_from", lambda begins: made.append(1) or real(begins))
    eager, ours = pair(config_of("llama"))
    ids = tokens(1, sum(LENGTHS))
    with mode():
        positions = told_by_positions()["position_ids"]
        for _ in range(2):
            got = packed(ours, ids, True, position_ids=positions)
        assert len(made) == 2 and ours.config.num_hidden_layers == 2
        torch.testing.assert_close(got, alone(eager, ids), atol=1e-5, rtol=1e-5)
        positions.copy_(torch.arange(sum(LENGTHS))[None])  # the next forward reads them again
        got = packed(ours, ids, True, position_ids=positions)
        torch.testing.assert_close(got, eager(ids).logits, atol=1e-5, rtol=1e-5)


def test_what_the_collator_makes():
    eager, ours = pair(config_of("llama"))
    ids = tokens(1, sum(LENGTHS))
    collate = transformers.DataCollatorWithFlattening(
        return_tensors="pt", return_flash_attn_kwargs=True, return_seq_idx=True
    )
    batch = dict(collate([{"input_ids": part[0].tolist()} for part in ids.split(LENGTHS, dim=1)]))
    del batch["labels"]
    with torch.no_grad():
        expected = alone(eager, ids)
        got = packed(ours, batch.pop("input_ids"), **batch)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_gradients():
    eager, ours = pair(config_of("gpt_oss"))
    ids = tokens(1, sum(LENGTHS))
    weights = torch.randn(1, sum(LENGTHS), 64)
    (alone(eager.train(), ids) * weights).sum().backward()
    (packed(ours.train(), ids, **TOLD["both"]) * weights).sum().backward()
    for (name, one), other in zip(eager.named_parameters(), ours.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, atol=1e-4, rtol=1e-4, msg=name)


def attend(**kwargs):
    """One call of the attention function without a mask."""
    module = torch.nn.Module()
    q, k, v = torch.randn(3, 1, 2, sum(LENGTHS), 8).unbind(0)
    out, _ = integration.attention_forward(module, q, k, v, None, **kwargs)
    return out, (x.transpose(1, 2) for x in (q, k, v))


@pytest.mark.parametrize("causal", [False, True])
def test_the_call_of_a_layer(causal):
    """Keys may be other sequences than the queries; a window is one within each of them."""
    from tilewise import attention

    starts = dict(cu_seqlens_q=starts_of(), cu_seqlens_k=starts_of((4, 3, 6, 2)))
    told = {f"cu_seq_lens_{side}": starts[f"cu_seqlens_{side}"] for side in "qk"}
    out, inputs = attend(**told, is_causal=causal, sliding_window=3)
    window = (2, 0 if causal else 2)
    expected = attention(*(x[0] for x in inputs), **starts, causal=causal, window=window)
    torch.testing.assert_close(out[0], expected)


OTHERS = [
    dict(cu_seq_lens_q=starts_of((5, 1, 6, 3)), cu_seq_lens_k=starts_of((5, 1, 6, 3))),
    dict(cu_seq_lens_q=starts_of(), cu_seq_lens_k=starts_of((6, 7, 2))),
    dict(cu_seq_lens_q=starts_of((15,)), cu_seq_lens_k=starts_of((15,))),
    dict(cu_seq_lens_q=starts_of((5, 1, 7)), cu_seq_lens_k=starts_of((5, 1, 7))),
]


@pytest.mark.parametrize("other", OTHERS)
def test_positions_and_lengths_must_agree(other):
    _, ours = pair(config_of("llama"))
    with pytest.raises(ArgumentError, match="different sequences"):
        packed(ours, tokens(1, sum(LENGTHS)), **told_by_positions(), **other)


def test_they_are_compared_once_a_forward(monkeypatch):
    from tilewise.integrations.transformers import packed as module

    compared, real = [], module._are_those_of
    monkeypatch.setattr(module, "_are_those_of", lambda *asked: compared.append(1) or real(*asked))
    _, ours = pair(config_of("llama"))
    with torch.no_grad():
        for _ in range(2):
            packed(ours, tokens(1, sum(LENGTHS)), **TOLD["both"])
    assert len(compared) == 2 and ours.config.num_hidden_layers == 2


def test_one_row_without_padding():
    _, ours = pair(config_of("llama"))
    told = told_by_lengths((5, 7))
    with pytest.raises(NotImplementedError, match="this batch has 3"):
        packed(ours, tokens(), **told)
    mask = torch.ones(1, 12, dtype=torch.long)
    with torch.no_grad():
        packed(ours, tokens(1), attention_mask=mask, **told)
    mask[0, :2] = 0
    with pytest.raises(NotImplementedError, match="leave the mask out"):
        packed(ours, tokens(1), attention_mask=mask, **told)


def test_half_of_it_is_refused():
    starts = starts_of()
    with pytest.raises(ArgumentError, match="cu_seq_lens_k is missing"):
        attend(cu_seq_lens_q=starts)
    for name in ("max_length_q", "seq_idx"):
        with pytest.raises(NotImplementedError, match=f"{name}: packed sequences are supported"):
            attend(**{name: starts})


@pytest.mark.slow
def test_compiles_whole():
    """Packed by both, by lengths alone and not at all; a disagreement shows as it runs."""
    torch._dynamo.reset()
    eager, ours = pair(config_of("mistral"))
    ids = tokens(1, sum(LENGTHS))
    step = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = alone(eager, ids)
        for told in (TOLD["both"], TOLD["lengths"]):
            torch.testing.assert_close(packed(step, ids, **told), expected, atol=1e-5, rtol=1e-5)
        whole = eager(ids, use_cache=False).logits
        torch.testing.assert_close(packed(step, ids), whole, atol=1e-5, rtol=1e-5)
        with pytest.raises(RuntimeError, match="different sequences"):
            packed(step, ids, **(told_by_positions() | told_by_lengths((5, 1, 6, 3))))
        for use_cache in (False, True):
            with pytest.raises(RuntimeError, match="pass cu_seq_lens_q"):
                packed(step, ids, use_cache, **told_by_positions())
