"""What only a GPU shows: memory, streams, threads, graphs, sizes, and the same bits every time."""

import gc
import math
import threading
import warnings

import pytest
import torch

from tilewise import (
    PerformanceWarning,
    attention,
    attention_reference,
    flash_attn_with_kvcache,
)
from tilewise.testing.cases import Case, Features, Sizes
from tilewise.testing.run import run_case
from tilewise.testing.tolerance import assert_within
from tilewise.tuning.select import override
from tilewise.tuning.tables import Config

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def tensors(batch=2, seqlen=1000, nheads=8, nheads_k=2, headdim=128, seed=0, dtype=BF16):
    """q, k, v that want gradients, and dout."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(heads):
        shape = (batch, seqlen, heads, headdim)
        return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)

    q, k, v = (normal(heads).requires_grad_() for heads in (nheads, nheads_k, nheads_k))
    return q, k, v, normal(nheads)


def forward(q, k, v, causal=True, **how):
    return attention(q, k, v, causal=causal, backend="portable", **how)


def both(q, k, v, dout, **how):
    """out and the gradients of q, k and v."""
    out = forward(q, k, v, **how)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def assert_equal(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def pipelined(descriptors):
    """Configurations with and without tensor descriptors, whose memory the host provides."""
    config = Config(64, 64, 4, 2, descriptors)
    return override(fwd=config, bwd_dkdv=config, bwd_dq=config)


def peak_of(function):
    """The most bytes asked for at once beyond those at the start, and the result.

    `max_memory_allocated` counts the allocator's blocks, which may be larger.
    """
    function()  # compile
    gc.collect()  # what other tests left must not be freed in between
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    result = function()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before, result


def nbytes(*tensors):
    return sum(x.nbytes for x in tensors)


@pytest.mark.parametrize("nheads_k", [8, 2, 1])
@pytest.mark.parametrize("headdim", [64, 128, 72])
def test_peak_memory(headdim, nheads_k):
    """Forward: out and lse. Backward: dq, dk, dv and delta, which is as large as lse."""
    q, k, v, dout = tensors(seqlen=2048, nheads_k=nheads_k, headdim=headdim)
    with pipelined(descriptors=False):
        extra, (out, lse) = peak_of(lambda: forward(q, k, v, return_lse=True))
        assert extra == nbytes(out, lse)

        def backward():
            return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        extra, grads = peak_of(backward)
        assert extra == nbytes(*grads, lse)


def test_peak_memory_with_descriptors():
    """A program that makes descriptors takes 128 bytes of scratch for each: at most 4."""
    q, k, v, dout = tensors(seqlen=2048)
    programs = 2048 // 64 * q.shape[0] * q.shape[2]
    with pipelined(descriptors=True):
        extra, (out, lse) = peak_of(lambda: forward(q, k, v, return_lse=True))
        assert extra <= nbytes(out, lse) + 512 * programs

        def backward():
            return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        extra, grads = peak_of(backward)
        assert extra <= nbytes(*grads, lse) + 512 * programs


def check_slice(q, k, v, dout, found):
    """Holds (out, and gradients by name) of independent slices to the budget."""
    expected = {}
    for upcast in (True, False):
        leaves = [x.double() if upcast else x.clone() for x in (q, k, v)]
        leaves = [x.detach().requires_grad_() for x in leaves]
        out, _ = attention_reference(*leaves, return_lse=True, upcast=upcast)
        grads = torch.autograd.grad(out, leaves, dout.to(out.dtype))
        expected[upcast] = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads)))
    for name, result in found.items():
        assert_within(result, expected[True][name], expected[False][name], name)


HUGE = (2, 65664, 128, 128)  # 2_151_677_952 elements: 4.3 GB in bf16


@pytest.fixture
def room():
    """Frees what earlier tests left; skips where the tensors do not fit."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GB of GPU memory")
    yield
    torch.cuda.empty_cache()


