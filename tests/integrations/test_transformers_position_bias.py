"""Position biases: T5 and similar models, with gradients of the learned biases."""

import itertools

import pytest
import torch

transformers = pytest.importorskip("transformers")

from integrations.stored_models import (  # noqa: E402
    CLOSE,
    SLOW,
    WAYS,
    checkpoint,
    generated_agree,
    gradients_agree,
    holes,
    shaken,
    some,
)
from integrations.test_transformers import (  # noqa: E402
    padded,
    pair,
    tokens,
)
from integrations.test_transformers_packed import (  # noqa: E402
    LENGTHS,
    starts_of,
    told_by_lengths,
)

from tilewise import attention  # noqa: E402
from tilewise.integrations import transformers as integration  # noqa: E402

T5 = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64, dropout_rate=0.0)
T5 |= dict(relative_attention_num_buckets=8, relative_attention_max_distance=10)
T5 |= dict(pad_token_id=0, decoder_start_token_id=0)
SEQ2SEQ = ["t5", "mt5", "umt5"]


def translators(name):
    config = transformers.AutoConfig.for_model(name, **T5)
    return shaken(*pair(config, transformers.AutoModelForSeq2SeqLM))


@pytest.mark.parametrize("name", some(SEQ2SEQ, ["t5"]))
def test_position_bias(name):
    eager, ours = translators(name)
    whole = torch.ones(3, 12, dtype=torch.long)
    for mask in (whole, padded("left"), padded("right"), holes()):
        batch = dict(input_ids=tokens(), attention_mask=mask, decoder_input_ids=tokens())
        with torch.no_grad():
            expected, got = eager(**batch).logits, ours(**batch).logits
            torch.testing.assert_close(got, expected, **CLOSE)
            batch["decoder_attention_mask"] = mask  # as if targets had padding
            expected, got = eager(**batch).logits, ours(**batch).logits
        real = mask.bool()
        torch.testing.assert_close(got[real], expected[real], **CLOSE)


@pytest.mark.parametrize("reentrant", some([None, True, False], [None, True]))
@pytest.mark.parametrize("name", some(SEQ2SEQ, ["t5"]))
def test_gradients_of_position_bias(name, reentrant):
    eager, ours = translators(name)
    checkpoint(reentrant, eager, ours)
    ids = tokens()
    gradients_agree(eager, ours, input_ids=ids, attention_mask=padded("right"), labels=ids.flip(1))
    learned = [n for n, w in ours.named_parameters() if "relative" in n and w.grad.abs().max() > 0]
    assert len(learned) == (4 if name == "umt5" else 2)


@pytest.mark.parametrize("way", some(["greedy", "beams", "static"], ["static"]))
@pytest.mark.parametrize("name", some(SEQ2SEQ, ["t5"]))
def test_translates(name, way):
    generated_agree(*translators(name), tokens(), attention_mask=padded("right"), **WAYS[way])


def test_position_bias_of_packed_rows():
    """Its keys are counted through the row."""
    module = torch.nn.Module()
    q, k, v = torch.randn(3, 1, 2, sum(LENGTHS), 8).unbind(0)
    bias = torch.randn(1, 2, sum(LENGTHS), sum(LENGTHS), requires_grad=True)
    how = dict(position_bias=bias, **told_by_lengths())
    out, _ = integration.attention_forward(module, q, k, v, None, is_causal=True, **how)
    (grad,) = torch.autograd.grad(out.square().sum(), bias)
    expected, ends = [], starts_of().tolist()
    for start, stop in itertools.pairwise(ends):
        parts = (x[:, :, start:stop] for x in (q, k, v))
        part = bias[:, :, start:stop, start:stop]
        expected.append(attention(*parts, causal=True, bias=part, layout="bhsd").transpose(1, 2))
    expected = torch.cat(expected, 1)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.square().sum(), bias)[0])
    other = told_by_lengths() | dict(cu_seq_lens_k=starts_of((4, 3, 6, 2)))
    with pytest.raises(NotImplementedError, match="whose keys are not their queries"):
        integration.attention_forward(module, q, k, v, None, position_bias=bias, **other)


@SLOW
@pytest.mark.parametrize("side", ["none", "right"])
def test_position_bias_compiles_whole(side):
    torch._dynamo.reset()
    eager, ours = translators("t5")
    step = torch.compile(ours, fullgraph=True, backend="aot_eager")
    ids = tokens()
    mask = None if side == "none" else padded(side)
    gradients_agree(eager, step, input_ids=ids, attention_mask=mask, labels=ids.flip(1))
