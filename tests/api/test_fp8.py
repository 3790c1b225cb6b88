"""Calls with FP8 products: the formula, and every function that takes them."""

import sys

import pytest
import torch
from helpers.fp8_calls import FEATURES, INT32, assert_near, eight, exactly, starts, tensors

import tilewise
from tilewise.kernels.common.quantized import FP8
from tilewise.ops.fp8 import meant
from tilewise.problem import Extras

BF16 = torch.bfloat16


@pytest.mark.parametrize("name", FEATURES)
def test_raw_tensors_and_their_scales(name):
    given, factors = eight(), (0.5, 0.25, 3.0)
    descales = dict(zip(("q_descale", "k_descale", "v_descale"), map(torch.tensor, factors)))
    options = dict(return_lse=True, out_dtype=torch.float32, **FEATURES[name])
    found = tilewise.attention(*given, **descales, **options)
    assert_near(found, exactly(given, factors, **FEATURES[name]))


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("rotate", [False, True])
def test_a_quantized_in_place_of_q_k_and_v(name, rotate):
    """Against fp64 of what it stands for."""
    options = FEATURES[name]
    smooth = "v" if name in ("sinks", "softcap") else True
    used = options.get("seqused_k")
    x = tilewise.quantize(*tensors(), rotate=rotate, smooth=smooth, seqused_k=used)
    found = tilewise.attention(x, return_lse=True, out_dtype=torch.float32, **options)
    assert_near(found, exactly(meant(x, rotate, Extras()), **options), 3e-5)


def test_scales_broadcast():
    given = eight()
    full = torch.tensor([[0.5, 2.0], [0.5, 2.0]])
    expected = tilewise.attention(*given, q_descale=full, k_descale=full, v_descale=full)
    by_head = full[0]
    found = tilewise.attention(*given, q_descale=by_head, k_descale=by_head, v_descale=by_head)
    assert torch.equal(found, expected)
    one = torch.full((2, 2), 0.5)
    found = tilewise.attention(*given, k_descale=one[0, 0], v_descale=one)
    assert torch.equal(found, tilewise.attention(*given, k_descale=one, v_descale=one[0]))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_out_dtype(dtype):
    given = eight()
    out, lse = tilewise.attention(*given, out_dtype=dtype, return_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    exact = exactly(given)[0]
    assert (out - exact).norm() < 4 * torch.finfo(dtype).eps * exact.norm()
    assert tilewise.attention(*given).dtype == BF16


def test_the_second_call_is_the_first_and_sees_what_changed():
    given = eight()
    descale = torch.ones(())
    first = tilewise.attention(*given, v_descale=descale)
    assert torch.equal(tilewise.attention(*given, v_descale=descale), first)
    assert torch.equal(tilewise.attention(*given, v_descale=descale * 2), first * 2)
    for changed in (dict(causal=True), dict(scale=0.1), dict(out_dtype=torch.float32)):
        assert not torch.equal(tilewise.attention(*given, v_descale=descale, **changed), first)


# the functions


def test_layouts():
    given = eight()
    turned = [x.transpose(1, 2).contiguous() for x in given]
    out, lse = tilewise.attention(*given, causal=True, return_lse=True)
    found = tilewise.attention(*turned, causal=True, return_lse=True, layout="bhsd")
    assert torch.equal(found[0].transpose(1, 2), out) and torch.equal(found[1], lse)
    x = tilewise.quantize(*tensors())
    expected = tilewise.attention(x, causal=True)
    found = tilewise.attention(x, causal=True, layout="bhsd")
    assert torch.equal(found.transpose(1, 2), expected)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_packed_sequences_are_as_they_are_alone(is_quantized):
    queries, keys = [70, 0, 33], [150, 5, 40]
    parts = [tensors(1, m, n, seed=i) for i, (m, n) in enumerate(zip(queries, keys))]
    cu = dict(cu_seqlens_q=starts(*queries), cu_seqlens_k=starts(*keys))
    packed = [torch.cat([p[i][0] for p in parts]) for i in range(3)]
    options = dict(causal=True, return_lse=True)
    if is_quantized:
        found = tilewise.attention(tilewise.quantize(*packed, **cu), **cu, **options)
        alone = [tilewise.attention(tilewise.quantize(*p), **options) for p in parts]
    else:
        scale = torch.rand(3, 2) + 0.5
        found = tilewise.attention(*eight(*packed), **cu, k_descale=scale, **options)
        alone = [
            tilewise.attention(*eight(*p), k_descale=scale[i], **options)
            for i, p in enumerate(parts)
        ]
    assert found[0].shape == (103, 4, 16) and found[1].shape == (4, 103)
    for i, (out, lse) in enumerate(alone):
        torch.testing.assert_close(found[0].split(queries)[i], out[0], rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(found[1].split(queries, 1)[i], lse[0], rtol=1e-5, atol=1e-5)


def test_lengths_in_use_of_packed_sequences():
    q, k, v = (x[0] for x in tensors(1, 60, 60))
    q[20:30], k[25:30], v[25:30] = (torch.nan,) * 3
    cu = dict(cu_seqlens_q=starts(30, 30), cu_seqlens_k=starts(30, 30))
    used = dict(
        seqused_q=torch.tensor([20, 30], dtype=INT32), seqused_k=torch.tensor([25, 30], dtype=INT32)
    )
    out, lse = tilewise.attention(
        tilewise.quantize(q, k, v, **cu, **used), **cu, **used, return_lse=True
    )
    assert out.isfinite().all() and (out[20:30] == 0).all() and (lse[:, 20:30] == -torch.inf).all()


def test_flash_attn_func():
    given = eight()
    scale = torch.tensor([0.5, 2.0])
    descales = dict(q_descale=scale, k_descale=scale, v_descale=scale)
    expected = tilewise.attention(*given, causal=True, window=(40, 0), return_lse=True, **descales)
    found = tilewise.flash_attn_func(
        *given, 0.0, None, True, (40, 0), return_attn_probs=True, **descales
    )
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    x = tilewise.quantize(*tensors())
    found = tilewise.flash_attn_func(x, None, None, causal=True, out_dtype=torch.float16)
    assert torch.equal(found, tilewise.attention(x, causal=True, out_dtype=torch.float16))


def test_flash_attn_varlen_func():
    given = [x[0] for x in eight(*tensors(1, 60, 60))]
    cu = starts(20, 40), starts(30, 30)
    scale = torch.rand(2, 2)
    expected = tilewise.attention(
        *given, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], causal=True, k_descale=scale
    )
    found = tilewise.flash_attn_varlen_func(*given, *cu, 40, 30, causal=True, k_descale=scale)
    assert torch.equal(found, expected)
    whole = (x[0] for x in tensors(1, 60, 60))
    x = tilewise.quantize(*whole, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])
    expected = tilewise.attention(x, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])
    assert torch.equal(tilewise.flash_attn_varlen_func(x, None, None, *cu), expected)


