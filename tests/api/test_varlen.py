"""Packed sequences: the public functions, under a compiler, and what is refused."""

import contextlib
import functools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from tilewise import dispatch, errors
from tilewise.frontend.values import knows_values
from tilewise.ops import calls
from tilewise.testing import use_interpreter

INT32 = torch.int32
LENGTHS = (5, 0, 33, 20)
STARTS = torch.tensor([0, 5, 5, 38, 58], dtype=INT32)


def packed(heads=(4, 2, 2), headdim=16, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(58, n, headdim, dtype=dtype) for n in heads]


def one_by_one(q, k, v, **options):
    rows = [slice(a, b) for a, b in zip(STARTS[:-1].tolist(), STARTS[1:].tolist())]
    parts = [
        tilewise.attention(q[None, r], k[None, r], v[None, r], return_lse=True, **options)
        for r in rows
    ]
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


@pytest.mark.parametrize("causal", [False, True])
def test_a_loop_over_sequences_gives_the_same(causal):
    q, k, v = packed()
    found = tilewise.attention(
        q, k, v, cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, causal=causal, return_lse=True
    )
    for mine, theirs in zip(found, one_by_one(q, k, v, causal=causal)):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def test_flash_attns_functions():
    q, k, v = packed((2, 2, 2))
    out, lse = one_by_one(q, k, v, causal=True)
    bounds = STARTS, STARTS, 33, 33
    found = tilewise.flash_attn_varlen_func(q, k, v, *bounds, 0.0, None, True, return_lse=True)
    torch.testing.assert_close(found[0], out)
    torch.testing.assert_close(found[1], lse)
    qkv = torch.stack([q, k, v], 1)
    found = tilewise.flash_attn_varlen_qkvpacked_func(qkv, STARTS, 33, 0.0, None, True)
    torch.testing.assert_close(found, out)
    found = tilewise.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], *bounds, causal=True)
    torch.testing.assert_close(found, out)
    kept = tilewise.flash_attn_varlen_func(q, k, v, STARTS, STARTS, return_attn_probs=True)
    assert len(kept) == 3 and kept[2] is None


def test_one_graph_serves_any_lengths():
    torch._dynamo.reset()
    q, k, v = packed()

    def attend(q, k, v, starts):
        return tilewise.flash_attn_varlen_func(q, k, v, starts, starts, causal=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    other = torch.tensor([0, 1, 40, 40, 58], dtype=INT32)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for starts in (STARTS, other):
            torch.testing.assert_close(compiled(q, k, v, starts), attend(q, k, v, starts))


def test_gradients_through_the_operator():
    q, k, v = (x[None].double().requires_grad_() for x in packed((2, 1, 1), 8))
    tensors = (*(None,) * 4, STARTS, STARTS, None, None, [])
    rest = (*tensors, 0.3, 0.0, -1, 0, 0.0, "bottom_right", False, "", "", "", [0, 0], False, False)
    rest = (*rest, None)
    torch.library.opcheck(torch.ops.tilewise.flash_attn_forward.default, (q, k, v, *rest))


def test_vmap_runs_packed_calls_one_by_one(monkeypatch):
    monkeypatch.setattr(errors, "_said", set())  # a process warns once
    q, k, v = (torch.stack([x, 2 * x]) for x in packed())

    def attend(q, k, v):
        return tilewise.flash_attn_varlen_func(q, k, v, STARTS, STARTS)

    with pytest.warns(tilewise.PerformanceWarning, match="one by one"):
        found = torch.vmap(attend)(q, k, v)
    torch.testing.assert_close(found[1], attend(q[1], k[1], v[1]))


def test_rows_that_are_not_used():
    q, k, v = packed()
    used = torch.tensor([2, 0, 30, 20], dtype=INT32)
    q[2:5], k[2:5], v[35:38] = torch.nan, torch.nan, torch.nan
    lengths = dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, seqused_q=used, seqused_k=used)
    found = []
    for backend in ("cpu", "portable"):
        with use_interpreter():
            out, lse = tilewise.attention(q, k, v, **lengths, return_lse=True, backend=backend)
        assert out[2:5].eq(0).all() and lse[:, 2:5].eq(-torch.inf).all()
        assert out.isfinite().all()
        found.append(out)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def int32(*values):
    return torch.tensor(values, dtype=INT32)


