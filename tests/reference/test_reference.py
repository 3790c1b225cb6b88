"""The oracle against torch's own attention, and each feature against a line of its definition."""

import math

import pytest
import torch
import torch.nn.functional as F

import tilewise
from tilewise import ArgumentError, attention_reference, merge_states

F64 = torch.float64


def qkv(batch=2, seqlen_q=5, seqlen_k=7, nheads=4, nheads_k=2, headdim=8, headdim_v=6, dtype=F64):
    return (
        torch.randn(batch, seqlen_q, nheads, headdim, dtype=dtype),
        torch.randn(batch, seqlen_k, nheads_k, headdim, dtype=dtype),
        torch.randn(batch, seqlen_k, nheads_k, headdim_v, dtype=dtype),
    )


def torch_sdpa(q, k, v, **how):
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, enable_gqa=True, **how).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, "top_left"])
def test_equals_torch(causal):
    q, k, v = qkv()
    expected = torch_sdpa(q, k, v, is_causal=causal == "top_left")
    torch.testing.assert_close(attention_reference(q, k, v, causal=causal), expected)


@pytest.mark.parametrize("seqlen_q", [5, 7, 12])
def test_causal_is_bottom_right(seqlen_q):
    q, k, v = qkv(seqlen_q=seqlen_q)
    mask = torch.ones(seqlen_q, 7, dtype=torch.bool).tril(7 - seqlen_q)
    sees = mask.any(1)
    for causal in (True, "bottom_right"):
        out = attention_reference(q, k, v, causal=causal)
        torch.testing.assert_close(out[:, sees], torch_sdpa(q, k, v, attn_mask=mask)[:, sees])
        assert (out[:, ~sees] == 0).all()


def test_window_counts_both_ends():
    q, k, v = qkv(seqlen_q=9, seqlen_k=9)
    distance = torch.arange(9) - torch.arange(9).unsqueeze(1)
    mask = (distance >= -3) & (distance <= 2)
    torch.testing.assert_close(
        attention_reference(q, k, v, window=(3, 2)), torch_sdpa(q, k, v, attn_mask=mask)
    )


def test_causal_closes_the_window_at_the_diagonal():
    q, k, v = qkv()
    for window in ((2, -1), (2, 5), (2, None)):
        torch.testing.assert_close(
            attention_reference(q, k, v, causal=True, window=window),
            attention_reference(q, k, v, window=(2, 0)),
        )


@pytest.mark.parametrize("used", [None, 4])
def test_alibi_is_the_distance_to_the_diagonal(used):
    q, k, v = qkv(nheads=2)
    slopes = torch.tensor([0.5, 0.25])
    seqused = None if used is None else torch.tensor([used, used], dtype=torch.int32)
    keys = used or 7
    distance = (torch.arange(5).unsqueeze(1) + keys - 5 - torch.arange(keys)).abs()
    bias = -slopes.double()[:, None, None] * distance
    expected = torch_sdpa(q, k[:, :keys], v[:, :keys], attn_mask=bias)
    for given in (slopes, slopes.expand(2, 2)):
        out = attention_reference(q, k, v, alibi_slopes=given, seqused_k=seqused)
        torch.testing.assert_close(out, expected)


def test_softcap_comes_after_the_scale():
    q, k, v = qkv(batch=1, nheads=1, nheads_k=1)
    scores = 0.7 * q[0, :, 0] @ k[0, :, 0].T
    expected = torch.softmax(2.0 * torch.tanh(scores / 2.0), -1) @ v[0, :, 0]
    out = attention_reference(q, k, v, scale=0.7, softcap=2.0)
    torch.testing.assert_close(out[0, :, 0], expected)


def test_a_sink_takes_its_share_and_is_in_lse():
    q, k, v = qkv()
    sinks = torch.randn(4, dtype=F64)
    out, lse = attention_reference(q, k, v, return_lse=True)
    with_sinks, lse_sinks = attention_reference(q, k, v, sinks=sinks, return_lse=True)
    share = torch.sigmoid(lse - sinks[:, None]).transpose(1, 2).unsqueeze(-1)
    torch.testing.assert_close(with_sinks, out * share)
    torch.testing.assert_close(lse_sinks, torch.logaddexp(lse, sinks[:, None].expand_as(lse)))


def test_padding_is_never_read():
    q, k, v = qkv()
    expected = attention_reference(q[:1], k[:1, :3], v[:1, :3], causal=True)
    k[0, 3:], v[0, 3:] = math.nan, math.nan
    seqused = torch.tensor([3, 7], dtype=torch.int32)
    out = attention_reference(q, k, v, seqused_k=seqused, causal=True)
    torch.testing.assert_close(out[:1], expected)
    assert out.isfinite().all()