def test_pages_of_8_bits_keep_their_scales_in_varlen():
    q, k, v = tensors(1, 20, 32)
    k, v = (x.reshape(2, 16, 2, -1).to(FP8) for x in (k, v))
    table, used = torch.tensor([[1, 0]], dtype=INT32), torch.tensor([32], dtype=INT32)
    scale = torch.tensor(0.5)
    given = q[0].to(BF16), k, v, starts(20), starts(32)
    found = tilewise.flash_attn_varlen_func(*given, block_table=table, k_descale=scale)
    expected = tilewise.attention(
        *given[:3], page_table=table, seqused_k=used, cu_seqlens_q=starts(20), k_descale=scale
    )
    assert torch.equal(found, expected)


def test_missing_scales_are_one_tensor_and_the_call_is_looked_up_once(monkeypatch):
    """A tensor of ones is a kernel's launch, and a look costs as much as another."""
    q, k, v = (torch.randn(1, 16, 2, 64).to(torch.float8_e4m3fn) for _ in range(3))
    ones, looks = [], []
    new_ones = torch.Tensor.new_ones
    monkeypatch.setattr(
        torch.Tensor, "new_ones", lambda x, *a, **o: ones.append(a) or new_ones(x, *a, **o)
    )
    for name in ("attention", "fp8"):
        monkeypatch.setattr(
            sys.modules[f"tilewise.frontend.{name}"],
            "find",
            lambda *a, **o: looks.append(a) or (None, None),
        )
    tilewise.attention(q, k, v)
    tilewise.attention(q, k, v, k_descale=torch.tensor(2.0))
    assert ones == [(1, 2)] * 2 and len(looks) == 2
