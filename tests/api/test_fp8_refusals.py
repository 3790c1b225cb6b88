"""What calls with FP8 products refuse, by name."""

import pytest
import torch
from helpers.fp8_calls import INT32, SINKS, eight, starts, tensors

import tilewise
from tilewise import ArgumentError
from tilewise.kernels.common.quantized import FP8

BF16 = torch.bfloat16


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
        "with a Quantized",
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


def test_scales_may_be_negative_for_v_alone():
    scale = torch.tensor(-1.5)
    out = tilewise.attention(*eight(), v_descale=scale)
    assert torch.equal(out, -tilewise.attention(*eight(), v_descale=-scale))
    for name in ("q_descale", "k_descale"):
        with pytest.raises(ArgumentError, match=f"{name} has -1.5"):
            tilewise.attention(*eight(), **{name: scale})


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


LENGTHS = dict(
    cu_seqlens_q=([0, 20, 60], [0, 30, 60]),
    cu_seqlens_k=([0, 30, 60], [0, 20, 60]),
    seqused_q=([20, 20], [20, 40]),
    seqused_k=([10, 30], [11, 30]),
)


@pytest.mark.parametrize("name", LENGTHS)
def test_a_quantized_of_other_lengths(name):
    """As many sequences with other lengths: values are compared where they may be read."""
    made = {x: torch.tensor(before, dtype=torch.int32) for x, (before, _) in LENGTHS.items()}
    other = torch.tensor(LENGTHS[name][1], dtype=torch.int32)
    x = tilewise.quantize(*[t[0] for t in tensors(1, 60, 60)], **made)
    expected = tilewise.attention(x, **made)
    assert torch.equal(tilewise.attention(x, **{n: t.clone() for n, t in made.items()}), expected)
    for _ in range(2):  # a cached call, too
        with pytest.raises(ArgumentError, match=f"{name} is .* made with .*: pass the same {name}"):
            tilewise.attention(x, **made | {name: other})
    tilewise.attention(x._replace(lengths=None), **made | {name: other})


def test_a_quantized_of_lengths_that_a_call_lacks_or_has_fewer_of():
    x, used = tensors(2, 60, 60), torch.tensor([60, 41], dtype=torch.int32)
    padded = tilewise.quantize(*x, seqused_k=used)
    with pytest.raises(ArgumentError, match="seqused_k is None and the Quantized was made with "):
        tilewise.attention(padded)
    tilewise.attention(padded, seqused_k=used - 1)
    tilewise.attention(tilewise.quantize(*x), seqused_k=used)


@pytest.mark.parametrize("name", ["scales.q", "scales.v", "v_mean", "v_drift"])
def test_a_quantized_with_numbers_of_another_dtype(name):
    x = tilewise.quantize(*tensors(headdims=(32, 144)))
    if name in ("v_mean", "v_drift"):
        x = x._replace(**{name: getattr(x, name).double()})
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
