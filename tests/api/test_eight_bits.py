"""Caches of 8 bits: the formula of what they stand for, the contract, what is refused."""

import contextlib

import pytest
import torch
from helpers.caches import INT32
from helpers.eight_bits import DTYPES, KINDS, quantised
from helpers.tiers import sample
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise
from tilewise import ArgumentError
from tilewise.testing import use_interpreter
from tilewise.testing.tolerance import assert_within

BF16, E4M3, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
SPLIT = 32
CALL = torch.ops.tilewise.flash_attn_cache.default
CALL_OUT = torch.ops.tilewise.flash_attn_cache_out.default
FEATURES = {
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(45, 0)),
    "softcap": dict(causal=True, softcap=2.0, alibi_slopes=torch.tensor([0.3, 0.1, 0.7, 0.2])),
    "sinks": dict(causal=True, sinks=torch.tensor([0.3, 2.0, -1.0, 0.0])),
    "mask": dict(mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & (kv_idx % 5 != h)),
}
names = st.sampled_from(sorted(FEATURES))
contract = settings(max_examples=10, deadline=None, database=None)


def run(x, page_size=None, seed=0, attend=tilewise.attention, **options):
    if attend is tilewise.attention:
        options["split_size"] = SPLIT
    return attend(torch.cat(x.s.q), **x.cache(page_size, seed), return_lse=True, **options)


def in_double(x):
    """The same cache with q in fp64."""
    return x._replace(s=x.s._replace(q=[q.double() for q in x.s.q]))


def assert_right(x, found, **options):
    reference = tilewise.attention_reference
    oracle = run(in_double(x), attend=reference, **options)
    plain = run(x, attend=reference, upcast=False, **options)
    for mine, exact, rough, name in zip(found, oracle, plain, ("out", "lse")):
        assert_within(mine, exact, rough, name)


def assert_equal(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


def rows_of(x, found):
    counts = [len(q) for q in x.s.q]
    return list(zip(found[0].split(counts), found[1].split(counts, 1)))


# the formula


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_dtype", [BF16, torch.float16, torch.float32])
def test_against_fp64_of_what_was_stored(kind, dtype, q_dtype):
    x = quantised([3, 1, 2], [150, 70, 2], DTYPES[dtype], kind, q_dtype=q_dtype)
    for page_size in (None, 7, 16):
        assert_right(x, run(x, page_size, causal=True), causal=True)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("kind", ["sequence", "row"])
def test_with_everything_else(name, kind):
    x = quantised([3, 1], [150, 70], E4M3, kind, headdims=(16, 24))
    assert_right(x, run(x, 16, **FEATURES[name]), **FEATURES[name])


def test_the_reference_is_the_formula():
    x = in_double(quantised([2], [40], E4M3, "row"))
    found = run(x, attend=tilewise.attention_reference)
    k, v = (
        codes[0].double() * scales[0].double().unsqueeze(-1)
        for codes, scales in zip(x.s[1:], x[1:3])
    )
    expected = tilewise.attention_reference(x.s.q[0][None], k[None], v[None], return_lse=True)
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine, theirs[0], rtol=1e-14, atol=1e-14)


def batch_of(kind="row", dtype=E4M3, seqlen_k=90, **options):
    """A cache without pages and packed queries, all of it in use."""
    x = quantised([2, 2], [seqlen_k] * 2, dtype, kind, **options)
    at = x.cache()
    del at["cu_seqlens_q"]
    return dict(q=torch.stack(x.s.q), **at)


@pytest.mark.parametrize("kind", ["head", "row"])
def test_layouts_and_calls_without_lengths(kind):
    """8 bits say that k and v are a cache."""
    given = batch_of(kind)
    expected = tilewise.attention(**given, causal=True)
    del given["seqused_k"]
    assert torch.equal(tilewise.attention(**given, causal=True), expected)
    for name in ("q", "k", "v", "k_descale", "v_descale"):
        if given[name].dim() > 2:
            given[name] = given[name].transpose(1, 2)
    found = tilewise.attention(**given, causal=True, layout="bhsd")
    assert torch.equal(found.transpose(1, 2), expected)


def test_scales_of_unused_sequences_and_rows_are_not_read():
    for kind in ("sequence", "row"):
        given = batch_of(kind) | dict(seqused_k=torch.tensor([50, 0], dtype=INT32))
        expected = tilewise.attention(**given)
        for name in ("k_descale", "v_descale"):
            given[name] = given[name].clone()
            given[name][1] = torch.nan
            if kind == "row":
                given[name][0, 50:] = torch.nan
        assert torch.equal(tilewise.attention(**given), expected)
        assert (expected[1] == 0).all() and expected.isfinite().all()