def test_queries_beyond_2_to_the_31_elements(room):
    batch, _, _, headdim = HUGE
    q = torch.randn(HUGE, device="cuda", dtype=BF16).requires_grad_()
    k, v = torch.randn(2, batch, 128, 1, headdim, device="cuda", dtype=BF16).unbind(0)
    dout = torch.randn(HUGE, device="cuda", dtype=BF16)
    out = forward(q, k, v, causal=False)
    (dq,) = torch.autograd.grad(out, q, dout)
    for b, rows, heads in ((0, slice(0, 64), slice(0, 2)), (1, slice(-64, None), slice(-2, None))):
        at = (slice(b, b + 1), rows, heads)
        keys = slice(b, b + 1)
        found = {"out": out[at].detach(), "dq": dq[at]}
        check_slice(q[at], k[keys], v[keys], dout[at], found)
    assert out[:, ::997].isfinite().all() and dq[:, ::997].isfinite().all()


def test_keys_beyond_2_to_the_31_elements(room):
    batch, _, nheads, headdim = HUGE
    q, dout = torch.randn(2, batch, 16, nheads, headdim, device="cuda", dtype=BF16).unbind(0)
    k, v = (torch.randn(HUGE, device="cuda", dtype=BF16).requires_grad_() for _ in range(2))
    out = forward(q, k, v, causal=False)
    dk, dv = torch.autograd.grad(out, (k, v), dout)
    for b, head in ((0, 0), (1, nheads - 1)):
        at = (slice(b, b + 1), slice(None), slice(head, head + 1))
        found = {"out": out[at].detach(), "dk": dk[at], "dv": dv[at]}
        check_slice(q[at], k[at].detach(), v[at].detach(), dout[at], found)


