"""Tensors that torch has yet to negate, such as `z.conj().imag`: their values count, whatever takes
them, and whatever computes.
"""

import contextlib

import pytest
import torch
from helpers.tiers import sample

import tilewise
import tilewise.distributed as td
from tilewise import cache
from tilewise.testing import use_emulator, use_interpreter

INT32 = torch.int32
BACKENDS = {"cpu": contextlib.nullcontext, "portable": use_interpreter, "hopper": use_emulator}
SAMPLES = {
    "cpu": ("q", "v", "bias", "dout", "dlse"),
    "portable": ("k", "bias", "dout"),
    "hopper": ("dout",),
}


def negated(x):
    """A tensor of the same values, whose memory has their opposites."""
    lazy = torch._neg_view(-x.detach())
    assert lazy.is_neg() and torch.equal(lazy, x.detach())
    return lazy.requires_grad_(x.requires_grad)


def drawn(backend):
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float16 if backend == "hopper" else torch.float32

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    q, k, v = normal(1, 20, 2, 64), normal(1, 30, 2, 64), normal(1, 30, 2, 64)
    tensors = dict(q=q, k=k, v=v, bias=normal(1, 1, 20, 30), sinks=normal(2))
    tensors |= dict(
        alibi_slopes=torch.tensor([0.5, 0.1]), seqused_k=torch.tensor([25], dtype=INT32)
    )
    return tensors | dict(dout=normal(1, 20, 2, 64).detach(), dlse=torch.randn(1, 2, 20))


def trained(backend, tensors):
    """out, lse and gradients."""
    arguments = {name: x for name, x in tensors.items() if name not in ("dout", "dlse")}
    with BACKENDS[backend]():
        outputs = tilewise.attention(**arguments, return_lse=True, backend=backend)
        leaves = [x for x in arguments.values() if x.requires_grad]
        return *outputs, *torch.autograd.grad(outputs, leaves, [tensors["dout"], tensors["dlse"]])


NAMES = [*drawn("cpu")]
CASES = [(backend, name) for backend in BACKENDS for name in NAMES]
FEW = [(backend, name) for backend, name in CASES if name in SAMPLES[backend]]


