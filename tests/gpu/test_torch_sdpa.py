"""`enable_sdpa` on a GPU: what torch would send to cuDNN, to its flash attention or to others of
its kernels is tilewise's, bit by bit; what tilewise refuses is torch's, and said.
"""

import warnings

import pytest
import torch
import torch.nn.functional as F
from integrations.torch_calls import CALLS, added, both, inputs, mask, noted, square
from torch.nn import attention
from torch.nn.attention import varlen
from torch.nn.attention.bias import causal_lower_right

import tilewise
from tilewise import PerformanceWarning, errors
from tilewise.ops import attention as ops

pytestmark = [
    pytest.mark.gpu,
    # The Hopper kernels may refuse an order of sums or a mask, torch's have no order: all say so
    pytest.mark.filterwarnings("ignore::tilewise.PerformanceWarning"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]
aten = torch.ops.aten
FORWARD, BACKWARD = "run_forward", "run_backward"
MADE = dict(device="cuda", dtype=torch.bfloat16)
LARGE = dict(headdim=64, seqlen=384, **MADE)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(errors, "_said", set())
    was, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)  # the same bits in every backward
    yield
    torch.use_deterministic_algorithms(was, warn_only=warns)
    tilewise.disable_sdpa()


@pytest.fixture
def calls(monkeypatch):
    """Which of our ways were taken."""
    found = []
    for name in (FORWARD, BACKWARD):
        monkeypatch.setattr(ops, name, noted(name, getattr(ops, name), found))
    return found


def assert_equal(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def assert_near(found, expected):
    """Of two kernels, each of which is held to fp64 elsewhere: nothing is in a wrong place."""
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() < 0.05 * b.abs().max()


@pytest.fixture
def ours(monkeypatch):
    """`expected(call, *leaves)`: the call where F has our function in place of torch's."""

    def run(call, *leaves):
        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", tilewise.scaled_dot_product_attention)
            return both(call, *leaves)

    return run


# F.scaled_dot_product_attention


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", CALLS)
def test_ours_bit_by_bit(name, dtype, calls, ours):
    tensors = square(**LARGE | dict(dtype=dtype))
    expected = ours(CALLS[name], *tensors)
    calls.clear()
    with tilewise.enable_sdpa():
        found = both(CALLS[name], *tensors)
    assert calls == [FORWARD, BACKWARD]
    assert_equal(found, expected)
    calls.clear()
    both(CALLS[name], *tensors)
    assert not calls


def test_near_torchs_own():
    tensors = square(**LARGE)
    expected = both(CALLS["causal"], *tensors)
    with tilewise.enable_sdpa():
        found = both(CALLS["causal"], *tensors)
    assert_near(found, expected)


def test_dropout(calls, ours):
    def drops(q, k, v):
        torch.cuda.manual_seed(3)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)

    tensors = square(**LARGE)
    expected = ours(drops, *tensors)
    with tilewise.enable_sdpa():
        assert_equal(both(drops, *tensors), expected)


def test_a_backward_after_the_end_is_still_ours(calls):
    q, k, v = square(**LARGE)
    with tilewise.enable_sdpa():
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    out.sum().backward()
    assert calls == [FORWARD, BACKWARD]


def test_lower_right(calls):
    """torch calls its flash operator for these, or a mask."""
    q, k, v = inputs((2, 4, 128, 64), (2, 4, 256, 64), (2, 4, 256, 64), **MADE)
    bias = causal_lower_right(128, 256)
    with tilewise.enable_sdpa():
        found = both(lambda *x: F.scaled_dot_product_attention(*x, bias), q, k, v)
    assert calls == [FORWARD, BACKWARD]
    how = dict(causal=True, layout="bhsd", deterministic=True)
    expected = both(lambda *x: tilewise.attention(*x, **how), q, k, v)
    assert_equal(found, expected)


def test_encoder_in_eval(calls):
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, 0.0, batch_first=True)
    module = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    module = module.to(**MADE).eval()
    with torch.no_grad(), tilewise.enable_sdpa():
        module(torch.randn(2, 64, 256, **MADE))
    assert calls == [FORWARD] * 2