WRONG = {
    "not from 0": (dict(cu_seqlens_q=int32(1, 5, 5, 38, 58)), "cu_seqlens_q=[1, 5", "begin with 0"),
    "decreasing": (dict(cu_seqlens_k=int32(0, 5, 4, 38, 58)), "cu_seqlens_k=[0, 5, 4", "decrease"),
    "past the end": (dict(cu_seqlens_q=int32(0, 5, 5, 38, 59)), "cu_seqlens_q", "58"),
    "dtype": (dict(cu_seqlens_q=STARTS.long()), "cu_seqlens_q.dtype is torch.int64", "int32"),
    "batches": (dict(cu_seqlens_k=int32(0, 58)), "cu_seqlens_k has shape (2,)", "(batch + 1,)"),
    "one side": (dict(cu_seqlens_k=None), "cu_seqlens_k is missing", "both"),
    "too many used": (dict(seqused_k=int32(6, 0, 33, 20)), "seqused_k=[6", "[5, 0, 33, 20]"),
    "used elsewhere": (dict(seqused_q=int32(1, 2)), "seqused_q has shape (2,)", "(4,)"),
    "layout": (dict(layout="bhsd"), "layout='bhsd'", "leave it out"),
    "bound": (dict(max_seqlen_q="33"), "max_seqlen_q='33'", "int"),
    "rank": (dict(q=torch.randn(1, 58, 4, 16)), "q has shape (1, 58, 4, 16)", "(total, nheads"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    changes, *claims = WRONG[name]
    given = dict(zip("qkv", packed()), cu_seqlens_q=STARTS, cu_seqlens_k=STARTS) | changes
    q, k, v = (given.pop(name) for name in "qkv")
    with pytest.raises(tilewise.ArgumentError) as error:
        tilewise.attention(q, k, v, **given)
    for claim in claims:
        assert claim in str(error.value)


Q, K = torch.randn(2, 58, 4, 16).unbind(0)
KEYS = int32(0, 7, 20, 20, 58)  # the longest has 38, and that of STARTS 33
E4M3 = torch.float8_e4m3fn
PAGES = dict(block_table=torch.arange(8, dtype=INT32).view(4, 2), causal=True)
CACHE = dict(page_table=PAGES["block_table"], seqused_k=int32(33, 20, 40, 40))
BOUNDED = {
    "attention": lambda **x: tilewise.attention(
        Q, K, K, cu_seqlens_q=STARTS, cu_seqlens_k=KEYS, **x
    ),
    "FP8": lambda **x: tilewise.attention(
        *(y.to(E4M3) for y in (Q, K, K)), cu_seqlens_q=STARTS, cu_seqlens_k=KEYS, **x
    ),
    "a cache": lambda **x: tilewise.attention(
        Q, *torch.zeros(2, 8, 20, 4, 16), cu_seqlens_q=STARTS, **CACHE, **x
    ),
    "flash_attn_with_kvcache": lambda **x: tilewise.flash_attn_with_kvcache(
        Q,
        *torch.zeros(2, 8, 20, 4, 16),
        cu_seqlens_q=STARTS,
        page_table=CACHE["page_table"],
        cache_seqlens=CACHE["seqused_k"],
        **x,
    ),
    "varlen": lambda **x: tilewise.flash_attn_varlen_func(Q, K, K, STARTS, KEYS, **x),
    "varlen FP8": lambda **x: tilewise.flash_attn_varlen_func(
        *(y.to(E4M3) for y in (Q, K, K)), STARTS, KEYS, **x
    ),
    "varlen pages": lambda **x: tilewise.flash_attn_varlen_func(
        Q, *torch.zeros(2, 8, 20, 4, 16), STARTS, KEYS, **PAGES, **x
    ),
    "kvpacked": lambda **x: tilewise.flash_attn_varlen_kvpacked_func(
        Q, torch.stack((K, K), 1), STARTS, KEYS, **x
    ),
}
HAS_K = {"varlen", "varlen FP8", "varlen pages", "kvpacked"}  # of the others it has no effect


OF_QUERIES = [(name, "max_seqlen_q", 33) for name in BOUNDED]
OF_KEYS = [(name, "max_seqlen_k", 38) for name in BOUNDED if name != "flash_attn_with_kvcache"]


@pytest.mark.parametrize(("name", "bound", "longest"), OF_QUERIES + OF_KEYS)
def test_a_bound_below_the_longest_sequence_is_refused(name, bound, longest):
    """Also where the call is known, whose key has only the kind of a bound."""
    call = BOUNDED[name]
    expected = call()
    for value in (longest, longest + 1, 4096, longest):
        torch.testing.assert_close(call(**{bound: value}), expected, equal_nan=True)
    for value in (longest - 1, 0):
        if bound == "max_seqlen_k" and name not in HAS_K:
            torch.testing.assert_close(call(**{bound: value}), expected, equal_nan=True)
            continue
        said = rf"{bound}={value}: a packed sequence has {longest} rows, so pass at least that"
        with pytest.raises(tilewise.ArgumentError, match=said):
            call(**{bound: value})


def test_a_bound_of_stacked_tensors_is_checked():
    qkv = torch.randn(58, 3, 4, 16)
    tilewise.flash_attn_varlen_qkvpacked_func(qkv, STARTS, 33)
    with pytest.raises(tilewise.ArgumentError, match="=32: a packed sequence has 33 rows"):
        tilewise.flash_attn_varlen_qkvpacked_func(qkv, STARTS, 32)


def test_a_bound_is_of_rows_in_use():
    used = dict(seqused_q=int32(5, 0, 9, 20), seqused_k=int32(5, 0, 12, 20))
    call = functools.partial(tilewise.flash_attn_varlen_func, Q, K, K, STARTS, STARTS, **used)
    call(max_seqlen_q=20, max_seqlen_k=20)
    for bound in ("max_seqlen_q", "max_seqlen_k"):
        with pytest.raises(tilewise.ArgumentError, match=f"{bound}=19: a packed sequence has 20"):
            call(**{bound: 19})


@pytest.mark.parametrize(
    "starts", [STARTS.long(), STARTS[None], STARTS[0], [0, 58], STARTS.float()]
)
def test_bounds_leave_starts_of_another_kind_to_their_checks(starts):
    for bound in (1, 58):
        with pytest.raises(tilewise.ArgumentError, match="cu_seqlens_q"):
            tilewise.attention(
                Q, K, K, cu_seqlens_q=starts, cu_seqlens_k=STARTS, max_seqlen_q=bound
            )


@pytest.mark.parametrize("function", ["attention", "flash_attn_varlen_func"])
def test_a_bound_breaks_no_graph(function):
    lengths = dict(cu_seqlens_q=STARTS, cu_seqlens_k=STARTS)
    call = functools.partial(getattr(tilewise, function), Q, K, K, **lengths)
    compiled = torch.compile(lambda n: call(max_seqlen_q=n), fullgraph=True, backend="aot_eager")
    for bound in (33, 64, 90):
        torch.testing.assert_close(compiled(bound), call(max_seqlen_q=bound))


def test_seqused_q_asks_for_packed_sequences():
    q = torch.randn(2, 5, 2, 16)
    with pytest.raises(tilewise.ArgumentError, match="pass cu_seqlens_q"):
        tilewise.attention(q, q, q, seqused_q=int32(3, 5))


def test_values_on_a_gpu_are_looked_at_only_if_asked(monkeypatch):
    elsewhere = torch.zeros(3, dtype=INT32, device="meta")
    monkeypatch.delenv("TILEWISE_CHECK", raising=False)
    assert knows_values(STARTS) and not knows_values(elsewhere)
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    assert knows_values(elsewhere)


@pytest.mark.parametrize(("bound", "is_long"), [(None, False), (2048, False), (2049, True)])
@pytest.mark.parametrize("is_dispatched", [False, True])
def test_the_bound_reaches_the_kernels(bound, is_long, is_dispatched, monkeypatch):
    seen = []
    choose = dispatch.choose

    def noted(problem, *args):
        seen.append(problem.is_long)
        return choose(problem, *args)

    monkeypatch.setattr(dispatch, "choose", noted)
    calls._entry.cache_clear()
    x = torch.randn(3000, 1, 8, requires_grad=True)
    starts = torch.tensor([0, 1500, 3000], dtype=INT32)
    asked = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=bound, window=(3, 3))
    with FlopCounterMode(display=False) if is_dispatched else contextlib.nullcontext():
        tilewise.attention(x, x, x, **asked).sum().backward()
    assert seen == [is_long, is_long]


OVER_PAGES = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window_size=(9, 0)),
    "cap and slopes": dict(softcap=5.0, alibi_slopes=torch.rand(4)),
    "sinks": dict(learnable_sink=torch.randn(4), softmax_scale=0.3),
    "chunks": dict(causal=True, attention_chunk=7),
    "bounds": dict(max_seqlen_q=33, max_seqlen_k=40),
}


