"""Sizes that a compiler has symbols for, and those that it knows nothing of: one whole graph."""

import pytest
import torch
from helpers.tiers import sample
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounter

import tilewise
from tilewise.bert_padding import pad_input, unpad_input

sdpa, doubled = tilewise.scaled_dot_product_attention, tilewise.mods.score(lambda s, *at: s * 2)


def normal(*shapes):
    return [torch.randn(shape) for shape in shapes]


def compiled(function):
    torch._dynamo.reset()
    counter = CompileCounter()
    return torch.compile(function, backend=counter, fullgraph=True), counter


@pytest.mark.parametrize("shape", sample([(2, 1, 1, 9), (1, 1, 9, 9), (9, 9)], (2, 1, 1, 9)))
def test_bool_masks_of_any_length_are_one_graph(shape):
    def attend(q, mask):
        return sdpa(q, q, q, attn_mask=mask)

    again, counter = compiled(attend)
    for n in (9, 13, 17, 21):
        (q,) = normal((2, 3, n, 8))
        mask = torch.rand([n if size == 9 else size for size in shape]) < 0.7
        torch.testing.assert_close(again(q, mask), attend(q, mask))
    assert counter.frame_count == 2  # of the first length, and of all


CHUNKED = {
    "flash_attn_func": lambda x, n: tilewise.flash_attn_func(x, x, x, attention_chunk=n),
    "flash_attn_varlen_func": lambda x, n: tilewise.flash_attn_varlen_func(
        *x[[0, 0, 0]], *[torch.tensor([0, 7, 12]).int()] * 2, 7, 7, attention_chunk=n
    ),
}


@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_of_any_length(name):
    again, counter = compiled(CHUNKED[name])
    (x,) = normal((2, 12, 2, 8))
    for n in (3, 4, 6):
        torch.testing.assert_close(again(x, n), CHUNKED[name](x, n))
    assert counter.frame_count == 3


HEADS_FIRST, ROWS_FIRST = ((4, 3, 9, 8),) * 3, ((4, 9, 3, 8),) * 3
GROUPS, USED = ((4, 6, 9, 8), *HEADS_FIRST[1:]), torch.full((4,), 8, dtype=torch.int32)
OF_A_BATCH = {
    "sdpa": (lambda q, k, v: sdpa(q, k, v, is_causal=True), HEADS_FIRST),
    "sdpa, groups": (lambda q, k, v: sdpa(q, k, v, enable_gqa=True), GROUPS),
    "sdpa, bools": (lambda q, k, v, x: sdpa(q, k, v, x > 0), (*HEADS_FIRST, (4, 1, 9, 9))),
    "sdpa, bias": (lambda q, k, v, x: sdpa(q, k, v, x), (*HEADS_FIRST, (4, 1, 9, 9))),
    "flex": (lambda q, k, v: tilewise.flex_attention(q, k, v, doubled), HEADS_FIRST),
    "attention": (lambda q, k, v: tilewise.attention(q, k, v, causal=True), ROWS_FIRST),
    "flash-attn": (lambda q, k, v: tilewise.flash_attn_func(q, k, v), ROWS_FIRST),
    "cache": (lambda *x: tilewise.attention(*x, seqused_k=USED, split_size=16), ROWS_FIRST),
    "kvcache": (lambda *x: tilewise.flash_attn_with_kvcache(*x, cache_seqlens=USED), ROWS_FIRST),
}


@pytest.mark.parametrize("name", OF_A_BATCH)
def test_a_batch_that_a_compiler_does_not_know(name):
    function, shapes = OF_A_BATCH[name]
    inputs = normal(*shapes)
    longer = normal(*((7, *shape[1:]) for shape in shapes))
    for x in (*inputs, *longer):
        mark_unbacked(x, 0)
    again, counter = compiled(function)
    torch.testing.assert_close(again(*inputs), function(*inputs))
    if "cache" not in name:
        torch.testing.assert_close(again(*longer), function(*longer))
        assert counter.frame_count == 1
        with pytest.raises((RuntimeError, AssertionError), match="size|shape|u[0-9]"):
            again(longer[0], *inputs[1:])


class OfItem(torch.nn.Module):
    """A batch that a tensor tells."""

    def __init__(self, function, shapes):
        super().__init__()
        self.function, self.shapes = function, shapes

    def forward(self, count):
        n = count.item()
        return self.function(*(torch.ones(n, *shape[1:]) for shape in self.shapes))


@pytest.mark.parametrize("name", ["sdpa", "sdpa, bools", "flex", "attention"])
def test_a_batch_that_a_tensor_tells_is_exported(name):
    module = OfItem(*OF_A_BATCH[name])
    program = torch.export.export(module, (torch.tensor(3),), strict=False).module()
    for n in (torch.tensor(3), torch.tensor(5)):
        torch.testing.assert_close(program(n), module(n))


def test_rows_are_packed_in_the_graph():
    def attend(x, mask):
        rows, indices, starts, longest, _ = unpad_input(x, mask)
        q = rows.view(-1, 2, 8)
        out = tilewise.flash_attn_varlen_func(q, q, q, starts, starts, longest, longest)
        return pad_input(out.flatten(1), indices, x.shape[0], x.shape[1])

    (x,) = normal((3, 9, 16))
    with torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    ):
        again, counter = compiled(attend)
        for keys in ((9, 4, 1), (2, 8, 5)):
            mask = torch.arange(9) < torch.tensor(keys)[:, None]
            torch.testing.assert_close(again(x, mask), attend(x, mask))
    assert counter.frame_count == 1


MODELS = {
    "bert": lambda t: t.BertModel(t.BertConfig(**SIZES, vocab_size=50), add_pooling_layer=False),
    "llama": lambda t: t.LlamaModel(t.LlamaConfig(**SIZES, vocab_size=50, num_key_value_heads=1)),
}
SIZES = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    use_cache=False,
)


@pytest.mark.filterwarnings("ignore::tilewise.PerformanceWarning")
@pytest.mark.parametrize("name", MODELS)
def test_padded_models_of_any_length_are_one_graph(name):
    transformers = pytest.importorskip("transformers")
    model = MODELS[name](transformers).eval()
    expected, masks = [], []
    for n in (9, 13, 17):
        ids = torch.randint(50, (2, n))
        masks.append((ids, (torch.arange(n) < torch.tensor([[n - 3], [n]])).long()))
        with torch.no_grad():
            expected.append(model(ids, attention_mask=masks[-1][1]).last_hidden_state)
    counter = CompileCounter()
    torch._dynamo.reset()
    again = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    with tilewise.enable_sdpa(), torch.no_grad():
        for (ids, mask), right in zip(masks, expected):
            hidden = again(ids, attention_mask=mask).last_hidden_state
            torch.testing.assert_close(
                hidden[mask.bool()], right[mask.bool()], atol=1e-5, rtol=1e-5
            )
    assert counter.frame_count == 1