# the contract


@contract
@given(
    **dict(seed=st.integers(0, 999), dtype=st.sampled_from(sorted(DTYPES)), name=names),
    **dict(kind=st.sampled_from(KINDS), page_size=st.sampled_from([None, 1, 7, 64])),
    shape=st.lists(
        st.tuples(st.integers(1, 8), st.integers(3 * SPLIT, 5 * SPLIT)), min_size=2, max_size=3
    ),
)
def test_neither_mates_nor_order_nor_pages(seed, dtype, name, kind, page_size, shape):
    x = quantised(*zip(*shape), DTYPES[dtype], kind, seed=seed)
    options = FEATURES[name]
    together = run(x, **options)
    assert_equal(together, run(x, page_size, seed, **options))
    order = torch.randperm(len(shape)).tolist()
    turned = x.only(*order)
    for i, found in zip(order, rows_of(turned, run(turned, page_size, seed, **options))):
        assert_equal(found, rows_of(x, together)[i])
    if kind != "tensor":
        for i, found in enumerate(rows_of(x, together)):
            assert_equal(found, run(x.only(i), page_size, seed + 1, **options))


@contract
@given(
    **dict(seed=st.integers(0, 999), dtype=st.sampled_from(sorted(DTYPES)), name=names),
    **dict(kind=st.sampled_from(KINDS), page_size=st.sampled_from([None, 7, 64])),
    **dict(total=st.integers(1, 20), chunk=st.integers(1, 8)),
)
def test_prefill_is_chunks_is_decode(seed, dtype, name, kind, page_size, total, chunk):
    stop = 4 * SPLIT + 3
    x = quantised([total], [stop], DTYPES[dtype], kind, seed=seed)
    out, lse = run(x, **FEATURES[name])
    begin = stop - total
    for a in range(begin, stop, chunk):
        b = min(a + chunk, stop)
        part = x.cut(0, a, b)
        found = run(part, page_size, seed, **FEATURES[name])
        assert_equal(found, (out[a - begin : b - begin], lse[:, a - begin : b - begin]))


# refusals


def attend(**others):
    return tilewise.attention(**(batch_of("head") | others))


@pytest.mark.parametrize("name", ["k", "v"])
def test_other_dtypes_are_refused_by_name(name):
    given = batch_of("head")
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.uint8):
        wrong = {x: given[x].view(torch.int8).view(dtype) for x in {"k", name}}
        with pytest.raises(NotImplementedError, match=f"k.dtype is {dtype}"):
            attend(**wrong)
    with pytest.raises(ArgumentError, match=r"k.dtype is .* and v.dtype is .*: a cache has one"):
        attend(**{name: given[name].view(INT8)})
    with pytest.raises(ArgumentError, match="a cache has one dtype"):
        attend(**{name: given[name].to(BF16)})
    assert attend(q=given["q"].to(E4M3)).dtype == BF16  # which is an FP8 call, of no cache


@pytest.mark.parametrize("name", ["k", "v"])
def test_wrong_scales_are_refused_by_name(name):
    of, given = f"{name}_descale", batch_of("head")
    for shape in ((1,), (3,), (2, 3), (1, 2), (2, 90, 1), (2, 2, 90), (2, 90, 2, 1)):
        with pytest.raises(ArgumentError, match=rf"{of} has shape .*\(2, 90, 2\), that of {name}"):
            attend(**{of: torch.ones(shape)})
    with pytest.raises(ArgumentError, match=f"{of}.dtype is torch.bfloat16: it must be float32"):
        attend(**{of: given[of].to(BF16)})
    with pytest.raises(ArgumentError, match=f"{of} is on meta"):
        attend(**{of: given[of].to("meta")})
    with pytest.raises(ArgumentError, match=f"{of} is a float"):
        attend(**{of: 0.5})
    plain = {x: given[x].to(BF16) for x in "kv"}
    for options in ({}, dict(split_size=16)):
        with pytest.raises(ArgumentError, match=f"{of} with {name} of torch.bfloat16"):
            others = dict.fromkeys(("k_descale", "v_descale")) | plain | options
            attend(**(others | {of: given[of]}))