def test_a_fast_path_that_is_turned_on_again_is_named():
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, 0.0, batch_first=True)
    layer = layer.to(**MADE).eval()
    with torch.no_grad(), tilewise.enable_sdpa():
        torch.backends.mha.set_fastpath_enabled(True)
        with pytest.warns(PerformanceWarning, match="the fast path of"):
            layer(torch.randn(2, 64, 256, **MADE))


@pytest.mark.parametrize("masked", [None, mask, added])
def test_compiled(masked, calls):
    def run(q, k, v, seen):
        return F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None)

    q, k, v = square(**LARGE)
    seen = masked and masked(q, k)
    torch.compiler.reset()
    with tilewise.enable_sdpa():
        expected = both(lambda *x: run(*x, seen), q, k, v)
        calls.clear()
        compiled = torch.compile(run, fullgraph=True)
        found = both(lambda *x: compiled(*x, seen), q, k, v)
    assert calls == [FORWARD, BACKWARD]
    assert_equal(found, expected)


@pytest.mark.parametrize("layout", ["heads first", "sequence first"])
def test_compiled_before(layout, calls):
    """The graph has torch's flash operator, whose strides it asserts; that operator is ours now."""

    def run(q, k, v):
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    tensors = square(**LARGE)
    if layout == "sequence first":
        tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
        tensors = [x.requires_grad_() for x in tensors]
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True)
    both(compiled, *tensors)
    assert not calls
    with tilewise.enable_sdpa():
        found = both(compiled, *tensors)
        assert calls == [FORWARD, BACKWARD]
        assert_near(found, both(run, *tensors))


def test_cuda_graphs(calls):
    q = square(**LARGE)[0].detach()
    with tilewise.enable_sdpa(), torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            expected = F.scaled_dot_product_attention(q, q, q)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = F.scaled_dot_product_attention(q, q, q)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)


# torch's own


def test_an_explicit_choice_of_kernel_is_kept(calls):
    q = square(**LARGE)[0].detach()
    backend = attention.SDPBackend
    # Of what other tests compiled a warning would tell; torch 2.11's reset does not forget it
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings(), tilewise.enable_sdpa():
        warnings.simplefilter("error", PerformanceWarning)
        for asked in (backend.MATH, backend.EFFICIENT_ATTENTION):
            with attention.sdpa_kernel(asked):
                F.scaled_dot_product_attention(q, q, q)
        assert not calls
        with attention.sdpa_kernel([backend.FLASH_ATTENTION, backend.MATH]):
            F.scaled_dot_product_attention(q, q, q)
    assert calls == [FORWARD]


REFUSED = {
    "float64": dict(dtype=torch.float64, device="cuda"),
    "512": dict(headdim=640, **MADE),  # headdim, at most
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_torchs_and_said(name):
    q = square(**REFUSED[name])[0].detach()
    expected = F.scaled_dot_product_attention(q, q, q)
    with tilewise.enable_sdpa():
        with pytest.warns(PerformanceWarning, match=f"(?s)torch's own kernel computes.*{name}"):
            found = F.scaled_dot_product_attention(q, q, q)
    assert torch.equal(found, expected)


def test_the_flash_operator_refuses_dropout_to_torchs():
    """And its backward goes the same way, whether or not tilewise is there by then."""
    tensors = square(**LARGE)

    def run(q, k, v):
        torch.cuda.manual_seed(3)
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.25)[0]

    expected = both(run, *tensors)
    with tilewise.enable_sdpa(), pytest.warns(PerformanceWarning, match="dropout_p"):
        found = both(run, *tensors)
    (*found, dq), (*expected, expected_dq) = ((*x[:1], *x[2:], x[1]) for x in (found, expected))
    assert_equal(found, expected)
    assert_near([dq], [expected_dq])  # torch adds to dQ in any order


