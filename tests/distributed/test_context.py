"""Inside of `context_parallel` drop-in functions attend to whole sequences; a call that is not
served there never attends to the shard alone.
"""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.processes import run

import tilewise
import tilewise.distributed as td
from tilewise.errors import ArgumentError
from tilewise.ops.context_parallel import is_sharded

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)

SEQLEN = 50
SLOPES, SINKS = torch.tensor([0.1, 0.02]), torch.tensor([0.5, -1.0])


def bhsd(x):
    return x.transpose(1, 2)


def of_torch(q, k, v):
    with tilewise.enable_sdpa():
        out = F.scaled_dot_product_attention(bhsd(q), bhsd(k), bhsd(v), is_causal=True)
    return bhsd(out)


FUNCTIONS = {
    "attention": lambda q, k, v: tilewise.attention(q, k, v, causal=True, window=(20, 0)),
    "heads first": lambda q, k, v: bhsd(
        tilewise.attention(bhsd(q), bhsd(k), bhsd(v), layout="bhsd", sinks=SINKS, softcap=9.0)
    ),
    "flash_attn_func": lambda q, k, v: tilewise.flash_attn_func(
        *(q, k, v), causal=True, window_size=(9, -1), alibi_slopes=SLOPES, softmax_scale=0.3
    ),
    "lse of flash_attn_func": lambda q, k, v: bhsd(
        tilewise.flash_attn_func(q, k, v, return_attn_probs=True, learnable_sink=SINKS)[1]
    ),
    "kvpacked": lambda q, k, v: tilewise.flash_attn_kvpacked_func(
        q, torch.stack([k, v], 2), 0.0, None, True
    ),
    "sdpa": lambda q, k, v: bhsd(
        tilewise.scaled_dot_product_attention(bhsd(q), bhsd(k), bhsd(v), is_causal=True)
    ),
    "torch's": of_torch,
}


def functions(rank):
    layout = td.zigzag(SEQLEN)
    q, k, v, dout = torch.randn(4, 2, SEQLEN, 2, 16).unbind(0)
    for name, function in FUNCTIONS.items():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        whole = function(*leaves)
        weight = dout if whole.shape == dout.shape else dout[..., 0]
        expected = torch.autograd.grad(whole, leaves, weight)
        shards = [layout.shard(x.detach()).requires_grad_() for x in leaves]
        for method in (None, "stream", "heads"):
            with td.context_parallel(layout, method=method):
                out = function(*shards)
                assert is_sharded()
            grads = torch.autograd.grad(out, shards, layout.shard(weight))
            assert torch.equal(out, layout.shard(whole)), (name, method)
            for x, y in zip(grads, expected):
                torch.testing.assert_close(x, layout.shard(y), rtol=1e-4, atol=1e-5)
        assert not is_sharded()
        assert torch.equal(function(q, k, v), whole)  # outside, and as it was


def test_functions_on_two_ranks():
    run(functions, 2)


def varlen(q):
    starts = torch.tensor([0, q.shape[1]], dtype=torch.int32)
    return tilewise.flash_attn_varlen_func(q[0], q[0], q[0], starts, starts)


def packed(q):
    starts = torch.tensor([0, q.shape[1]], dtype=torch.int32)
    return tilewise.attention(q[0], q[0], q[0], cu_seqlens_q=starts, cu_seqlens_k=starts)


def masked(q):
    x = bhsd(q)
    return tilewise.scaled_dot_product_attention(x, x, x, attn_mask=x.new_ones(1, 1, 1, 1) > 0)


def masked_torchs(q):
    x = bhsd(q)
    with tilewise.enable_sdpa():
        return F.scaled_dot_product_attention(x, x, x, attn_mask=x.new_ones(1, 1, 1, 1) > 0)


def appended(q):
    lengths = torch.ones(1, dtype=torch.int32)
    new = q[:, :1].clone()
    tilewise.cache.append(q, q.clone(), new, new, seqused_k=lengths)


REFUSED = {
    "varlen": (varlen, "documents belong in the layout"),
    "packed": (packed, "cu_seqlens_q: no method"),
    "seqused": (
        lambda q: tilewise.attention(q, q, q, seqused_k=torch.tensor([3], dtype=torch.int32)),
        "seqused_k: no method",
    ),
    "split_size": (lambda q: tilewise.attention(q, q, q, split_size=16), "split_size: no method"),
    "kvcache": (lambda q: tilewise.flash_attn_with_kvcache(q, q, q), "would leave out the keys"),
    "append": (appended, "would leave out the keys"),
    "flex": (lambda q: tilewise.flex_attention(q, q, q), "would leave out the keys"),
    "chunk": (lambda q: tilewise.flash_attn_func(q, q, q, attention_chunk=8), "mods.chunked"),
    "attn_mask": (masked, "attn_mask inside"),
    "attn_mask of torch's": (masked_torchs, "attn_mask inside"),
}


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_inside_and_known_outside(name, learns):
    call, match = REFUSED[name]
    torch._dynamo.utils.counters.clear()  # other tests compile, which enable_sdpa warns of
    q = torch.randn(1, 16, 2, 8, requires_grad=learns and name not in ("kvcache", "append"))
    call(q)  # so that the call is kept
    with td.context_parallel(td.zigzag(16, 1)):
        with pytest.raises(NotImplementedError, match=match):
            call(q)
    call(q)


def test_wrong_arguments_are_named_inside():
    q = torch.randn(1, 16, 2, 8)
    with td.context_parallel(td.zigzag(32, 1)):
        with pytest.raises(ArgumentError, match="rank 0 has 32 tokens of 32"):
            tilewise.attention(q, q, q)
        with pytest.raises(ArgumentError, match="must be \\(batch, nheads, tokens, headdim\\)"):
            tilewise.scaled_dot_product_attention(q[0], q[0], q[0])
    with pytest.raises(ArgumentError, match="layout is a str"):
        with td.context_parallel("zigzag"):
            pass


def test_contexts_nest_and_end():
    q = torch.randn(1, 16, 2, 8)
    inner, outer = td.contiguous(16, 1), td.zigzag(8, 1)
    with td.context_parallel(outer):
        with td.context_parallel(inner):
            assert tilewise.attention(q, q, q).shape == q.shape
        with pytest.raises(ArgumentError, match="of 8"):
            tilewise.attention(q, q, q)
    assert not is_sharded()


def test_a_context_is_one_of_all_threads():
    """Autograd recomputes in threads of its own, on a GPU, what a checkpoint has dropped."""
    q, found = torch.randn(1, 16, 2, 8), []
    layout = td.from_positions([torch.arange(15, -1, -1)], 1)

    def attend():
        found.append(tilewise.attention(q, q, q, causal=True))

    with td.context_parallel(layout):
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()
    attend()
    assert not torch.equal(*found)
    whole = q.flip(1)
    assert torch.equal(found[0], tilewise.attention(whole, whole, whole, causal=True).flip(1))
