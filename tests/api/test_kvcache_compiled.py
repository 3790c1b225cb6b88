"""New keys in compiled calls of `flash_attn_with_kvcache`: one operator, which refuses what an
eager call does, before it writes. Rows of a cache that are written twice, and autocast.
"""

import pytest
import torch
from helpers.appends import bits, drawn, results
from helpers.tiers import sample
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._mode_utils import no_dispatch
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from tilewise import ArgumentError, cache

HEADS, HEADS_K, HEADDIM = 4, 2, 24
CACHES = "k_cache", "v_cache"


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def step(has_out, dtype=torch.float32):
    """Two sequences in 4 pages of 4 keys."""
    given = dict(q=torch.randn(2, 1, HEADS, HEADDIM, dtype=dtype))
    k, v = torch.randn(2, 2, 1, HEADS_K, HEADDIM, dtype=dtype).unbind(0)
    k_cache, v_cache = (torch.randn(4, 4, HEADS_K, HEADDIM, dtype=dtype) for _ in range(2))
    given |= dict(k=k, v=v, k_cache=k_cache, v_cache=v_cache, cache_seqlens=ints(3, 0))
    given |= dict(block_table=ints(2, 1, 3, 0).view(2, 2))
    return given | (dict(out=torch.zeros_like(given["q"])) if has_out else {})


def attend(given):
    return tilewise.flash_attn_with_kvcache(**given, causal=True)


def compiled(backend):
    """The call, compiled for a `step`; with `out` a compiler sees operators, else one node."""
    torch._dynamo.reset()
    again = torch.compile(attend, fullgraph=True, backend=backend)
    with torch.no_grad():
        again(step(backend == "eager"))
    return again


def assert_refuses(call, given, match):
    before = {name: bits(x) for name, x in given.items()}
    with pytest.raises(ArgumentError, match=match), torch.no_grad():
        call(given)
    for name, x in given.items():
        assert torch.equal(bits(x), before[name]), name


def aliased(name, given):
    """The call with an argument in the memory of `k_cache`."""
    x, flat = given[name], given["k_cache"].view(-1)
    if x.dtype != flat.dtype:
        flat = flat.view(x.dtype)
    return given | {name: flat[: x.numel()].view(x.shape).copy_(x)}


WRONG = {
    "a page that is none": (dict(block_table=ints(2, 1, 4, 0).view(2, 2)), r"block_table\[1, 0\]"),
    "a full cache": (dict(cache_seqlens=ints(8, 0)), r"cache_seqlens \+ new keys=\[9, 1\]"),
    "a row twice": (
        dict(block_table=ints(2, 1, 2, 0).view(2, 2), cache_seqlens=ints(0, 0)),
        "twice",
    ),
}


@pytest.fixture(scope="module", params=["eager", "inductor"])
def call(request):
    return compiled(request.param), request.param == "eager"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize("name", ["q", "k", "v", "cache_seqlens", "block_table", "out"])
def test_a_compiled_call_refuses_shared_memory(call, name):
    again, has_out = call
    if name == "out" and not has_out:
        return
    assert_refuses(again, aliased(name, step(has_out)), f"_cache is written and .* {name}:|^out is")


@pytest.mark.parametrize("name", WRONG)
def test_a_compiled_call_refuses_values(call, name):
    again, has_out = call
    arguments, match = WRONG[name]
    assert_refuses(again, step(has_out) | arguments, match)
    assert_refuses(attend, step(has_out) | arguments, match)


def test_a_compiled_call_is_the_eager_one(call):
    again, has_out = call
    given = step(has_out)
    copy = {name: x.clone() for name, x in given.items()}
    with torch.no_grad():
        assert torch.equal(again(copy), attend(given))
    for name, x in given.items():
        assert torch.equal(copy[name], x), name


@pytest.mark.parametrize("seed", sample(range(12), 1, 6))  # in chunks, over caches of 8 bits
def test_random_calls_are_one_graph(seed):
    torch._dynamo.reset()
    again = torch.compile(tilewise.flash_attn_with_kvcache, fullgraph=True, backend="eager")
    given = drawn(seed)
    with torch.no_grad():
        found = results(again, given)
    assert all(map(torch.equal, found, results(tilewise.flash_attn_with_kvcache, given)))


