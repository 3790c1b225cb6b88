"""Wrong input is refused by name, with its shape or value and a remedy; odd input is served."""

import contextlib
import math

import numpy as np
import pytest
import torch

import tilewise
from tilewise.kernels import cpu
from tilewise.testing import use_interpreter

REMEDY = r"must|cast|move|call |pass |use "


def bshd(batch=2, seqlen=8, nheads=4, headdim=16, **kwargs):
    return torch.randn(batch, seqlen, nheads, headdim, **kwargs)


def strided():
    """Rows of 16 whose elements lie 2 apart."""
    return bshd(headdim=32)[..., ::2]


class Claims:
    """What a message has to hold: these pieces, and what to do."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def hold_in(self, message):
        missing = [piece for piece in self.pieces if piece not in message]
        assert not missing, f"{missing} not in {message!r}"
        assert any(word in message for word in REMEDY.split("|")), f"no remedy in {message!r}"


WRONG_TENSORS = {
    "q of rank 3": ({"q": torch.randn(8, 4, 16)}, Claims("q has shape (8, 4, 16)", "4 dim")),
    "k of rank 5": ({"k": bshd().unsqueeze(0)}, Claims("k has shape (1, 2, 8, 4, 16)")),
    "v a list": ({"v": [1.0]}, Claims("v is a list", "torch.Tensor")),
    "batches": ({"k": bshd(batch=3)}, Claims("k", "batch 3", "batch 2", "(3, 8, 4, 16)")),
    "batch of v": ({"v": bshd(batch=1)}, Claims("v has batch 1", "q has batch 2")),
    "seqlens": ({"v": bshd(seqlen=9)}, Claims("k has seqlen 8", "v has seqlen 9")),
    "heads of v": ({"v": bshd(nheads=2)}, Claims("k has 4 heads", "v has 2")),
    "heads": (
        {"k": bshd(nheads=3), "v": bshd(nheads=3)},
        Claims("q has 4 heads", "k has 3", "multiple"),
    ),
    "more key heads": (
        {"k": bshd(nheads=8), "v": bshd(nheads=8)},
        Claims("q has 4 heads", "k has 8", "multiple"),
    ),
    "no heads": ({"k": bshd(nheads=0), "v": bshd(nheads=0)}, Claims("k has 0")),
    "headdims": ({"k": bshd(headdim=8)}, Claims("q has headdim 16", "k has headdim 8")),
    "no headdim": ({"q": bshd(headdim=0), "k": bshd(headdim=0)}, Claims("q has headdim 0")),
    "no headdim of v": ({"v": bshd(headdim=0)}, Claims("v has headdim 0")),
    "dtype of k": ({"k": bshd().half()}, Claims("k.dtype is torch.float16", "torch.float32")),
    "dtype of v": ({"v": bshd().bfloat16()}, Claims("v.dtype is torch.bfloat16")),
    "integers": (
        {name: bshd().int() for name in "qkv"},
        Claims("q.dtype is torch.int32", "float16", "bfloat16"),
    ),
    "device of k": ({"k": bshd(device="meta")}, Claims("k is on meta", "q is on cpu")),
    "device of v": ({"v": bshd(device="meta")}, Claims("v is on meta", "q is on cpu")),
    "last stride of q": ({"q": strided()}, Claims("q has stride 2", "q.contiguous()")),
    "last stride of k": ({"k": strided()}, Claims("k has stride 2", "k.contiguous()")),
    "last stride of v": ({"v": strided()}, Claims("v has stride 2", "v.contiguous()")),
}
WRONG_VALUES = {
    "window": ({"window": (-2, 0)}, Claims("window=(-2, 0)")),
    "right of window": ({"window": (None, -3)}, Claims("window=(None, -3)")),
    "window of one": ({"window": 4}, Claims("window=4", "pair")),
    "window of three": ({"window": (1, 2, 3)}, Claims("window=(1, 2, 3)", "pair")),
    "window of floats": ({"window": (0.5, 0)}, Claims("window=(0.5, 0)", "ints")),
    "softcap": ({"softcap": -1.0}, Claims("softcap=-1.0", "positive")),
    "softcap inf": ({"softcap": math.inf}, Claims("softcap=inf")),
    "softcap nan": ({"softcap": math.nan}, Claims("softcap=nan")),
    "scale": ({"scale": 0.0}, Claims("scale=0.0", "positive")),
    "negative scale": ({"scale": -1.0}, Claims("scale=-1.0", "negate q")),
    "scale nan": ({"scale": math.nan}, Claims("scale=nan")),
    "scale a word": ({"scale": "x"}, Claims("scale='x'", "number")),
    "softcap a list": ({"softcap": [1.0]}, Claims("softcap=[1.0]", "number")),
    "learned scale": (
        {"scale": torch.tensor(0.3, requires_grad=True)},
        Claims("scale is a tensor", "requires_grad True", "multiply q"),
    ),
    "scales": ({"scale": torch.ones(4)}, Claims("scale is a tensor of shape (4,)", "number")),
    "causal": ({"causal": "left"}, Claims("causal='left'", "top_left", "bottom_right")),
    "causal None": ({"causal": None}, Claims("causal=None")),
    "layout": ({"layout": "sbhd"}, Claims("layout='sbhd'", "bshd", "bhsd")),
    "backend": ({"backend": "fast"}, Claims("backend='fast'", "'portable'", "'cpu'")),
    "shape of slopes": (
        {"alibi_slopes": torch.ones(3)},
        Claims("alibi_slopes has shape (3,)", "(4,)", "(2, 4)"),
    ),
    "dtype of slopes": (
        {"alibi_slopes": torch.ones(4).half()},
        Claims("alibi_slopes.dtype is torch.float16", "float32"),
    ),
    "device of slopes": (
        {"alibi_slopes": torch.ones(4, device="meta")},
        Claims("alibi_slopes is on meta", "cpu"),
    ),
    "slopes a list": ({"alibi_slopes": [1.0] * 4}, Claims("alibi_slopes is a list")),
    "shape of sinks": ({"sinks": torch.ones(2, 4)}, Claims("sinks has shape (2, 4)", "(4,)")),
    "dtype of sinks": ({"sinks": torch.ones(4).int()}, Claims("sinks.dtype is torch.int32")),
    "device of sinks": ({"sinks": torch.ones(4, device="meta")}, Claims("sinks is on meta")),
    "sinks a number": ({"sinks": 0.5}, Claims("sinks is a float")),
    "shape of seqused_k": (
        {"seqused_k": torch.ones(3, dtype=torch.int32)},
        Claims("seqused_k has shape (3,)", "(2,)"),
    ),
    "dtype of seqused_k": (
        {"seqused_k": torch.ones(2, dtype=torch.int64)},
        Claims("seqused_k.dtype is torch.int64", "int32"),
    ),
}


@pytest.mark.parametrize("name", [*WRONG_TENSORS, *WRONG_VALUES])
def test_wrong_input_is_refused_by_name(name):
    wrong, claims = (WRONG_TENSORS | WRONG_VALUES)[name]
    with pytest.raises(tilewise.ArgumentError) as refusal:
        tilewise.attention(**({x: bshd() for x in "qkv"} | wrong))
    claims.hold_in(str(refusal.value))


NESTED = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], layout=torch.jagged)
SPARSE = torch.ones(4).to_sparse()
CALLS = [
    *[("attend", "causal", NESTED), ("attend", "window", SPARSE)],
    *[("reference", "alibi_slopes", 0.5), ("reference", "first", 0), ("reference", "first", "abc")],
    *[("reference", "first", (0, 1.5, 0)), ("reference", "upcast", torch.ones(2))],
    *[("step", "num_splits", "all"), ("step", "num_splits", -1), ("step", "pack_gqa", "no")],
    *[("step", "sm_margin", None), ("step", "rotary_interleaved", "no"), ("step", "out", NESTED)],
    *[("step", "cache_seqlens", n) for n in (10**12, -(10**12), torch.tensor(3, device="meta"))],
    *[("step", "alibi_slopes", SPARSE), ("step", "learnable_sink", NESTED)],
    *[("step", "k", bshd(seqlen=1).to_sparse()), ("step", "v_cache", bshd().to_sparse())],
    *[("quantize", "smooth", np.ones(4)), ("combine", "out_dtype", np.ones(4))],
    *[("packed", "qkv", NESTED), ("torchs", "attn_mask", NESTED)],
    *[("blocks", "device", x) for x in ("abc", 0.5, -5, 1 << 70, torch.ones(1))],
    *[("blocks", "block", 10**12), ("blocks", "block", (16, 1 << 70))],
]


def call_with(function, **changed):
    """A call of a public function, with one argument changed."""
    q = k = v = bshd()
    new = bshd(seqlen=1)
    bound = dict(batch=1, nheads=1, seqlen_q=9, seqlen_k=9)
    called, arguments = {
        "attend": (tilewise.attention, dict(q=q, k=k, v=v)),
        "reference": (tilewise.attention_reference, dict(q=q, k=k, v=v)),
        "step": (
            tilewise.flash_attn_with_kvcache,
            dict(q=new, k_cache=bshd(), v_cache=bshd(), k=new, v=new, cache_seqlens=3),
        ),
        "quantize": (tilewise.quantize, dict(q=q, k=k, v=v)),
        "combine": (
            tilewise.flash_attn_combine,
            dict(out_partial=torch.ones(3, 5, 4, 8), lse_partial=torch.ones(3, 5, 4)),
        ),
        "packed": (tilewise.flash_attn_qkvpacked_func, {}),
        "torchs": (tilewise.scaled_dot_product_attention, dict(query=q, key=k, value=v)),
        "blocks": (
            tilewise.sparse.create_block_mask,
            dict(mask=tilewise.mods.causal(), **bound),
        ),
    }[function]
    return called(**arguments | changed)


@pytest.mark.parametrize(
    ("function", "name", "value"),
    CALLS,
    ids=[f"{function} {name} {i}" for i, (function, name, _) in enumerate(CALLS)],
)
def test_wrong_values_are_refused_by_name(function, name, value):
    with pytest.raises(tilewise.ArgumentError, match=rf"(?s)^{name}\b"):
        call_with(function, **{name: value})


def test_a_chunk_past_all_lengths_is_no_chunk():
    q = bshd()
    chunked = tilewise.flash_attn_func(q, q, q, attention_chunk=1 << 70)
    torch.testing.assert_close(chunked, tilewise.flash_attn_func(q, q, q))


def test_an_argument_error_is_what_callers_of_both_families_catch():
    for family in (ValueError, RuntimeError):
        with pytest.raises(family, match="q has shape"):
            tilewise.attention(torch.ones(3), bshd(), bshd())


def test_shapes_are_told_with_their_order():
    q, k = bshd().transpose(1, 2), bshd(headdim=8).transpose(1, 2)
    with pytest.raises(tilewise.ArgumentError) as refusal:
        tilewise.attention(q, k, k, layout="bhsd")
    shapes = "(batch, seqlen, nheads, headdim): q (2, 8, 4, 16), k (2, 8, 4, 8), v (2, 8, 4, 8)"
    Claims(shapes).hold_in(str(refusal.value))


def test_slopes_that_want_a_gradient_are_refused():
    slopes = torch.ones(4, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"alibi_slopes.*detach"):
        tilewise.attention(bshd(), bshd(), bshd(), alibi_slopes=slopes)
    learned = bshd().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"alibi_slopes.*detach"):
        tilewise.attention(learned, bshd(), bshd(), alibi_slopes=slopes, split_size=16)
    with torch.no_grad():
        tilewise.attention(bshd(), bshd(), bshd(), alibi_slopes=slopes)


def test_a_last_dimension_of_one_has_no_stride():
    q = bshd(headdim=4)[..., :1]
    torch.testing.assert_close(
        tilewise.attention(q, q, q), tilewise.attention(*[q.contiguous()] * 3)
    )


def test_every_refusal_is_printed(monkeypatch):
    monkeypatch.setattr(cpu, "supports", lambda problem, device: "computes nothing today")
    x = bshd(headdim=31)  # a choice that was made before is kept
    with pytest.raises(NotImplementedError) as refusal:
        tilewise.attention(x, x, x)
    message = str(refusal.value)
    assert "on cpu" in message
    assert "\n  portable: " in message
    assert "\n  cpu: computes nothing today" in message


def test_a_forced_backend_gives_its_own_reason_alone():
    with pytest.raises(NotImplementedError) as refusal:
        tilewise.attention(bshd(), bshd(), bshd(), backend="portable")
    assert "portable: " in str(refusal.value)
    assert "use_interpreter()" in str(refusal.value)
    assert "\n  cpu: " not in str(refusal.value)
    wide = bshd(headdim=513)
    with use_interpreter(), pytest.raises(NotImplementedError, match="headdim 513 is over 512"):
        tilewise.attention(wide, wide, wide, backend="portable")


@pytest.fixture(params=["cpu", "portable"])
def backend(request):
    with use_interpreter() if request.param == "portable" else contextlib.nullcontext():
        yield request.param


EMPTY = {
    "batch": ((0, 8, 4, 16), (0, 8, 2, 16)),
    "queries": ((2, 0, 4, 16), (2, 8, 2, 16)),
    "both": ((2, 0, 4, 16), (2, 0, 2, 16)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
def test_nothing_in_gives_nothing_out(backend, shapes, causal):
    q, k, v = (torch.randn(s, requires_grad=True) for s in (*shapes, shapes[1]))
    sinks = torch.randn(4, requires_grad=True)
    call = {"causal": causal, "return_lse": True, "backend": backend}
    out, lse = tilewise.attention(q, k, v, sinks=sinks, **call)
    assert out.shape == q.shape
    assert lse.shape == (q.shape[0], 4, q.shape[1])
    (out.sum() + lse.sum()).backward()
    for x in (q, k, v, sinks):
        assert x.grad.shape == x.shape
        assert not x.grad.count_nonzero()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_no_keys_give_zeros(backend, has_sinks, causal):
    q, k, v = bshd(), bshd(seqlen=0, nheads=2), bshd(seqlen=0, nheads=2, headdim=8)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sinks = torch.randn(4, requires_grad=True) if has_sinks else None
    call = {"causal": causal, "return_lse": True, "backend": backend}
    out, lse = tilewise.attention(q, k, v, sinks=sinks, **call)
    assert out.shape == (2, 8, 4, 8)
    assert not out.count_nonzero()
    want = torch.full((), -math.inf) if sinks is None else sinks.detach().view(1, 4, 1)
    torch.testing.assert_close(lse.detach(), want.expand(2, 4, 8))
    dlse = torch.randn_like(lse)
    torch.autograd.backward((out, lse), (torch.randn_like(out), dlse))
    assert [x.grad.shape for x in leaves] == [x.shape for x in leaves]
    assert not q.grad.count_nonzero()
    if sinks is not None:  # lse is the sink
        torch.testing.assert_close(sinks.grad, dlse.sum((0, 2)))


def _attend_with_nan(backend, where: str, row: int, **features):
    """Rows of out (batch, seqlen, nheads) that hold a NaN, and the same call without it."""
    tensors = dict(zip("qkv", torch.randn(3, 2, 40, 2, 16).unbind(0), strict=True))
    clean = tilewise.attention(**tensors, backend=backend, **features)
    tensors[where][1, row, 0, 3] = math.nan
    out = tilewise.attention(**tensors, backend=backend, **features)
    hit = out.isnan().any(-1)
    torch.testing.assert_close(out[~hit], clean[~hit])
    return hit


def test_nan_in_q_reaches_its_row(backend):
    hit = _attend_with_nan(backend, "q", 7)
    assert hit.nonzero().tolist() == [[1, 7, 0]]


@pytest.mark.parametrize(
    ("features", "first", "stop"),
    [({"causal": True}, 7, 40), ({"window": (4, 2)}, 5, 12), ({}, 0, 40)],
    ids=["causal", "window", "full"],
)
def test_nan_in_k_reaches_the_rows_that_see_it(backend, features, first, stop):
    hit = _attend_with_nan(backend, "k", 7, **features)
    assert hit.nonzero().tolist() == [[1, row, 0] for row in range(first, stop)]


def test_nan_in_v_stays_in_its_head(backend):
    hit = _attend_with_nan(backend, "v", 7, causal=True)
    assert hit[1, 7:, 0].all()
    hit[1, :, 0] = False  # a row that does not see it may still load its tile: 0 * NaN
    assert not hit.any()


def test_padding_is_never_read(backend):
    q, k, v = torch.randn(3, 2, 20, 2, 16).unbind(0)
    used = torch.tensor([13, 0], dtype=torch.int32)
    want = tilewise.attention(q, k, v, seqused_k=used, backend=backend)
    for x in (k, v):
        x[0, 13:] = x[1] = math.nan
    torch.testing.assert_close(tilewise.attention(q, k, v, seqused_k=used, backend=backend), want)
    assert not want[1].count_nonzero()