def test_gradients_and_what_a_cache_does_not_take_are_refused():
    for name in ("q", "k_descale", "v_descale"):
        given = batch_of("head")
        with pytest.raises(NotImplementedError, match=f"{name}.requires_grad"):
            attend(**{name: given[name].requires_grad_()}, split_size=32)
    with pytest.raises(NotImplementedError, match="score_mod with a cache"):
        attend(score_mod=lambda score, b, h, q_idx, kv_idx: score)
    with pytest.raises(NotImplementedError, match="bias with a cache"):
        attend(bias=torch.zeros(1, 1, 2, 90))


# flash-attn's function


@pytest.mark.parametrize("kind", ["head", "sequence", "row"])
def test_flash_attn_with_kvcache(kind):
    given = batch_of(kind)
    q, k, v, used = (given.pop(x) for x in ("q", "k", "v", "seqused_k"))
    expected = tilewise.attention(q, k, v, causal=True, **given)
    call = tilewise.flash_attn_with_kvcache
    assert torch.equal(call(q, k, v, cache_seqlens=used, causal=True, **given), expected)
    pads = torch.tensor([3, 0], dtype=INT32)
    found = call(q, k, v, cache_seqlens=used, cache_leftpad=pads, causal=True, **given)
    assert torch.equal(found[1], expected[1])
    cut = {x: y[:1, 3:] if kind == "row" else y for x, y in given.items()}
    cut = {x: y[:1] if kind == "sequence" else y for x, y in cut.items()}
    alone = tilewise.attention(q[:1], k[:1, 3:], v[:1, 3:], causal=True, **cut)
    assert torch.equal(found[:1], alone)
    with pytest.raises(NotImplementedError, match="q_descale"):
        call(q, k, v, q_descale=torch.ones(()))


# operators


def arguments(kind, dtype):
    x = quantised([2, 2], [40, 9], dtype, kind)
    at = x.cache(8)
    tensors = torch.cat(x.s.q), at["k"], at["v"], at["page_table"], at["seqused_k"]
    rest = at["cu_seqlens_q"], None, None, None, 0.25, 0.0, -1, 0, 16, "", None
    return *tensors, *rest, at["k_descale"], at["v_descale"]


# torch compares inputs before and after with operators that float8 lacks
AOT = "test_aot_dispatch_dynamic"
UTILS = {
    "int8": ("test_schema", "test_autograd_registration", "test_faketensor", AOT),
    "e4m3": ("test_autograd_registration", "test_faketensor", AOT),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", sample(["none", "head", "row"], "row"))
def test_opcheck(kind, dtype):
    args, utils = arguments(kind, DTYPES[dtype]), UTILS[dtype]
    torch.library.opcheck(CALL, args, test_utils=utils)
    torch.library.opcheck(CALL_OUT, args, {"out": torch.zeros_like(args[0])}, test_utils=utils)


@pytest.mark.parametrize("kind", ["head", "row"])
def test_a_graph(kind):
    torch._dynamo.reset()
    given = batch_of(kind)
    compiled = torch.compile(tilewise.attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**given, causal=True), tilewise.attention(**given, causal=True))
    shapes = {x: y.to("meta") for x, y in given.items()}
    assert tilewise.attention(**shapes).shape == given["q"].shape


NEEDLE, KEYS = 77_777, 131_072


@pytest.mark.parametrize("backend", sample(["cpu", "portable"], "cpu"))
@pytest.mark.parametrize("is_paged", sample([False, True], True))
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_needle_among_131072_keys(dtype, is_paged, backend):
    """One key with a logit 20 above the others: its probability is off by less than 1e-2."""
    q = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)
    q[..., 0] = 1.0
    k, v = torch.zeros(2, 1, KEYS, 1, 64)
    k[0, NEEDLE, 0, 0], v[0, NEEDLE] = 20 * 64**0.5 / 2, 64.0
    k, v = k.to(dtype), v.to(dtype)
    p = 1 / (1 + (KEYS - 1) * torch.exp(-2 * k[0, NEEDLE, 0, 0].double() / 64**0.5))
    options = dict(k_descale=torch.tensor(2.0), v_descale=torch.tensor(1 / 64))
    if is_paged:
        k, v = (x.view(-1, 256, 1, 64).flip(0) for x in (k, v))
        options["page_table"] = torch.arange(len(k), dtype=torch.int32).flip(0)[None]
    options |= dict(seqused_k=torch.tensor([KEYS], dtype=torch.int32), backend=backend)
    with use_interpreter() if backend == "portable" else contextlib.nullcontext():
        out = tilewise.attention(q, k, v, **options)
    assert p > 0.99 and (out.double() - p).abs().max() < 1e-2
