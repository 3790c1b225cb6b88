"""torch.compile of calls with a KV cache: the operators that inductor calls, and one node."""

import pytest
import torch
from helpers.tiers import sample

import tilewise


def cached_calls():
    """A decode, one in pages with `out`, in chunks, an append apart, one with rotary, by name."""
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    used, table = torch.tensor([20, 3], dtype=torch.int32), torch.arange(8, dtype=torch.int32)
    new, cos = torch.randn(2, 2, 1, 4, 32), torch.randn(2, 128, 16)
    options = dict(cache_seqlens=used, causal=True)
    pages = dict(page_table=table.view(2, 4), seqused_k=used, causal=True)
    rotated = dict(k=new[0], v=new[1], rotary_cos=cos[0], rotary_sin=cos[1])
    return {
        "decode": lambda q, k, v: tilewise.flash_attn_with_kvcache(q, k, v, **options),
        "rotary": lambda q, k, v: tilewise.flash_attn_with_kvcache(q, k, v, **options, **rotated),
        "chunks": lambda q, k, v: tilewise.flash_attn_varlen_func(
            *(q[:, 0], k.view(8, 16, 4, 32), v.view(8, 16, 4, 32), starts, starts, 1, 64),
            **dict(block_table=table.view(2, 4), seqused_k=used, causal=True, attention_chunk=7),
        ),
        "chunks, out": lambda q, k, v: tilewise.flash_attn_with_kvcache(
            q, k, v, **options, attention_chunk=7, out=torch.empty_like(q)
        ),
        "out": lambda q, k, v: tilewise.attention(
            *(q, k.view(8, 16, 4, 32), v.view(8, 16, 4, 32)), **pages, out=torch.empty_like(q)
        ),
        "append": lambda q, k, v: tilewise.cache.append(k, v, *new, seqused_k=used),
    }


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("name", sample(cached_calls(), "decode", "append", "chunks, out"))
def test_inductor_calls_operators_of_a_cache(name):
    """Whose last arguments have defaults: generated code passes those by keyword."""
    call, tensors = cached_calls()[name], [torch.randn(2, n, 4, 32) for n in (1, 64, 64)]
    results = []
    for function in (call, torch.compile(call, fullgraph=True)):
        copies = [x.clone() for x in tensors]
        with torch.no_grad():
            results.append((function(*copies), copies))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", sample(("decode", "rotary"), "rotary"))
def test_a_cached_call_is_one_node(name):
    """flash-attn's function, which guards what the caller passed, and writes what it shall."""
    call, guarded, nodes = cached_calls()[name], [], []

    def seen(graph, inputs):
        nodes.extend(x for x in graph.graph.nodes if "kvcache_node" in str(x.target))
        return graph

    def keep(guards):
        guarded.extend(guards)
        return [True] * len(guards)

    again = torch.compile(call, fullgraph=True, backend=seen, options={"guard_filter_fn": keep})
    tensors = [torch.randn(2, n, 4, 32) for n in (1, 64, 64)]
    copies = [x.clone() for x in tensors]
    with torch.no_grad():
        torch.testing.assert_close((again(*copies), copies), (call(*tensors), tensors))
        assert len(nodes) == 1 and len(guarded) < 80
        with tilewise.batch_invariant():  # which a node would not guard
            torch.testing.assert_close(again(*copies), call(*tensors))
    assert len(nodes) == 1
