"""The drop-in functions: whole signatures and conventions of flash-attn 2 and torch."""

import inspect

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import tilewise

# flash-attn 2's names and defaults after the tensors, in its order.
FLASH_ATTN_2 = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
TENSORS = {
    "flash_attn_func": ("q", "k", "v"),
    "flash_attn_qkvpacked_func": ("qkv",),
    "flash_attn_kvpacked_func": ("q", "kv"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_positional_order_is_flash_attn_2s(name):
    parameters = inspect.signature(getattr(tilewise, name)).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == [*TENSORS[name], *FLASH_ATTN_2]
    assert {p.name: p.default for p in positional[len(TENSORS[name]) :]} == FLASH_ATTN_2
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p not in positional)


def test_signature_is_torchs():
    parameters = inspect.signature(tilewise.scaled_dot_product_attention).parameters
    assert {p.name: (p.default, p.kind.name) for p in parameters.values()} == {
        "query": (inspect.Parameter.empty, "POSITIONAL_OR_KEYWORD"),
        "key": (inspect.Parameter.empty, "POSITIONAL_OR_KEYWORD"),
        "value": (inspect.Parameter.empty, "POSITIONAL_OR_KEYWORD"),
        "attn_mask": (None, "POSITIONAL_OR_KEYWORD"),
        "dropout_p": (0.0, "POSITIONAL_OR_KEYWORD"),
        "is_causal": (False, "POSITIONAL_OR_KEYWORD"),
        "scale": (None, "KEYWORD_ONLY"),
        "enable_gqa": (False, "KEYWORD_ONLY"),
    }


def test_attention_takes_features_by_keyword_alone():
    parameters = inspect.signature(tilewise.attention).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == ["q", "k", "v"]


@pytest.mark.parametrize("name", TENSORS)
def test_dropout_reaches_every_twin(name):
    tensors = {"q": (1, 8, 2, 16), "k": (1, 8, 2, 16), "v": (1, 8, 2, 16)}
    tensors |= {"qkv": (1, 8, 3, 2, 16), "kv": (1, 8, 2, 2, 16)}
    given = [torch.randn(tensors[x]) for x in TENSORS[name]]
    torch.manual_seed(1)
    first = getattr(tilewise, name)(*given, 0.5)
    assert not torch.equal(first, getattr(tilewise, name)(*given, 0.5))
    torch.manual_seed(1)
    assert torch.equal(first, getattr(tilewise, name)(*given, 0.5))
    for wrong in (-0.1, 1.0):
        with pytest.raises(tilewise.ArgumentError, match=rf"dropout_p={wrong}"):
            getattr(tilewise, name)(*given, wrong)


def test_returns_as_flash_attn_does():
    q = torch.randn(1, 8, 2, 16)
    out = tilewise.flash_attn_func(q, q, q)
    assert isinstance(out, torch.Tensor)
    assert len(tilewise.flash_attn_func(q, q, q, return_lse=True)) == 2
    again, lse, probs = tilewise.flash_attn_func(q, q, q, return_attn_probs=True)
    torch.testing.assert_close(again, out, rtol=0, atol=0)
    assert lse.shape == (1, 2, 8)
    assert lse.dtype == torch.float32
    assert probs is None


def test_arguments_mean_what_flash_attn_2_means():
    """Causal is bottom-right, window counts both ends in, softcap comes after the scale."""
    q, (k, v) = torch.randn(2, 6, 4, 16), torch.randn(2, 2, 9, 2, 16).unbind(0)
    slopes, sinks = torch.rand(4), torch.randn(4)
    got = tilewise.flash_attn_func(q, k, v, 0.0, 0.3, True, (4, -1), 2.0, slopes)
    q_idx, k_idx = torch.arange(6)[:, None] + 3, torch.arange(9)
    kept, vs = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    s = 2 * torch.tanh(torch.einsum("bihd,bjhd->bhij", q, kept) * 0.3 / 2)
    s = s - slopes.view(4, 1, 1) * (q_idx - k_idx).abs()
    s = s.masked_fill((k_idx > q_idx) | (k_idx < q_idx - 4), -torch.inf)
    want = torch.einsum("bhij,bjhd->bihd", s.softmax(-1), vs)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    got = tilewise.flash_attn_func(q, k, v, softmax_scale=0.3, learnable_sink=sinks)
    s = torch.einsum("bihd,bjhd->bhij", q, kept) * 0.3
    s = torch.cat([s, sinks.view(1, 4, 1, 1).expand(2, 4, 6, 1)], -1)
    want = torch.einsum("bhij,bjhd->bihd", s.softmax(-1)[..., :-1], vs)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


FEATURES = {
    "softmax_scale": 0.2,
    "causal": True,
    "window_size": (5, 0),
    "softcap": 3.0,
    "alibi_slopes": torch.tensor([0.5, 0.1]),
    "deterministic": True,
}


@pytest.mark.parametrize("features", [{}, FEATURES], ids=["plain", "every feature"])
def test_packed_twins_equal_unpacked(features):
    qkv = torch.randn(2, 12, 3, 2, 16)
    sinks = torch.randn(2)

    def run(function, *tensors):
        leaves = [x.clone().requires_grad_() for x in (*tensors, sinks)]
        out, lse = function(*leaves[:-1], **features, return_lse=True, learnable_sink=leaves[-1])
        (out.square().sum() + lse.sum()).backward()
        return out.detach(), lse.detach(), [x.grad for x in leaves]

    q, k, v = qkv.unbind(2)
    out, lse, (dq, dk, dv, dsinks) = run(tilewise.flash_attn_func, q, k, v)
    for function, tensors, grads in [
        (tilewise.flash_attn_qkvpacked_func, [qkv], [torch.stack([dq, dk, dv], 2)]),
        (tilewise.flash_attn_kvpacked_func, [q, qkv[:, :, 1:]], [dq, torch.stack([dk, dv], 2)]),
    ]:
        got = run(function, *tensors)
        torch.testing.assert_close(got, (out, lse, [*grads, dsinks]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("flash_attn_qkvpacked_func", [torch.ones(1, 8, 2, 2, 16)], r"qkv has shape .* \(batch"),
        ("flash_attn_qkvpacked_func", [torch.ones(8, 3, 2, 16)], r"qkv has shape \(8, 3, 2, 16\)"),
        ("flash_attn_qkvpacked_func", [None], r"qkv .*NoneType"),
        (
            "flash_attn_kvpacked_func",
            [torch.ones(1, 8, 2, 16), torch.ones(1, 8, 3, 2, 16)],
            r"kv has shape .*must be \(batch, seqlen, 2, nheads, headdim\)",
        ),
    ],
)
def test_packed_tensors_of_another_shape_are_refused(name, given, message):
    with pytest.raises(tilewise.ArgumentError, match=message):
        getattr(tilewise, name)(*given)


@pytest.mark.parametrize("shapes", [(6, 6), (4, 9), (9, 4)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_equals_torchs(shapes, is_causal):
    """With top-left causal, as torch has it, wherever the lengths differ."""
    leaves = [torch.randn(2, 4, s, 16) for s in (shapes[0], shapes[1], shapes[1])]
    results = []
    for function in (tilewise.scaled_dot_product_attention, torch_sdpa):
        q, k, v = (x.clone().requires_grad_() for x in leaves)
        out = function(q, k, v, None, 0.0, is_causal, scale=0.3)
        out.square().sum().backward()
        results.append((out.detach(), q.grad, k.grad, v.grad))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_sdpa_shares_key_heads_only_when_asked():
    q, k = torch.randn(2, 4, 6, 16), torch.randn(2, 2, 6, 16)
    for function in (tilewise.scaled_dot_product_attention, torch_sdpa):
        with pytest.raises(RuntimeError):
            function(q, k, k)
    with pytest.raises(tilewise.ArgumentError, match=r"4 heads.* 2.*enable_gqa=True"):
        tilewise.scaled_dot_product_attention(q, k, k)
    got = tilewise.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    want = torch_sdpa(q, k, k, enable_gqa=True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_sdpa_of_rank_3_is_one_row_of_a_batch():
    q = torch.randn(4, 6, 16)
    got = tilewise.scaled_dot_product_attention(q, q, q, is_causal=True)
    want = torch_sdpa(q, q, q, is_causal=True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_outputs_lie_sequence_first():
    """So that the projection after attention need not copy, as after torch's own."""
    q = torch.randn(2, 6, 4, 16)
    assert tilewise.attention(q, q, q).is_contiguous()
    heads_first = q.transpose(1, 2).contiguous()
    out = tilewise.attention(*[heads_first] * 3, layout="bhsd")
    assert out.shape == heads_first.shape and out.transpose(1, 2).is_contiguous()
    _, lse = tilewise.attention(q, q, q, return_lse=True)
    assert lse.is_contiguous()


@pytest.mark.parametrize("shape", [(20, 30), (4, 1, 30), (2, 1, 20, 1), (2, 4, 20, 30)])
@pytest.mark.parametrize("is_bool", [True, False])
def test_attn_mask_is_as_in_torch(shape, is_bool):
    q, k, v = torch.randn(2, 4, 20, 16), *torch.randn(2, 2, 4, 30, 16)
    mask = torch.randn(shape)
    if is_bool:
        mask = (mask > -1) | (torch.arange(shape[-1]) == 0)  # torch: NaN where nothing is seen
    else:
        mask.requires_grad_()
    leaves = [x.requires_grad_() for x in (q, k, v)] + ([] if is_bool else [mask])
    ours = tilewise.scaled_dot_product_attention(q, k, v, mask)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(ours, theirs)
    dout = torch.randn_like(ours)
    grads = [torch.autograd.grad(out, leaves, dout) for out in (ours, theirs)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("causal", ["top_left", "x", 2, None])
def test_flash_attns_causal_is_a_flag(causal):
    q, starts = torch.randn(1, 6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    for attend in (
        lambda causal: tilewise.flash_attn_func(q, q, q, causal=causal),
        lambda causal: tilewise.flash_attn_varlen_func(
            q[0], q[0], q[0], starts, starts, causal=causal
        ),
    ):
        with pytest.raises(tilewise.ArgumentError, match="causal=.*False or True"):
            attend(causal)
        assert torch.equal(attend(1), attend(True)) and torch.equal(attend(0), attend(False))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(10, 10), (4, 1, 6, 6), (1, 3, 6, 6), (5, 6), (2, 2, 6, 0)])
def test_an_attn_mask_of_another_size_is_refused(shape, dtype):
    q = torch.randn(2, 2, 6, 4)
    with pytest.raises(tilewise.ArgumentError, match=r"attn_mask has shape .*\(2, 2, 6, 6\)"):
        tilewise.scaled_dot_product_attention(q, q, q, torch.ones(shape).to(dtype))


@pytest.mark.parametrize("is_bool", [True, False])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_an_attn_mask_of_nothing(batch, seqlen_q, seqlen_k, is_bool):
    q, k = torch.randn(batch, 2, seqlen_q, 16), torch.randn(batch, 2, seqlen_k, 16)
    mask = torch.ones(batch, 1, seqlen_q, seqlen_k)
    out = tilewise.scaled_dot_product_attention(q, k, k, mask.bool() if is_bool else mask)
    assert out.shape == q.shape and not out.any()


def test_attn_mask_with_is_causal_is_refused_as_in_torch():
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(tilewise.ArgumentError, match="is_causal"):
        tilewise.scaled_dot_product_attention(q, q, q, torch.ones(8, 8).bool(), 0.0, True)
    with pytest.raises(tilewise.ArgumentError, match="attn_mask has shape"):
        tilewise.scaled_dot_product_attention(q, q, q, torch.ones(1, 1, 1, 8, 8))
