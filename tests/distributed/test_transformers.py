"""transformers' models inside of `context_parallel`: logits, loss and gradients are those of one
process, and what transformers says of a shard alone is refused.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from helpers.processes import run

import tilewise.distributed as td
from tilewise.errors import ArgumentError

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)
transformers = pytest.importorskip("transformers")

from tilewise.integrations import transformers as integration  # noqa: E402

SEQLEN = 40
SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
)
KINDS = {
    "llama": {},
    "mistral": dict(sliding_window=5),
    "mistral, a window longer than a shard": dict(sliding_window=30),
    "gemma2": dict(
        *(dict(head_dim=8, sliding_window=30, attn_logit_softcapping=2.0),),
        query_pre_attn_scalar=8,
    ),
}


def model_of(name, **more):
    integration.register()
    config = transformers.AutoConfig.for_model(name.partition(",")[0], **SIZES, **more)
    torch.manual_seed(0)
    make = transformers.AutoModelForCausalLM.from_config
    return make(config, attn_implementation="tilewise", dtype=torch.float32).train()


def step(model, ids, labels, count, **given):
    """Logits, this rank's part of the loss, and of the gradients."""
    found = model(ids, labels=labels, shift_labels=labels, num_items_in_batch=count, **given)
    grads = torch.autograd.grad(found.loss, list(model.parameters()))
    return found.logits.detach(), found.loss.detach(), grads


def models(rank, names, caches=(False, True)):
    whole = td.contiguous(SEQLEN, 1)
    ids = torch.randint(64, (2, SEQLEN), generator=torch.Generator().manual_seed(1))
    for name in names:
        model = model_of(name, **KINDS[name])
        for layout in (td.zigzag(SEQLEN), td.striped(SEQLEN, block=3)):
            for use_cache in caches:  # with a cache transformers looks at no position ids
                labels, count = whole.shifted(ids), 2 * (SEQLEN - 1)
                expected = step(model, ids, labels, count, use_cache=use_cache)
                with td.context_parallel(layout):
                    given = layout.shard(ids), layout.shard(labels), count
                    positions = layout.positions[None]
                    found = step(model, *given, position_ids=positions, use_cache=use_cache)
                same(layout, found, expected, name)


def same(layout, found, expected, what):
    logits, loss, grads = found
    dist.all_reduce(loss)
    for x in grads:
        dist.all_reduce(x)
    close = dict(rtol=1e-4, atol=1e-5, msg=lambda text: f"{what}: {text}")
    torch.testing.assert_close(layout.unshard(logits), expected[0], **close)
    torch.testing.assert_close(loss, expected[1], rtol=1e-6, atol=0)
    for x, y in zip(grads, expected[2], strict=True):
        torch.testing.assert_close(x, y, **close)


def documents(rank):
    """Packed in one row: the layout says so, and each is the model's answer to it alone."""
    starts = [0, 11, 12, SEQLEN]
    model = model_of("llama")
    ids = torch.randint(64, (1, SEQLEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        parts = [model(ids[:, a:b]).logits for a, b in itertools.pairwise(starts)]
        for layout in (td.zigzag(SEQLEN).packed(starts), td.documents(starts, chunk=7)):
            with td.context_parallel(layout):
                mine = model(layout.shard(ids), position_ids=layout.positions[None]).logits
            torch.testing.assert_close(
                layout.unshard(mine), torch.cat(parts, 1), rtol=1e-4, atol=1e-5
            )


ERRORS = ArgumentError, NotImplementedError, td.RankMismatch


def refused(rank):
    layout = td.zigzag(SEQLEN)
    ids = torch.ones(1, layout.tokens, dtype=torch.long)
    there = dict(position_ids=layout.positions[None])
    padding = torch.ones_like(ids)
    padding[:, 0] = 0
    pairs = torch.ones(1, 1, *[layout.tokens] * 2, dtype=torch.bool)
    starts = torch.tensor([0, layout.tokens], dtype=torch.int32)
    packed = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=9, max_length_k=9)
    flags = dict(sliding_window=5)
    restarts = torch.arange(layout.tokens)[None] % 10
    model = model_of("llama")
    for match, given in {
        "leave padding out": dict(there, attention_mask=padding),
        "or of pairs": dict(there, attention_mask=pairs),
        "must be layout.positions": {},
        "cu_seq_lens_q.*documents belong in the layout": dict(there, **packed),
        "documents belong in the layout: |must be layout.positions": dict(position_ids=restarts),
        "a layer whose mask has none": dict(there, **flags),
    }.items():
        for use_cache in (False, True):
            with td.context_parallel(layout):
                with pytest.raises(
                    (ArgumentError, NotImplementedError, td.RankMismatch), match=match
                ):
                    model(ids, use_cache=use_cache, **given)
    with td.context_parallel(layout):  # all keys are real
        model(ids, attention_mask=torch.ones_like(ids), **there)
        one_rank_alone(rank, model, ids, there)


def one_rank_alone(rank, model, ids, there):
    """What one rank does wrong is an error of both."""
    given = {} if rank else there
    with pytest.raises(ERRORS, match="must be layout.positions"):
        model(ids, use_cache=False, **given)


def compiled(rank):
    layout = td.zigzag(SEQLEN)
    ids = torch.randint(64, (1, SEQLEN), generator=torch.Generator().manual_seed(1))
    given = dict(input_ids=layout.shard(ids), position_ids=layout.positions[None], use_cache=False)
    for name in KINDS:
        model = model_of(name, **KINDS[name])
        torch._dynamo.reset()
        graph = torch.compile(model, fullgraph=True, backend="aot_eager")
        with td.context_parallel(layout):
            torch.testing.assert_close(graph(**given).logits, model(**given).logits)


def two(rank):
    models(rank, ["llama"], (False,))
    models(rank, ["mistral, a window longer than a shard"], (True,))
    documents(rank)
    refused(rank)


def every(rank):
    models(rank, KINDS)
    compiled(rank)


@pytest.mark.slow
def test_every_kind():
    run(every, 2)


def test_two_ranks():
    run(two, 2)
