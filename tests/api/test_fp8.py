"""Calls with FP8 products: the formula, every function that takes them, what is refused."""

import pytest
import torch

import tilewise
from tilewise import ArgumentError, dispatch
from tilewise.kernels.common.quantized import FP8
from tilewise.ops.fp8 import meant
from tilewise.problem import Extras

INT32 = torch.int32
BF16 = torch.bfloat16
CALL = torch.ops.tilewise.flash_attn_fp8_forward.default
SLOPES = torch.tensor([0.3, 0.1, 0.7, 0.2])
SINKS = torch.tensor([0.3, 2.0, -1.0, 0.0])
FEATURES = {
    "plain": {},
    "causal": dict(causal=True),
    "top left": dict(causal="top_left"),
    "window": dict(window=(40, 7)),
    "softcap": dict(causal=True, softcap=2.0),
    "alibi": dict(causal=True, alibi_slopes=SLOPES),
    "sinks": dict(causal=True, sinks=SINKS),
    "seqused": dict(causal=True, seqused_k=torch.tensor([90, 0], dtype=INT32)),
    "scale": dict(scale=0.3),
}


def tensors(batch=2, seqlen_q=70, seqlen_k=150, heads=(4, 2), headdims=(32, 16), seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    q = draw(batch, seqlen_q, heads[0], headdims[0])
    k, v = (draw(batch, seqlen_k, heads[1], d) for d in headdims)
    return q, k + 1, v + 1


def eight(*given):
    return [x.to(FP8) for x in given or tensors()]


def starts(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(INT32)


def exactly(given, descales=(1.0, 1.0, 1.0), **options):
    given = [x.double() * s for x, s in zip(given, descales)]
    return tilewise.attention_reference(*given, return_lse=True, **options)


def assert_near(found, exact, rtol=1e-5):
    for mine, theirs in zip(found, exact):
        torch.testing.assert_close(mine.double(), theirs, rtol=rtol, atol=rtol)


# the formula


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


# torch.library


def arguments(is_transposed, **features):
    q, k, v = eight()
    scales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    if is_transposed:
        v = tilewise.quantize(*tensors()).v_t
    given = dict.fromkeys(
        ("alibi_slopes", "sinks", "seqused_k", "seqused_q", "cu_seqlens_q", "cu_seqlens_k")
    )
    tensors_of = *(q, k, v), *scales, torch.rand(2, 2, 16), *(given | features).values()
    numbers = 0.25, 0.0, -1, 0, "bottom_right", False
    return *tensors_of, is_transposed, *numbers, BF16, None


@pytest.mark.parametrize("is_transposed", [False, True])
def test_opcheck(is_transposed):
    # Its test of the schema adds noise to inputs, which torch does not for 8 bits
    tests = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    for features in ({}, dict(alibi_slopes=SLOPES, sinks=SINKS)):
        given = arguments(is_transposed, **features)
        before = [x.clone() for x in given[:3]]
        torch.library.opcheck(CALL, given, test_utils=tests)
        for x, y in zip(given, before):
            assert torch.equal(x.view(torch.int8), y.view(torch.int8))
    assert not CALL._schema.is_mutable


def test_a_compiled_graph_prepares_a_signature_once(monkeypatch):
    """Its calls do not pass through the functions, which cache them."""
    chosen, choose = [], dispatch.choose_fp8

    def counted(*asked):
        chosen.append(asked)
        return choose(*asked)

    monkeypatch.setattr(dispatch, "choose_fp8", counted)
    x = tilewise.quantize(*tensors(seqlen_q=61, seed=8), smooth=False)
    given = (*x[:3], *x.scales, None, *[None] * 6)
    options = [0.3, 0.0, -1, -1, "bottom_right", False, torch.float32, None]
    first = CALL(*given, True, *options)
    assert all(torch.equal(a, b) for a, b in zip(first, CALL(*given, True, *options)))
    assert len(chosen) == 1
    options[0] = 0.1
    assert not torch.equal(first[0], CALL(*given, True, *options)[0]) and len(chosen) == 2
    options[6] = BF16
    assert CALL(*given, True, *options)[0].dtype == BF16
    doubled = [x.scales.q * 2 if t is x.scales.q else t for t in given]
    assert not torch.equal(first[1], CALL(*doubled, True, *options)[1])


def test_the_operator_has_no_gradient():
    given = list(arguments(True))
    given[3] = given[3].requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient"):
        CALL(*given)[0].sum().backward()


@pytest.mark.parametrize("options", [{}, dict(softcap=3.0), dict(alibi_slopes=SLOPES)])
def test_one_graph(options):
    torch._dynamo.reset()

    def step(q, k, v, scale):
        q, k, v = (x.to(FP8) for x in (q, k, v))
        return tilewise.attention(q, k, v, causal=True, k_descale=scale, return_lse=True, **options)

    given = *tensors(), torch.tensor(0.5)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for mine, eager in zip(compiled(*given), step(*given)):
        assert torch.equal(mine, eager)


def test_one_graph_for_every_length():
    torch._dynamo.reset()

    def step(q, k, v):
        return tilewise.attention(q, k, v, causal=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen_k in (150, 90):
        given = eight(*tensors(seqlen_k=seqlen_k))
        assert torch.equal(compiled(*given), step(*given))


def test_one_graph_of_quantising_and_attending():
    torch._dynamo.reset()
    cu = dict(cu_seqlens_q=starts(20, 40), cu_seqlens_k=starts(30, 30))

    def step(q, k, v, cu):
        x = tilewise.quantize(q, k, v, **cu)
        return tilewise.attention(x, causal=True, return_lse=True, **cu)

    given = *(x[0] for x in tensors(1, 60, 60)), cu
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for mine, eager in zip(compiled(*given), step(*given)):
        torch.testing.assert_close(mine, eager)


def test_fake_tensors_and_meta():
    given = [x.to("meta") for x in eight()]
    out, lse = tilewise.attention(*given, return_lse=True)
    assert out.is_meta and out.shape == (2, 70, 4, 16) and out.dtype == BF16
    assert lse.shape == (2, 4, 70)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_flops_are_counted(is_quantized):
    from torch.utils.flop_counter import FlopCounterMode

    given = tensors(headdims=(32, 16))
    with FlopCounterMode(display=False) as expected:
        tilewise.attention(*given, causal=True)
    inputs = [tilewise.quantize(*given)] if is_quantized else eight(*given)
    with FlopCounterMode(display=False) as counted:
        tilewise.attention(*inputs, causal=True)
    assert counted.get_total_flops() == expected.get_total_flops() > 0


# gradients


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "sinks", "seqused"])
def test_straight_through(rotate, name):
    """The gradients of what the 8 bits stand for, which autograd has of the reference."""
    options = FEATURES[name]
    given = [x.requires_grad_() for x in tensors(headdims=(32, 32))]
    sinks = {}
    if "sinks" in options:
        sinks = dict(sinks=SINKS.clone().requires_grad_())
    used, smooth = options.get("seqused_k"), "v" if sinks else True
    x = tilewise.quantize(*given, rotate=rotate, smooth=smooth, seqused_k=used)
    out, lse = tilewise.attention(x, backward="bf16", return_lse=True, **options | sinks)
    exact = [t.detach().double().requires_grad_() for t in meant(x, rotate, Extras())]
    same = {name: t.detach().double().requires_grad_() for name, t in sinks.items()}
    theirs, lse_of_theirs = tilewise.attention_reference(*exact, return_lse=True, **options | same)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    both = (
        (out * weights).sum() + 0.1 * lse.masked_fill(lse == -torch.inf, 0).sum(),
        (theirs * weights).sum()
        + 0.1 * lse_of_theirs.masked_fill(lse_of_theirs == -torch.inf, 0).sum(),
    )
    for loss in both:
        loss.backward()
    for mine, oracle in zip((*given, *sinks.values()), (*exact, *same.values())):
        assert mine.grad.dtype == mine.dtype
        assert (mine.grad - oracle.grad).norm() < 0.02 * oracle.grad.norm()


def test_straight_through_of_packed_and_transposed_tensors():
    given = [x[0].requires_grad_() for x in tensors(1, 60, 60)]
    cu = dict(cu_seqlens_q=starts(20, 40), cu_seqlens_k=starts(30, 30))
    x = tilewise.quantize(*given, **cu)
    tilewise.attention(x, backward="bf16", causal=True, **cu).float().square().sum().backward()
    packed = [t.grad for t in given]
    whole = [x.detach().split((20, 40) if i == 0 else (30, 30)) for i, x in enumerate(given)]
    for i in range(2):
        alone = [t[i][None].transpose(1, 2).requires_grad_() for t in whole]
        y = tilewise.quantize(*alone, layout="bhsd")
        out = tilewise.attention(y, backward="bf16", causal=True, layout="bhsd")
        out.float().square().sum().backward()
        for n, (mine, theirs) in enumerate(zip(packed, alone)):
            part = mine.split((20, 40) if n == 0 else (30, 30))[i]
            theirs = theirs.grad[0].transpose(0, 1)
            torch.testing.assert_close(part, theirs, rtol=0.05, atol=0.02)


def test_no_gradient_without_being_asked():
    given = [x.requires_grad_() for x in tensors()]
    x = tilewise.quantize(*given)
    with pytest.raises(NotImplementedError, match='q.requires_grad.*backward="bf16"'):
        tilewise.attention(x)
    with pytest.raises(NotImplementedError, match="requires_grad"):
        tilewise.flash_attn_func(x, None, None)
    with torch.no_grad():
        assert not tilewise.attention(x).requires_grad
    assert not tilewise.attention(tilewise.quantize(*tensors()), backward="bf16").requires_grad


def test_no_second_gradient():
    given = [x.requires_grad_() for x in tensors()]
    out = tilewise.attention(tilewise.quantize(*given), backward="bf16")
    grad = torch.autograd.grad(out.sum(), given[0], create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="differentiable once"):
        grad.sum().backward()


# what is refused


def changed(**dtypes):
    given = dict(zip("qkv", tensors()))
    return [x.to(dtypes.get(name, FP8)) for name, x in given.items()]


REFUSED = {
    "e5m2": (changed(q=torch.float8_e5m2), {}, NotImplementedError, "q.dtype is torch.float8_e5m2"),
    "fnuz": (
        changed(v=torch.float8_e4m3fnuz),
        {},
        NotImplementedError,
        "v.dtype is torch.float8_e4m3fnuz",
    ),
    "int8": (changed(q=torch.int8, k=torch.int8, v=torch.int8), {}, NotImplementedError, "q.dtype"),
    "mixed": (changed(k=BF16), {}, ArgumentError, "k.dtype is torch.bfloat16"),
    "16-bit q": (
        changed(q=BF16),
        dict(q_descale=torch.ones(())),
        ArgumentError,
        "q.dtype is torch.bfloat16",
    ),
    "16 bits": (tensors(), dict(q_descale=torch.ones(())), ArgumentError, "q_descale"),
    "out_dtype of 16 bits": (tensors(), dict(out_dtype=BF16), ArgumentError, "out_dtype"),
    "backward of 16 bits": (tensors(), dict(backward="bf16"), ArgumentError, "backward"),
    "bias": (eight(), dict(bias=torch.zeros(1, 1, 70, 150)), NotImplementedError, "bias with FP8"),
    "mask": (eight(), dict(mask_mod=lambda b, h, i, j: i >= j), NotImplementedError, "mask_mod"),
    "score": (eight(), dict(score_mod=lambda s, b, h, i, j: s), NotImplementedError, "score_mod"),
    "dropout": (eight(), dict(dropout_p=0.1), NotImplementedError, "dropout_p with FP8"),
    "pages": (
        eight(),
        dict(page_table=torch.zeros(2, 1, dtype=INT32)),
        NotImplementedError,
        "page_table with FP8",
    ),
    "split_size": (eight(), dict(split_size=64), NotImplementedError, "split_size with FP8"),
    "out": (eight(), dict(out=torch.zeros(2, 70, 4, 16)), NotImplementedError, "out with FP8"),
    "out_dtype": (eight(), dict(out_dtype=FP8), ArgumentError, "out_dtype"),
    "a scale's shape": (eight(), dict(k_descale=torch.ones(4)), ArgumentError, "k_descale has"),
    "a scale's dtype": (eight(), dict(v_descale=torch.ones(()).half()), ArgumentError, "v_descale"),
    "a scale's gradient": (
        eight(),
        dict(v_descale=torch.ones((), requires_grad=True)),
        NotImplementedError,
        "v_descale.requires_grad",
    ),
    "sinks' gradient": (
        eight(),
        dict(sinks=SINKS.clone().requires_grad_()),
        NotImplementedError,
        "sinks.requires_grad",
    ),
    "backward": (eight(), dict(backward="fp8"), ArgumentError, "backward='fp8'"),
    "softcap of a shifted k": (
        [tilewise.quantize(*tensors())],
        dict(softcap=2.0),
        NotImplementedError,
        'softcap.*smooth="v"',
    ),
    "sinks of a shifted k": (
        [tilewise.quantize(*tensors())],
        dict(sinks=SINKS),
        NotImplementedError,
        "sinks.*smooth=False",
    ),
    "k beside a Quantized": (
        [tilewise.quantize(*tensors()), *tensors()[1:]],
        {},
        ArgumentError,
        "beside a Quantized",
    ),
    "a scale beside a Quantized": (
        [tilewise.quantize(*tensors())],
        dict(k_descale=torch.ones(())),
        ArgumentError,
        "k_descale",
    ),
    "q alone": (tensors()[:1], {}, ArgumentError, "k is None"),
    "a Quantized of a batch as packed": (
        [tilewise.quantize(*tensors())],
        dict(cu_seqlens_q=starts(70), cu_seqlens_k=starts(150)),
        ArgumentError,
        "the same cu_seqlens",
    ),
    "a backend": (eight(), dict(backend="cuda"), ArgumentError, "backend='cuda'"),
    "causal": (eight(), dict(causal="left"), ArgumentError, "causal"),
    "layout": (eight(), dict(layout="sbhd"), ArgumentError, "layout"),
    "window": (eight(), dict(window=(1, 2, 3)), ArgumentError, "window"),
    "max_seqlen_k": (eight(), dict(max_seqlen_k=-1), ArgumentError, "max_seqlen_k=-1"),
    "deterministic": (eight(), dict(deterministic="no"), ArgumentError, "deterministic='no'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    given, options, error, says = REFUSED[name]
    with pytest.raises(error, match=says):
        tilewise.attention(*given, **options)


def test_a_quantized_of_other_sequences():
    given = [x[0] for x in tensors(1, 60, 60)]
    x = tilewise.quantize(*given, cu_seqlens_q=starts(20, 40), cu_seqlens_k=starts(30, 30))
    with pytest.raises(ArgumentError, match="the same cu_seqlens"):
        tilewise.attention(x, cu_seqlens_q=starts(60), cu_seqlens_k=starts(60))
    with pytest.raises(ArgumentError, match="the same cu_seqlens"):
        tilewise.attention(x)


@pytest.mark.parametrize("name", ["scales.q", "scales.v", "v_mean"])
def test_a_quantized_with_numbers_of_another_dtype(name):
    x = tilewise.quantize(*tensors())
    if name == "v_mean":
        x = x._replace(v_mean=x.v_mean.double())
    else:
        x = x._replace(scales=x.scales._replace(**{name[-1]: x.scales.q.half()}))
    with pytest.raises(ArgumentError, match=f"{name} of a Quantized is .* must be float32"):
        tilewise.attention(x)


def test_refusals_of_flash_attns_functions():
    q, k, v = eight()
    with pytest.raises(ArgumentError, match="deterministic=3"):
        tilewise.flash_attn_func(q, k, v, deterministic=3)
    for options in (dict(dropout_p=0.1), dict(attention_chunk=8)):
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            tilewise.flash_attn_func(q, k, v, **options)
    with pytest.raises(ArgumentError, match="v_descale"):
        tilewise.flash_attn_func(*tensors(), v_descale=torch.ones(()))
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    with pytest.raises(NotImplementedError, match="block_table with FP8"):
        tilewise.flash_attn_varlen_func(
            *packed, starts(140), starts(300), block_table=torch.zeros(1, 1, dtype=INT32)
        )
    cached = dict(cache_seqlens=torch.tensor([9, 9], dtype=INT32))
    with pytest.raises(NotImplementedError, match="8-bit q"):
        tilewise.flash_attn_with_kvcache(q, k, v, q_descale=torch.ones(()), **cached)
    with pytest.raises(ArgumentError, match="q.dtype"):
        tilewise.flash_attn_with_kvcache(q, k, v, **cached)
    with pytest.raises(ArgumentError, match="dtype"):
        tilewise.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, q, q)))


def test_a_cached_signature_hides_no_argument():
    """A call that is known without a scale is not served with one."""
    given = [x.to(BF16) for x in tensors()]
    for _ in range(2):
        tilewise.attention(*given)
        with pytest.raises(ArgumentError, match="q_descale"):
            tilewise.attention(*given, q_descale=torch.ones(()))
        tilewise.flash_attn_func(*given)
        with pytest.raises(ArgumentError, match="descale"):
            tilewise.flash_attn_func(*given, k_descale=torch.ones(()))


@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_a_forced_backend_says_why_not(backend):
    with pytest.raises(NotImplementedError, match=f"{backend}: "):
        tilewise.attention(*eight(), backend=backend)
