"""torch.compile: one graph for every length, equal results and gradients."""

import functools
import hashlib
import inspect
import itertools

import pytest
import torch
from helpers.tiers import sample, sample_rows
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_inductor_cache, run_fw_bw_and_get_code

import tilewise
from tilewise import mods
from tilewise.frontend.compiled import nodes
from tilewise.ops import schema
from tilewise.testing import use_interpreter

EVERY = {
    "causal": True,
    "window": (6, None),
    "softcap": 5.0,
    "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]),
    "return_lse": True,
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(batch, seqlen_q, seqlen_k=None, layout="bshd"):
    shapes = [(seqlen_q, 4), (seqlen_k or seqlen_q, 2), (seqlen_k or seqlen_q, 2)]
    tensors = [torch.randn(batch, seqlen, heads, 16) for seqlen, heads in shapes]
    return [(x if layout == "bshd" else x.transpose(1, 2)).requires_grad_() for x in tensors]


def compiled(function, dynamic=None):
    """The function in one graph, and a counter of how often it was compiled."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic), counter


def check_equal(function, compiled, tensors):
    results = []
    for f in (function, compiled):
        out, lse = f(*tensors)
        loss = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
        results.append((out, lse, torch.autograd.grad(loss, tensors)))
    torch.testing.assert_close(*results)


WAYS = itertools.product([False, True], ["bshd", "bhsd"])


@pytest.mark.parametrize("dynamic, layout", sample_rows(WAYS, (False, "bshd"), (True, "bhsd")))
def test_one_graph_with_every_feature(dynamic, layout):
    def attend(q, k, v, sinks):
        return tilewise.attention(q, k, v, sinks=sinks, layout=layout, **EVERY)

    again, counter = compiled(attend, dynamic)
    sinks = torch.randn(4, requires_grad=True)
    check_equal(attend, again, [*qkv(3, 8, 12, layout), sinks])
    first = counter.frame_count
    check_equal(
        attend, again, [*qkv(3, 10 if dynamic else 8, 27 if dynamic else 12, layout), sinks]
    )
    assert counter.frame_count == first
    # An operator's floats are constants of the graph: a dynamic one may find that out by a restart.
    assert first == 1 or dynamic


@pytest.mark.parametrize("features", [{"causal": True}, {"causal": "top_left", "window": (3, 2)}])
def test_no_recompile_for_a_length(features):
    """One static graph, then one dynamic for every length: what torch does to an addition."""

    def attend(q, k, v):
        return tilewise.attention(q, k, v, return_lse=True, **features)

    again, counter = compiled(attend)
    for seqlen in (8, 16, 24, 33, 100):
        check_equal(attend, again, qkv(2, seqlen))
    assert counter.frame_count == 2


STARTS = torch.tensor([0, 7, 16], dtype=torch.int32)
GUARDED = {
    "attention": lambda q, k, v: tilewise.attention(q, k, v, causal=True),
    "packed": lambda *x: tilewise.attention(
        *(t[0] for t in x), cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, max_seqlen_q=9
    ),
    "flash_attn": lambda q, k, v: tilewise.flash_attn_func(q, k, v, causal=True),
    "flash_attn packed": lambda *x: tilewise.flash_attn_varlen_func(
        *(t[0] for t in x), STARTS, STARTS, 9, 9, causal=True
    ),
    "sdpa": lambda *x: tilewise.scaled_dot_product_attention(*x, enable_gqa=True),
}


@pytest.mark.parametrize(
    "name", sample(GUARDED, "attention", "packed", "flash_attn packed", "sdpa")
)
def test_a_graph_guards_what_the_caller_passed(name):
    """Not what checks read: each guard costs time at every run of the graph."""
    guarded = []
    again = torch.compile(
        GUARDED[name],
        fullgraph=True,
        options={"guard_filter_fn": lambda guards: guarded.extend(guards) or [True] * len(guards)},
    )
    tensors = qkv(1, 16, layout="bhsd" if name == "sdpa" else "bshd")
    with torch.no_grad():
        torch.testing.assert_close(again(*tensors), GUARDED[name](*tensors))
    assert len(guarded) < 80, len(guarded)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_generated_code_calls_kernels_and_not_the_dispatcher():
    """Which converts each of 26 arguments at every call, forward and backward."""
    q, k, v = qkv(1, 16)

    def attend():
        return torch.compile(lambda: tilewise.attention(q, k, v, causal=True))()

    with fresh_inductor_cache():
        _, codes = run_fw_bw_and_get_code(attend)
    for name, code in zip(["flash_attn_forward", "flash_attn_backward"], codes, strict=True):
        assert f"torch.ops.tilewise.direct.{name}(" in code
        assert ".default(" not in code


def test_a_graph_is_cached_on_disk():
    """By AOTAutograd, which refuses functions that it does not know."""
    counters["aot_autograd"].clear()
    with fresh_inductor_cache(), torch.no_grad():
        again = torch.compile(lambda q, k, v: tilewise.attention(q, k, v, causal=True))
        again(*qkv(1, 16))
    assert not counters["aot_autograd"]["autograd_cache_bypass"]
    assert counters["aot_autograd"]["autograd_cache_saved"]


ON_DISK = {
    "node": lambda q, k, v: tilewise.attention(q, k, v, causal=True),
    "operator": lambda q, k, v: tilewise.attention(q, k, v, split_size=8),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", ON_DISK)
def test_a_graph_on_disk_is_of_one_version_of_all_schemas(name, monkeypatch):
    hits = []
    with fresh_inductor_cache(), torch.no_grad():
        for text in ("one", "one", "another"):
            monkeypatch.setattr(schema, "schemas", hashlib.sha256(text.encode()))
            torch._dynamo.reset()
            counters["aot_autograd"].clear()
            torch.compile(ON_DISK[name])(*qkv(1, 16))
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 1, 0]


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_number_that_changes(name):
    def attend(q, k, v, number):
        return tilewise.attention(q, k, v, causal=True, return_lse=True, **{name: number})

    again, counter = compiled(attend)
    for number in (0.5, 0.75, 1.25, 2.0):
        tensors = qkv(2, 9)
        torch.testing.assert_close(again(*tensors, number), attend(*tensors, number))
    assert counter.frame_count <= 5  # and one restart


def test_no_recompile_for_lengths_that_part():
    def attend(q, k, v):
        return tilewise.attention(q, k, v, causal=True, return_lse=True)

    again, counter = compiled(attend, dynamic=True)
    for seqlens in [(8, 9), (33, 12), (5, 70), (31, 32)]:
        check_equal(attend, again, qkv(2, *seqlens))
    assert counter.frame_count == 1


def test_no_recompile_for_a_batch():
    def attend(q, k, v):
        return tilewise.attention(q, k, v, causal=True, return_lse=True)

    again, counter = compiled(attend, dynamic=True)
    for batch, seqlen in [(3, 8), (7, 8), (5, 21), (2, 40)]:  # 2 is a number of heads, too
        check_equal(attend, again, qkv(batch, seqlen))
    assert counter.frame_count == 1


def test_no_recompile_for_a_window():
    def attend(x, left):
        return tilewise.attention(x, x, x, window=(left, 0))

    again, counter = compiled(attend)
    x = torch.randn(1, 20, 2, 16)
    for left in (3, 5, 7, 11):
        torch.testing.assert_close(again(x, left), attend(x, left))
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    "function",
    [tilewise.flash_attn_func, tilewise.scaled_dot_product_attention],
    ids=lambda f: f.__name__,
)
def test_the_drop_in_functions_compile(function):
    again, counter = compiled(function)
    x = torch.randn(2, 4, 4, 16)
    torch.testing.assert_close(again(x, x, x), function(x, x, x))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("learns", sample([False, True], False))
def test_inductor(learns):
    """The whole compiler, which asserts the strides that the fake promised."""

    def block(x, weight):
        q, k, v = (x @ weight).unflatten(-1, (4, 3, 16)).unbind(-2)
        out = tilewise.attention(
            *(t.transpose(1, 2) for t in (q, k, v)), causal=True, layout="bhsd"
        )
        return out.transpose(1, 2).flatten(2).relu()

    tensors = [torch.randn(s, requires_grad=learns) for s in [(2, 8, 24), (24, 192)]]
    results = []
    for function in (block, torch.compile(block, fullgraph=True)):
        out = function(*tensors)
        grads = torch.autograd.grad(out.square().sum(), tensors) if learns else ()
        results.append((out, grads))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_portable_kernels_under_compile():
    def attend(q, k, v):
        return tilewise.attention(q, k, v, causal=True, return_lse=True, backend="portable")

    with use_interpreter():
        again, counter = compiled(attend)
        check_equal(attend, again, qkv(1, 8))
    assert counter.frame_count == 1


def test_autocast_under_compile():
    tensors = [*qkv(2, 8), torch.randn(4, requires_grad=True)]

    def attend(q, k, v, sinks):
        return tilewise.attention(q, k, v, sinks=sinks, return_lse=True)

    again, _ = compiled(attend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = again(*tensors), attend(*tensors)
    assert [x.dtype for x in got] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    grads = torch.autograd.grad(got[0].float().sum() + got[1].sum(), tensors)
    assert {x.dtype for x in grads} == {torch.float32}


def test_compile_refuses_as_eager_does():
    again, _ = compiled(lambda q, k: tilewise.attention(q, k, k))
    with pytest.raises(Exception, match="q has headdim 16 and k has headdim 8"):
        again(torch.randn(1, 8, 2, 16), torch.randn(1, 8, 2, 8))


@pytest.mark.parametrize("name", ["attention", "flash_attn", "sdpa"])
def test_a_call_that_dynamo_leaves_raises_what_eager_does(name):
    """And does not come back to Dynamo without end."""
    again = torch.compile(lambda q: GUARDED[name](q, q[..., :8], q), backend="eager")
    with pytest.raises(tilewise.ArgumentError, match="has headdim 16 and k.* has headdim 8"):
        again(torch.randn(1, 8, 2, 16))


@pytest.mark.parametrize("mask", [None, mods.causal()], ids=["", "traced"])
def test_vmap_under_compile(mask):
    tensors = [torch.randn(3, 2, 8, heads, 16) for heads in (4, 2, 2)]
    attend = functools.partial(tilewise.attention, mask_mod=mask)
    again, counter = compiled(torch.vmap(attend))
    want = torch.stack([attend(*x) for x in zip(*tensors)])
    torch.testing.assert_close(again(*tensors), want)
    assert counter.frame_count == 1


SHAPES = (9, 9), (2, 1, 1, 9), (1, 2, 9, 1), (2, 2, 9, 9), (1, 1)
MASKS = list(itertools.product(SHAPES, (torch.bool, torch.float32)))


@pytest.mark.parametrize("shape, dtype", sample_rows(MASKS, MASKS[0], MASKS[7], MASKS[8]))
def test_an_attn_mask_is_part_of_the_graph(shape, dtype):
    q = torch.randn(2, 2, 9, 8, requires_grad=True)
    mask = torch.rand(shape) if dtype.is_floating_point else torch.rand(shape) > 0.3

    def attend(q, mask):
        return tilewise.scaled_dot_product_attention(q, q, q, mask)

    want = attend(q, mask)
    got = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, mask)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(out.square().sum(), q) for out in (got, want)]
    torch.testing.assert_close(*grads)


def test_a_mask_that_is_handed_in_may_be_another_one_each_time():
    counter = CompileCounterWithBackend("eager")

    @torch.compile(backend=counter, fullgraph=True)
    def attend(q, mask):
        return tilewise.attention(q, q, q, mask_mod=mask)

    q = torch.randn(1, 16, 2, 8)
    for split in (3, 8, 15):
        mask = tilewise.mods.document((torch.arange(16) >= split).int())
        torch.testing.assert_close(attend(q, mask), tilewise.attention(q, q, q, mask_mod=mask))
    assert counter.frame_count == 1


NO_OPTION = {"q", "k", "v", "query", "key", "value", "unknown", "q_descale", "k_descale"}
NO_OPTION |= {"v_descale", "out_dtype", "dropout_p", "dropout_rng", "attention_chunk"}
NO_OPTION |= {"score_mod", "mask_mod", "block_mask", "page_table", "block_table", "split_size"}
NO_OPTION |= {"out", "backward", "attn_mask"}


@pytest.mark.parametrize(
    "function",
    [
        *(tilewise.attention, tilewise.flash_attn_func, tilewise.flash_attn_varlen_func),
        tilewise.scaled_dot_product_attention,
    ],
    ids=lambda f: f.__name__,
)
def test_a_node_has_every_option_of_a_call(function, monkeypatch):
    """By its name, but those that no node has."""
    names = [x for x in inspect.signature(function).parameters if x not in NO_OPTION]
    options = {x: torch.ones(2) if "seq" in x and "max" not in x else x for x in names}
    passed = {}
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    monkeypatch.setitem(nodes, function.__name__, passed.update)
    function(*torch.ones(3, 1, 2, 1, 8), **options)
    assert all(passed[name] is options[name] for name in names)