@pytest.mark.parametrize("name", OVER_PAGES)
def test_used_keys_say_how_long_sequences_in_pages_are(name):
    """`cu_seqlens_k` is None, left out, or says the same; one graph is as good."""
    pages = torch.randn(2, 8, 20, 2, 16)
    used, table = int32(33, 20, 40, 27), PAGES["block_table"]
    options = dict(OVER_PAGES[name], block_table=table, return_lse=True)
    call = functools.partial(tilewise.flash_attn_varlen_func, Q, *pages, STARTS, **options)
    starts_k = torch.cat((int32(0), used.cumsum(0))).to(INT32)
    expected = call(starts_k)
    keys = pages[:, table.long()].flatten(2, 3)
    keys = torch.cat([keys[:, b, :n] for b, n in enumerate(used.tolist())], 1)
    options = {x: y for x, y in options.items() if x != "block_table"}
    packed = tilewise.flash_attn_varlen_func(Q, *keys, STARTS, starts_k, **options)
    torch.testing.assert_close(expected, packed, atol=1e-5, rtol=1e-5)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    lengths = dict(seqused_k=used), dict(cu_seqlens_k=None, seqused_k=used)
    for function, given in [*((call, x) for x in lengths), (compiled, lengths[0])]:
        for found, mine in zip(function(**given), expected):
            assert torch.equal(found, mine)


def test_keys_in_pages_are_those_of_plain_torch():
    q, pages = torch.randn(9, 4, 16), torch.randn(2, 8, 20, 2, 16)
    starts, used, table = int32(0, 4, 9), int32(33, 7), int32(5, 0, 3, 6).view(2, 2)
    out = tilewise.flash_attn_varlen_func(q, *pages, starts, block_table=table, seqused_k=used)
    for b, n in enumerate(used.tolist()):
        rows = slice(starts[b], starts[b + 1])
        k, v = pages[:, table[b].long()].flatten(1, 2)[:, :n].repeat_interleave(2, 2)
        p = torch.einsum("qhd,khd->hqk", q[rows] * 0.25, k).softmax(-1)
        torch.testing.assert_close(out[rows], torch.einsum("hqk,khd->qhd", p, v))


@pytest.mark.parametrize("lengths", [{}, dict(seqused_k=STARTS.diff()), PAGES], ids=str)
def test_keys_of_unknown_lengths_are_refused(lengths):
    """Pages without lengths, too, where unused entries may be anything."""
    with pytest.raises(tilewise.ArgumentError, match="block_table and seqused_k"):
        tilewise.flash_attn_varlen_func(Q, K, K, STARTS, **lengths)