def test_cuda_graph():
    """Captured forward and backward give, replayed on other inputs, what eager code gives."""
    static = tensors()
    other = tensors(seed=1)
    expected = both(*other)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            both(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both(*static)
    with torch.no_grad():
        for mine, theirs in zip(static, other):
            mine.copy_(theirs)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(captured, expected)


# torch's own first capture, of a graph that it leaves empty
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("backend", [None, "portable"])
def test_graphs_of_torch_compile(backend):
    """They are warmed up with memory of their own pool, of which a call may keep nothing."""

    def step(q, k, v):
        return attention(q, k, v, causal=True, backend=backend, deterministic=True)

    def run(call, q, k, v, dout):
        torch.compiler.cudagraph_mark_step_begin()
        out = call(q, k, v)
        return [x.clone() for x in (out, *torch.autograd.grad(out, (q, k, v), dout))]

    compiled = torch.compile(step, mode="reduce-overhead")
    for seed in range(5):
        given = tensors(seed=seed)
        assert_equal(run(compiled, *given), run(step, *given))


@pytest.mark.parametrize("descriptors", [False, True], ids=["pointers", "descriptors"])
def test_another_stream(descriptors):
    """Kernels wait for what their own stream does before them."""
    with pipelined(descriptors):
        late = tensors(seed=1)
        expected = both(*late)
        inputs = tensors()
        both(*inputs)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # a tenth of a second
            with torch.no_grad():
                for mine, theirs in zip(inputs, late):
                    mine.copy_(theirs)
            found = both(*inputs)
        stream.synchronize()
    assert_equal(found, expected)


@pytest.mark.parametrize("descriptors", [False, True], ids=["pointers", "descriptors"])
def test_other_threads(descriptors):
    """Backward of a forward from this thread, and both from a thread of their own."""
    with pipelined(descriptors):
        inputs = tensors()
        q, k, v, dout = inputs
        expected = both(*inputs)
        out = forward(q, k, v)
        found = {}

        def backward():
            found["backward"] = torch.autograd.grad(out, (q, k, v), dout)

        def whole():
            found["both"] = both(*inputs)

        threads = [threading.Thread(target=target) for target in (backward, whole)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
    assert_equal(found["backward"], expected[1:])
    assert_equal(found["both"], expected)


@pytest.mark.filterwarnings("ignore")  # the compiler's own, such as of TF32
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile(dynamic):
    """One graph, and the bits of eager code: the kernels are the same."""
    torch._dynamo.reset()

    def attend(q, k, v):
        return forward(q, k, v, window=(100, 0), softcap=20.0)

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    for seqlen in (500, 777):
        q, k, v, dout = tensors(seqlen=seqlen, headdim=64)
        results = []
        for function in (compiled, attend):
            out = function(q, k, v)
            results.append((out.detach(), *torch.autograd.grad(out, (q, k, v), dout)))
        assert_equal(*results)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("has_new", [False, True], ids=["decode", "append"])
def test_a_compiled_cache(has_new, mode):
    """Bits of eager code, in a graph of torch's, too, which a call that writes may not be in."""
    torch._dynamo.reset()
    used = torch.tensor([700, 33], device="cuda", dtype=torch.int32)

    def step(q, k, v, k_new, v_new):
        new = dict(k=k_new, v=v_new) if has_new else {}
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True, **new)

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    for seed in range(4):
        q, k, v, _ = tensors(seqlen=800, seed=seed)
        inputs = [x.detach() for x in (q[:, :1], k, v, k[:, :1], v[:, 1:2])]
        results = []
        with torch.no_grad():
            for function in (compiled, step):
                copies = [x.clone() for x in inputs]
                torch.compiler.cudagraph_mark_step_begin()
                results.append([x.clone() for x in (function(*copies), *copies)])
        assert_equal(*results)


@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_200_runs_give_the_same_bits(headdim, causal):
    inputs = tensors(headdim=headdim)
    first = both(*inputs, causal=causal)
    differ = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(200):
        for mine, theirs in zip(both(*inputs, causal=causal), first):
            differ |= (mine != theirs).any()
    assert not differ.item()
    assert all(x.isfinite().all() for x in first)


@pytest.mark.parametrize("causal", [False, True])
def test_nan_reaches_only_rows_that_see_it(causal):
    """The GPU's maximum drops NaN where the interpreter's passes it on."""
    q, k, v, _ = (x.detach() for x in tensors(batch=1, seqlen=300, nheads=2, headdim=64))
    clean = forward(q, k, v, causal=causal)
    k[0, 150, 0] = math.nan
    q[0, 77, 1] = math.nan
    out, lse = forward(q, k, v, causal=causal, return_lse=True)
    row = torch.arange(300, device="cuda")
    sees_key = row >= 150 if causal else row >= 0
    is_nan = out[0].isnan().any(-1)
    assert torch.equal(is_nan[:, 0], sees_key)
    assert torch.equal(is_nan[:, 1], row == 77)
    assert torch.equal(lse[0].isnan().T, is_nan)
    assert torch.equal(out[0][~is_nan], clean[0][~is_nan])


@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_calls_after_the_first(backend):
    """The kept launch serves other addresses, other streams and training, and nothing else: an
    address off 16 bytes, or another scale, is another call.
    """
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")

    def check(q, k, v, **how):
        found = attention(q, k, v, causal=True, backend=how.pop("backend", backend), **how)
        exact = attention_reference(q.double(), k.double(), v.double(), causal=True, **how)
        torch.testing.assert_close(found.double(), exact, atol=0.02, rtol=0.02)

    held = [tensors(1, 130, 4, 2, 64, seed=seed)[:3] for seed in range(70)]
    with torch.no_grad():
        for q, k, v in held:  # more addresses than are kept
            check(q, k, v)
        check(*held[0], scale=0.5)
        check(*held[0])
        with torch.cuda.stream(torch.cuda.Stream()):
            check(*held[1])
            torch.cuda.current_stream().synchronize()
        q, k, v = held[2]
        off = torch.empty(q.numel() + 1, device="cuda", dtype=BF16)[1:].view(q.shape)
        off.copy_(q)
        assert off.data_ptr() % 16 and off.stride() == q.stride()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PerformanceWarning)  # Hopper's kernel refuses it
            check(off, k, v, backend=None if backend == "hopper" else backend)
    check(*held[3])  # with autograd


def test_another_gpu():
    """Tensors decide where kernels run, whichever device is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = tensors()
    there = [x.detach().to("cuda:1").requires_grad_(x.requires_grad) for x in inputs]
    with torch.cuda.device(0):
        found = both(*there)
    assert_equal([x.to("cuda:0") for x in found], both(*inputs))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("headdim", [257, 320, 512])
@pytest.mark.parametrize("causal", [False, True])
def test_wide_heads(headdim, causal, dtype):
    """Over many tiles; the matrix has their features."""
    case = Case("wide", Sizes(1, 700, 900, 4, 2, headdim), Features(causal=causal))
    records = run_case(case, "portable", "cuda", dtype)
    failures = [str(record) for record in records if not record.verdict.ok]
    assert not failures, "\n".join(failures)