def test_layouts_agree():
    q, k, v = qkv()
    out, lse = attention_reference(q, k, v, causal=True, return_lse=True)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    other, other_lse = attention_reference(
        *heads_first, causal=True, layout="bhsd", return_lse=True
    )
    assert torch.equal(out, other.transpose(1, 2)) and torch.equal(lse, other_lse)


@pytest.mark.parametrize("how", [dict(seqlen_k=0), dict(seqlen_q=0), dict(batch=0)], ids=str)
def test_nothing_to_see(how):
    inputs = [x.requires_grad_() for x in qkv(**how)]
    out, lse = attention_reference(*inputs, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_masked_rows_have_gradient_zero():
    q, k, v = (x.requires_grad_() for x in qkv(seqlen_q=9))
    out, lse = attention_reference(q, k, v, causal=True, return_lse=True)
    assert (out[:, :2] == 0).all() and (lse[..., :2] == -math.inf).all()
    (out.square().sum() + lse[..., 2:].sum() + (0 * out[:, 0]).sum()).backward()
    assert (q.grad[:, :2] == 0).all()
    assert k.grad.isfinite().all() and v.grad.isfinite().all()


FEATURES = [
    dict(causal=True),
    dict(causal="top_left", window=(2, 0)),
    dict(softcap=1.5, window=(3, 1)),
    dict(alibi_slopes=torch.tensor([0.5, 0.1, 0.2, 0.3]), causal=True),
    dict(seqused_k=torch.tensor([0, 3], dtype=torch.int32), causal=True),
]


@pytest.mark.parametrize("features", FEATURES, ids=lambda features: "-".join(features))
def test_gradients_of_both_results(features):
    inputs = [x.requires_grad_() for x in qkv(seqlen_q=4, seqlen_k=5, headdim=3, headdim_v=2)]
    sinks = torch.randn(4, dtype=F64, requires_grad=True)

    def call(q, k, v, sinks):
        return attention_reference(q, k, v, sinks=sinks, return_lse=True, **features)

    assert torch.autograd.gradcheck(call, (*inputs, sinks))


def test_differentiable_twice():
    inputs = [x.requires_grad_() for x in qkv(1, 5, 3, 2, 1, 3, 2)]  # the first rows see no key
    assert torch.autograd.gradgradcheck(
        lambda *qkv: attention_reference(*qkv, causal=True, softcap=2.0), inputs
    )


def test_slopes_have_a_gradient():
    q, k, v = qkv()
    slopes = torch.rand(4, requires_grad=True)
    attention_reference(q, k, v, alibi_slopes=slopes).sum().backward()
    assert slopes.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_dtypes(dtype):
    q, k, v = qkv(dtype=dtype)
    wide = F64 if dtype == F64 else torch.float32
    for upcast in (True, False):
        out, lse = attention_reference(q, k, v, return_lse=True, upcast=upcast)
        assert out.dtype == dtype and lse.dtype == wide and lse.shape == (2, 4, 5)


def test_upcast_is_nearer_to_the_truth():
    q, k, v = qkv(seqlen_q=64, seqlen_k=64, dtype=torch.bfloat16)
    oracle = attention_reference(q.double(), k.double(), v.double())
    errors = [
        (attention_reference(q, k, v, upcast=upcast).double() - oracle).abs().mean()
        for upcast in (True, False)
    ]
    assert errors[0] < errors[1]


def test_a_part_counts_from_where_it_begins():
    """Row 1 of the batch, query heads 2 and 3 with their key head, queries 2 to 4."""
    q, k, v = qkv()
    modified = dict(
        mask_mod=lambda b, h, q_idx, kv_idx: (q_idx + b + h) % 3 != kv_idx % 3,
        score_mod=lambda score, b, h, q_idx, kv_idx: score + 0.3 * (q_idx - kv_idx) * (h + b),
        dropout_p=0.3,
        dropout_rng=torch.tensor([1 << 40, 3]),
    )
    whole = attention_reference(q, k, v, **modified)
    part = q[1:, 2:, 2:], k[1:, :, 1:], v[1:, :, 1:]
    out = attention_reference(*part, **modified, first=(1, 2, 2))
    torch.testing.assert_close(out, whole[1:, 2:, 2:], atol=1e-14, rtol=1e-14)
    assert not torch.allclose(attention_reference(*part, **modified), out)


def test_errors():
    q, k, v = qkv()
    for wrong in (
        dict(causal="lower"),
        dict(layout="sbhd"),
        dict(window=(1,)),
        dict(scale=-1.0),
        dict(sinks=torch.zeros(3)),
        dict(seqused_k=torch.zeros(2)),
    ):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            attention_reference(q, k, v, **wrong)
    with pytest.raises(ArgumentError, match="batch"):
        attention_reference(q, k[:1], v[:1])


# ---- merge_states


@pytest.mark.parametrize("packed", [False, True])
def test_merge_of_two_parts_is_the_whole(packed):
    q, k, v = qkv(batch=1 if packed else 2)
    whole = attention_reference(q, k, v, return_lse=True)
    parts = [
        attention_reference(q, k[:, s], v[:, s], return_lse=True)
        for s in (slice(0, 2), slice(2, None))
    ]
    if packed:
        whole, *parts = ((out[0], lse[0]) for out, lse in (whole, *parts))
    for merged, expected in zip(merge_states(*parts[0], *parts[1]), whole):
        torch.testing.assert_close(merged, expected)


def test_merge_with_nothing():
    out, lse = attention_reference(*qkv(), return_lse=True)
    nothing = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for args in ((out, lse, *nothing), (*nothing, out, lse)):
        merged, merged_lse = merge_states(*args)
        torch.testing.assert_close(merged, out)
        torch.testing.assert_close(merged_lse, lse)
    merged, merged_lse = merge_states(*nothing, *nothing)
    assert (merged == 0).all() and (merged_lse == -math.inf).all()


def test_merge_is_differentiable_where_parts_are_empty():
    out1, out2 = torch.randn(2, 3, 2, 4, dtype=F64).unbind(0)
    lse1, lse2 = torch.randn(2, 2, 3, dtype=F64).unbind(0)
    inputs = [x.clone().requires_grad_() for x in (out1, lse1, out2, lse2)]
    assert torch.autograd.gradcheck(merge_states, inputs)
    lse1[:, 0] = lse1[:, 1] = lse2[:, 1] = -math.inf
    inputs = [x.clone().requires_grad_() for x in (out1, lse1, out2, lse2)]
    out, lse = merge_states(*inputs)
    (out.sum() + lse[lse > -math.inf].sum()).backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def combined(out1, lse1, out2, lse2):
    """`merge_states` by `flash_attn_combine`."""
    lses = torch.stack([x.transpose(-1, -2) for x in (lse1, lse2)])
    out, lse = tilewise.flash_attn_combine(torch.stack([out1, out2]), lses)
    return out, lse.transpose(-1, -2)


@pytest.mark.parametrize("merge", [merge_states, combined])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
@pytest.mark.parametrize("held", [math.nan, math.inf, -math.inf])
def test_what_a_part_without_keys_holds_has_no_weight(merge, dtype, held):
    """Rows of either part, or of both, see no key: out and gradients are those of zeros there."""
    outs = torch.randn(2, 3, 5, 4, 8).to(dtype)
    lses = torch.randn(2, 3, 4, 5, dtype=torch.promote_types(dtype, torch.float32))
    lses[torch.rand(lses.shape) < 0.4] = -math.inf
    lses[:, 0, 0] = -math.inf
    is_empty = (lses == -math.inf).transpose(-1, -2).unsqueeze(-1)
    results = []
    for value in (0.0, held):
        parts = outs.masked_fill(is_empty, value)
        inputs = [x.clone().requires_grad_() for x in (parts[0], lses[0], parts[1], lses[1])]
        out, lse = merge(*inputs)
        grads = []
        if merge is merge_states:
            grads = torch.autograd.grad(out.sum() + lse[lse > -math.inf].sum(), inputs)
        results.append([out, lse, *grads])
    assert results[0][0].isfinite().all() and (results[0][0][0, :, 0] == 0).all()
    for zeros, others in zip(*results):
        assert torch.equal(zeros, others)


def test_merge_keeps_values_of_parts_with_keys():
    """A part with keys may be NaN, and the row is."""
    out, lse = torch.full((1, 2, 1, 4), math.nan), torch.full((1, 1, 2), -1e30)
    merged, _ = merge_states(out, lse, torch.ones_like(out), torch.zeros_like(lse))
    assert merged.isnan().all()


def test_merge_keeps_the_dtype_of_out1():
    out, lse = attention_reference(*qkv(dtype=torch.bfloat16), return_lse=True)
    merged, merged_lse = merge_states(out, lse, out.float(), lse)
    assert merged.dtype == torch.bfloat16 and merged_lse.dtype == torch.float32


def test_merge_errors():
    out, lse = attention_reference(*qkv(), return_lse=True)
    with pytest.raises(ArgumentError, match="lse2"):
        merge_states(out, lse, out, lse.transpose(1, 2))
    with pytest.raises(ArgumentError, match="out2"):
        merge_states(out, lse, out[:1], lse)