def test_forward_and_backward_of_different_kernels():
    """Out and lse mean the same to torch's kernel and to ours."""
    tensors = square(**LARGE)

    def run(q, k, v):
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]

    dout = torch.randn_like(tensors[0])
    with tilewise.enable_sdpa():
        out = run(*tensors)
    ours_first = torch.autograd.grad(out, tensors, dout)
    out = run(*tensors)
    with tilewise.enable_sdpa():
        torchs_first = torch.autograd.grad(out, tensors, dout)
    expected = torch.autograd.grad(run(*tensors), tensors, dout)
    assert_near(ours_first, expected), assert_near(torchs_first, expected)


def test_torch_is_as_it_was():
    names = ["scaled_dot_product_attention", *tilewise.integrations.torch_flash.KERNELS]
    names += tilewise.integrations.torch_sdpa.FAST_PATHS
    names = [name for name in names if hasattr(aten, name)]
    before = [torch._C._dispatch_dump(f"aten::{name}") for name in names]
    with tilewise.enable_sdpa():
        assert [torch._C._dispatch_dump(f"aten::{name}") for name in names] != before
    assert [torch._C._dispatch_dump(f"aten::{name}") for name in names] == before


# varlen_attn


STARTS = [0, 100, 100, 300]


@pytest.fixture
def starts():
    return torch.tensor(STARTS, dtype=torch.int32, device="cuda")


def tokens(heads_k=4):
    shapes = (300, 4, 64), (300, heads_k, 64), (300, heads_k, 64)
    return inputs(*shapes, **MADE)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (64, 0)])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_packed_sequences(window, is_compiled, starts, calls):
    def run(q, k, v):
        return varlen.varlen_attn(q, k, v, starts, starts, 200, 200, window_size=window)

    def expected(q, k, v):
        sides = [None if side < 0 else side for side in window]
        lengths = dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
        return tilewise.attention(q, k, v, window=sides, deterministic=True, **lengths)

    torch.compiler.reset()
    wanted = both(expected, *tokens())
    calls.clear()
    with tilewise.enable_sdpa():
        found = both(torch.compile(run) if is_compiled else run, *tokens())
    assert calls == [FORWARD, BACKWARD]
    assert_equal(found, wanted)


@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="torch 2.12 and later")
def test_into_a_tensor_of_the_callers(starts, calls):
    q, k, v = (x.detach() for x in tokens())
    into = torch.empty_like(q)
    with tilewise.enable_sdpa():
        varlen.varlen_attn_out(into, q, k, v, starts, starts, 200, 200, window_size=(-1, 0))
        found = varlen.varlen_attn(q, k, v, starts, starts, 200, 200, window_size=(-1, 0))
    assert calls == [FORWARD] * 2 and torch.equal(into, found)


def test_jagged_tensors_take_the_flash_operator(calls):
    parts = [torch.randn(n, 4, 64, **MADE) for n in (100, 200)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    with tilewise.enable_sdpa(), attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        F.scaled_dot_product_attention(x, x, x)
    assert calls == [FORWARD]


# context_parallel


def test_context_parallel_is_a_ring_of_ours(calls, tmp_path):
    dist = pytest.importorskip("torch.distributed")
    experimental = pytest.importorskip("torch.distributed.tensor.experimental")
    if dist.is_initialized() or not hasattr(experimental, "context_parallel"):
        pytest.skip("no context_parallel of its own")
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("nccl", store, rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cuda", (1,))
        q, k, v = (x.detach() for x in square(**LARGE))
        with tilewise.enable_sdpa():
            expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            calls.clear()
            shards = dict(buffers=[q, k, v], buffer_seq_dims=[2] * 3)
            with experimental.context_parallel(mesh, **shards):
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                out = F.scaled_dot_product_attention(*leaves, is_causal=True)
                torch.autograd.grad(out, leaves, torch.ones_like(out))
    finally:
        dist.destroy_process_group()
    assert set(calls) == {FORWARD, BACKWARD}
    assert_near([out], [expected])
