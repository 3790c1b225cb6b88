"""A cache as torch sees it: operators, their fakes, what is mutated, compilers."""

import pytest
import torch
from helpers.caches import INT32, paged, sequences

import tilewise
from tilewise import mods

CALL = torch.ops.tilewise.flash_attn_cache.default
CALL_OUT = torch.ops.tilewise.flash_attn_cache_out.default


def arguments(packed=True, page_size=8, **features):
    """Tensors and numbers, as the operators take them."""
    s = sequences([2, 2], [40, 9])
    k, v, table = paged(s, page_size, fill=0.0)
    q = torch.cat(s.q) if packed else torch.stack(s.q)
    given = dict.fromkeys(("alibi_slopes", "sinks", "captured")) | features
    tensors = q, k, v, table, s.lengths, s.starts if packed else None, *given.values()
    return *tensors, 0.25, 0.0, -1, 0, 16, "", None


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed):
    torch.library.opcheck(CALL, arguments(packed))
    torch.library.opcheck(CALL, arguments(packed, sinks=torch.randn(4)))


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_of_out(packed):
    args = arguments(packed)
    torch.library.opcheck(CALL_OUT, args, {"out": torch.zeros_like(args[0])})


def test_the_schema_says_what_is_written():
    assert [x.name for x in CALL_OUT._schema.arguments if x.alias_info] == ["out"]
    assert not CALL._schema.is_mutable


def decode(q, k, v, table, used, starts):
    return tilewise.attention(
        *(q, k, v),
        **dict(page_table=table, seqused_k=used, cu_seqlens_q=starts, causal=True, split_size=16),
        return_lse=True,
    )


def test_one_graph_serves_any_lengths():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    q, k, v, table, used, starts, *_ = arguments()
    calls = torch._dynamo.utils.counters["stats"]
    for lengths in ([40, 9], [3, 16], [0, 1]):
        used = torch.tensor(lengths, dtype=INT32)
        for mine, eager in zip(
            compiled(q, k, v, table, used, starts), decode(q, k, v, table, used, starts)
        ):
            assert torch.equal(mine, eager)
    assert calls["unique_graphs"] == 1


def test_a_compiled_step_writes_out_and_takes_masks():
    torch._dynamo.reset()
    mask = mods.causal()

    def step(q, k, v, table, used, starts, out):
        lengths = dict(page_table=table, seqused_k=used, cu_seqlens_q=starts)
        tilewise.attention(q * 2, k, v, mask_mod=mask, out=out, **lengths)
        return out + 1

    q, k, v, table, used, starts, *_ = arguments()
    outs = torch.zeros_like(q), torch.zeros_like(q)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(
        *(q, k, v, table, used, starts, outs[0])
    )
    assert torch.equal(found, step(q, k, v, table, used, starts, outs[1]))
    assert torch.equal(*outs)


def test_fakes_and_meta_have_the_shapes():
    s = sequences([2, 2], [40, 9], headdims=(16, 24))
    k, v, table = (x.to("meta") for x in paged(s, 8))
    q, used, starts = (x.to("meta") for x in (torch.cat(s.q), s.lengths, s.starts))
    out, lse = decode(q, k, v, table, used, starts)
    assert out.shape == (4, 4, 24) and lse.shape == (4, 4) and out.is_meta


def test_a_gradient_of_the_operator_is_refused():
    q, *rest = arguments()
    out, _ = CALL(q.requires_grad_(), *rest)
    with pytest.raises(NotImplementedError, match="a cache has no gradient"):
        out.sum().backward()