@pytest.mark.parametrize(
    ("backend", "name"),
    [pytest.param(*x, marks=[] if x in FEW else pytest.mark.slow) for x in CASES],
)
def test_dense(backend, name):
    """Twice, as the second call is known."""
    tensors = drawn(backend)
    expected = trained(backend, tensors)
    lazy = tensors | {name: negated(tensors[name])}
    for _ in "12":
        for mine, theirs in zip(trained(backend, lazy), expected, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"])
def test_packed(name):
    q, k, v = torch.randn(3, 40, 2, 16).unbind(0)
    starts = torch.tensor([0, 13, 40], dtype=INT32)
    arguments = dict(q=q, k=k, v=v, cu_seqlens_q=starts, cu_seqlens_k=starts)
    expected = tilewise.attention(**arguments)
    assert torch.equal(tilewise.attention(**arguments | {name: negated(arguments[name])}), expected)


def cached(backend):
    dtype = torch.float16 if backend == "hopper" else torch.float32
    k, v = torch.randn(2, 4, 8, 1, 64).to(dtype).unbind(0)
    table, used = torch.tensor([[2, 0], [1, 3]], dtype=INT32), torch.tensor([9, 14], dtype=INT32)
    arguments = dict(
        q=torch.randn(2, 1, 2, 64).to(dtype), k=k, v=v, page_table=table, seqused_k=used
    )
    return arguments | dict(alibi_slopes=torch.tensor([0.5, 0.1]), sinks=torch.randn(2).to(dtype))


@pytest.mark.parametrize("name", cached("cpu"))
@pytest.mark.parametrize("backend", sample(BACKENDS, "cpu", "portable"))
def test_a_cache(backend, name):
    arguments = cached(backend)
    with BACKENDS[backend]():
        expected = tilewise.attention(**arguments, backend=backend)
        lazy = arguments | {name: negated(arguments[name])}
        assert torch.equal(tilewise.attention(**lazy, backend=backend), expected)


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("name", ["k", "v", "seqused_k", "cos", "sin"])
def test_an_append(name, interpreted):
    tables = dict(cos=torch.randn(16, 4), sin=torch.randn(16, 4))
    k, v = torch.randn(2, 2, 3, 1, 8).unbind(0)
    arguments = dict(k=k, v=v, seqused_k=torch.tensor([5, 9], dtype=INT32), **tables)

    def appended(cos, sin, **asked):
        caches = torch.zeros(2, 2, 16, 1, 8)
        cache.append(*caches.unbind(0), **asked, rotary=cache.Rotary(cos, sin, False))
        return caches

    with use_interpreter() if interpreted else contextlib.nullcontext():
        assert torch.equal(
            appended(**arguments | {name: negated(arguments[name])}), appended(**arguments)
        )


@pytest.mark.parametrize("name", ["q", "k", "v", "scale"])
def test_quantizing(name):
    arguments = dict(zip("qkv", torch.randn(3, 1, 40, 2, 32).unbind(0)), scale=torch.rand(2))

    def quantized(q, k, v, scale):
        x = tilewise.quantize(q, k, v, scales=(None, scale, None))
        return tilewise.attention(x)

    assert torch.equal(
        quantized(**arguments | {name: negated(arguments[name])}), quantized(**arguments)
    )


@pytest.mark.filterwarnings("ignore::tilewise.errors.PerformanceWarning")  # of other tests' graphs
@pytest.mark.parametrize("mask", ["conj", "mH"])
@pytest.mark.parametrize("enabled", [False, True])
def test_imaginary_parts_as_masks(mask, enabled):
    z = torch.randn(1, 2, 16, 16, dtype=torch.complex64)
    bias = z.conj().imag if mask == "conj" else z.mH.imag
    q, k, v = torch.randn(3, 1, 2, 16, 32).unbind(0)
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(q, k, v, bias)
    assert bias.is_neg()
    for context in (use_interpreter, contextlib.nullcontext):
        with context(), tilewise.enable_sdpa() if enabled else contextlib.nullcontext():
            function = attend if enabled else tilewise.scaled_dot_product_attention
            torch.testing.assert_close(function(q, k, v, bias), expected)


def functions():
    q = torch.randn(1, 24, 2, 16)
    flash = tilewise.flash_attn_func
    yield "flash", lambda x: flash(x, q, q)
    yield "packed", lambda x: tilewise.flash_attn_qkvpacked_func(torch.stack([x, q, q], 2))
    yield "flex", lambda x: tilewise.flex_attention(*(y.transpose(1, 2) for y in (x, q, q)))
    yield "distributed", lambda x: td.attention(x, q, q, layout=td.zigzag(24, 1))
    yield "operator", lambda x: operator(x, q)
    yield "split", lambda x: tilewise.attention(x, q, q, split_size=16)


def operator(q, k):
    from tilewise.ops.schema import options_of
    from tilewise.problem import NO_EXTRAS, Call, Scalars, describe

    scalars = Scalars(0.25)
    call = Call(describe(q, k, k, NO_EXTRAS, scalars, "bottom_right", False), scalars)
    operator = torch.ops.tilewise.flash_attn_forward
    return operator(q, k, k, *NO_EXTRAS.arguments, **options_of(call))[0]


@pytest.mark.parametrize("name", [name for name, _ in functions()])
@pytest.mark.parametrize("is_trained", [False, True])
def test_functions(name, is_trained):
    """And their gradients."""
    function, x = dict(functions())[name], torch.randn(1, 24, 2, 16, requires_grad=is_trained)
    outputs, expected = function(lazy := negated(x)), function(x)
    assert torch.equal(outputs, expected)
    if is_trained:
        dout = torch.randn_like(expected)
        mine, theirs = (torch.autograd.grad(*y, dout)[0] for y in ((outputs, lazy), (expected, x)))
        assert torch.equal(mine, theirs)


def test_a_known_call_is_not_that_of_other_values():
    q = torch.randn(1, 24, 2, 16)
    expected = tilewise.attention(q, q, q)
    for _ in "12":
        assert torch.equal(tilewise.attention(negated(q), q, q), expected)
        assert torch.equal(tilewise.attention(q, q, q), expected)
