"""Under autocast q, k and v are cast, also with a split_size; a bias or mask as torch casts it."""

import pytest
import torch

import tilewise

HALVES = torch.float16, torch.bfloat16
FUNCTIONS = {
    "ours": lambda q, k, v, bias: tilewise.attention(q, k, v, bias=bias, layout="bhsd"),
    "torch's": tilewise.scaled_dot_product_attention,
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("inputs", [torch.float32, *HALVES])
@pytest.mark.parametrize("of_bias", [torch.float32, *HALVES])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_bias_of_any_dtype(function, inputs, of_bias, dtype):
    q, k, v = torch.randn(3, 1, 2, 6, 8).to(inputs).unbind(0)
    bias = torch.randn(1, 2, 6, 6, dtype=of_bias, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        out = FUNCTIONS[function](q, k, v, bias)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
    assert out.dtype == expected.dtype == dtype
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    out.float().square().sum().backward()
    assert bias.grad.dtype == of_bias and bias.grad.abs().sum() > 0


def test_without_autocast_it_is_refused():
    q, bias = torch.ones(1, 2, 6, 8).half(), torch.ones(1, 2, 6, 6).bfloat16()
    with pytest.raises(tilewise.ArgumentError, match="attn_mask.dtype"):
        tilewise.scaled_dot_product_attention(q, q, q, bias)


def test_the_operator_casts_too():
    q, k, v = torch.randn(3, 1, 2, 6, 8).unbind(0)
    bias = torch.randn(1, 2, 6, 6).half()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q, k, v, bias):
        return tilewise.scaled_dot_product_attention(q, k, v, bias)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = tilewise.scaled_dot_product_attention(q, k, v, bias)
        torch.testing.assert_close(attend(q, k, v, bias), expected)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("inputs", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize("dtype", HALVES)
def test_pieces_of_keys_change_no_dtype(dtype, inputs, layout):
    q, k, v = torch.randn(3, 2, 6, 6, 8).to(inputs).unbind(0)
    q.requires_grad_(), v.requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        whole, pieces = (
            tilewise.attention(q, k, v, causal=True, layout=layout, split_size=size)
            for size in (None, 4)
        )
        with torch.no_grad():
            alone = tilewise.attention(q, k, v, causal=True, layout=layout, split_size=4)
    assert whole.dtype == pieces.dtype == alone.dtype
    torch.testing.assert_close(pieces, whole, atol=2e-2, rtol=2e-2)
    assert torch.equal(pieces, alone)
    for out in (whole, pieces):
        dq, dv = torch.autograd.grad(out.float().square().sum(), (q, v))
        assert dq.dtype == dv.dtype == inputs


def test_mixed_dtypes_in_pieces():
    q, k, v = torch.randn(3, 1, 6, 2, 8).unbind(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = tilewise.attention(q, k.bfloat16(), v, split_size=4)
    assert out.dtype == torch.bfloat16