def test_a_trace_has_one_operator():
    given = step(has_out=False)
    graph = make_fx(lambda x: attend(given | x))({name: given[name] for name in CACHES})
    names = [str(x.target) for x in graph.graph.nodes if "tilewise" in str(x.target)]
    assert names == ["tilewise.flash_attn_with_kvcache.default"]


def test_a_tensor_subclass_is_no_trace():
    """Its call is the operator's, too, which does not come back to itself."""
    given = step(has_out=False)
    copy = {name: x.clone() for name, x in given.items()}

    class Subclass(torch.Tensor):
        pass

    copy["q"] = copy["q"].as_subclass(Subclass)
    assert torch.equal(attend(copy), attend(given))
    assert torch.equal(copy["k_cache"], given["k_cache"])


def test_an_operator_in_a_mode_that_is_kept_from_it_ends():
    given = step(has_out=False)
    copy = {name: x.clone() for name, x in given.items()}
    with FlopCounterMode(display=False), no_dispatch():
        assert torch.equal(attend(copy), attend(given))
    assert torch.equal(copy["k_cache"], given["k_cache"])


# Rows of a cache that two new keys would take


def test_a_row_of_a_cache_is_written_once():
    k_cache, v_cache, k, v = (torch.randn(2, n, HEADS_K, HEADDIM) for n in (8, 8, 2, 2))
    given = dict(q=torch.randn(2, 2, HEADS, HEADDIM), k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    given |= dict(cache_seqlens=ints(3, 4), cache_batch_idx=ints(1, 1))
    assert_refuses(attend, given, r"cache_batch_idx .*row 4 of sequence 1 twice")
    attend(given | dict(cache_seqlens=ints(1, 3)))  # apart
    nothing = dict(k=None, v=None)
    assert_refuses(attend, given | dict(cache_batch_idx=ints(1, 2)), "cache_batch_idx")
    attend(given | nothing)  # a prefix that is shared
    with tilewise.testing.use_interpreter():
        assert_refuses(attend, given, "twice")


def test_an_append_writes_a_row_once():
    k_cache, v_cache = torch.zeros(2, 4, 4, HEADS_K, HEADDIM).unbind(0)
    new = torch.ones(2, 3, HEADS_K, HEADDIM)
    table = ints(0, 1, 2, 1).view(2, 2)
    with pytest.raises(ArgumentError, match=r"page_table .*row 0 of page 1 twice"):
        cache.append(k_cache, v_cache, new, new, seqused_k=ints(6, 5), page_table=table)
    longer, itself = torch.ones(1, 5, HEADS_K, HEADDIM), ints(3, 3).view(1, 2)
    with pytest.raises(ArgumentError, match=r"row 0 of page 3 twice"):
        cache.append(k_cache, v_cache, longer, longer, seqused_k=ints(5), page_table=itself)
    assert not k_cache.any()
    table = ints(0, 1, 0, 2).view(2, 2)  # which share a page that is full
    cache.append(k_cache, v_cache, new, new, seqused_k=ints(7, 7), page_table=table)
    starts = ints(0, 3, 3)  # of which the second has none
    packed = dict(seqused_k=ints(7, 7), page_table=ints(0, 1, 0, 1).view(2, 2), cu_seqlens_q=starts)
    cache.append(k_cache, v_cache, new[0], new[0], **packed)


# Autocast


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("names", [("q",), ("q", "k", "v")])
def test_autocast_casts_to_the_dtype_of_a_cache(names, is_compiled):
    function = compiled("aot_eager") if is_compiled else attend
    given = step(False, torch.bfloat16)
    exact = {name: given[name].float() + 2**-12 for name in names}
    expected = {name: x.clone() for name, x in given.items()}
    expected |= {name: x.bfloat16() for name, x in exact.items()}
    out = attend(expected)
    given |= exact
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(function(given), out)
    for name in CACHES:
        assert torch.equal(given[name], expected[name]), name


def test_autocast_casts_the_query_of_attention_with_a_cache():
    given = step(False, torch.bfloat16)
    q, k, v = given["q"], *[given[name] for name in CACHES]
    used = dict(page_table=given["block_table"], seqused_k=ints(3, 4), causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(
            tilewise.attention(q.float(), k, v, **used), tilewise.attention(q, k, v, **used)
        )


def test_autocast_casts_no_cache():
    """Nor what meets one of another dtype: fp32 stays, and two dtypes are refused."""
    given = step(False)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(given).dtype == torch.float32
        assert_refuses(attend, given | dict(q=given["q"].bfloat16()), "k_cache.dtype .* q.dtype")
