"""Tensors of no device, beside a default one, nested, or where a number would do."""

import pytest
import torch

import tilewise

DEVICELESS = {
    "window": dict(window=(20, 0)),
    "mask": dict(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx <= q_idx),
    "score": dict(score_mod=lambda s, b, h, q_idx, kv_idx: s + (q_idx - kv_idx)),
    "alibi": dict(alibi_slopes=torch.tensor([0.5, 0.25]), causal=True),
    "bias": dict(bias=torch.zeros(1, 2, 50, 50)),
    "dropout": dict(dropout_p=0.5, dropout_rng=torch.tensor([1, 2])),
}


@pytest.mark.parametrize("name", DEVICELESS)
def test_a_default_device_changes_nothing(name):
    q = torch.randn(1, 50, 2, 16, requires_grad=True)
    want = tilewise.attention(q, q, q, **DEVICELESS[name])
    (grad,) = torch.autograd.grad(want.sum(), q)
    with torch.device("meta"):
        got = tilewise.attention(q, q, q, **DEVICELESS[name])
        (found,) = torch.autograd.grad(got, q, torch.ones_like(got))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(found, grad)


def test_meta_tensors_have_meta_results():
    q = torch.empty(2, 8, 4, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.empty(2, 9, 2, d, device="meta", dtype=torch.bfloat16) for d in (16, 8))
    out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)
    assert out.is_meta and out.shape == (2, 8, 4, 8) and out.dtype == torch.bfloat16
    assert lse.is_meta and lse.shape == (2, 4, 8) and lse.dtype == torch.float32
    out.sum().backward()
    assert q.grad.is_meta and q.grad.shape == q.shape


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused_with_a_remedy(layout):
    nested = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (5, 3)], layout=layout)
    for attend in (tilewise.attention, tilewise.flash_attn_func):
        with pytest.raises(tilewise.ArgumentError, match="q is a nested tensor: .*cu_seqlens"):
            attend(nested, nested, nested)
    q = torch.randn(2, 5, 2, 8)
    for name in ("alibi_slopes", "bias", "sinks", "seqused_k"):
        with pytest.raises(tilewise.ArgumentError, match=f"{name} is a nested tensor"):
            tilewise.attention(q, q, q, **{name: nested})


def test_a_bound_that_is_a_tensor_is_not_read():
    """Reading it would wait for its device, and in a compiled graph it has no value."""
    x, cu = torch.randn(20, 2, 8), torch.tensor([0, 5, 20], dtype=torch.int32)
    bound = torch.tensor(15)

    def attend(x, bound):
        return tilewise.flash_attn_varlen_func(x, x, x, cu, cu, bound, bound)

    want = attend(x, 15)
    torch.testing.assert_close(attend(x, bound), want)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, bound), want)
