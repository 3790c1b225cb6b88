"""Attention of shards on 2, 3 and 4 processes, held to one process and to the oracle."""

import contextlib
import functools
import inspect

import pytest
import torch
import torch.distributed as dist
from helpers.processes import run
from helpers.shards import FEATURES, NAMES, OF_HEADS, Case, compare, deals, merges
from helpers.tiers import sample

import tilewise
import tilewise.distributed as td
from tilewise.distributed.api.attention import NOT_SERVED
from tilewise.distributed.layouts.work import Band, keys_of
from tilewise.distributed.transport.arena import arena_of
from tilewise.errors import ArgumentError

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("gloo is not here", allow_module_level=True)

RANKS = 2, 3, 4


def groups(rank):
    """Groups of the first ranks, of which this one is a member."""
    made = {n: dist.new_group(range(n)) for n in RANKS}
    return {n: group for n, group in made.items() if rank < n}


def features(rank, in_turn):
    """Each on one number of ranks in turn, or on the other two."""
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    members = groups(rank)
    for i, (name, asked) in enumerate((FEATURES | OF_HEADS).items()):
        case = Case(4, 2, **asked)  # fewer key heads than ranks, for 3 and 4
        for n, group in members.items():
            if (n == RANKS[i % 3]) != in_turn:
                continue
            what, made = f"{name} on {n} ranks", deals(case.seqlen, group)
            for _ in range((i + n) % 4):
                next(made)
            compare(case, next(made), f"{what}, stream", method="stream")
            if n != 3:
                runs = dict(bitwise=False, method="stream")
                compare(case, next(made), f"{what}, stream by runs", (), **runs)
            if n != 4 and merges(case):
                ring = dict(bitwise=False, method="ring")
                compare(case, next(made), f"{what}, ring", (), **ring)
            if name not in OF_HEADS:
                of_heads = Case(2 * n, n, **asked)
                heads = dict(method="heads", deterministic=True)
                compare(of_heads, next(made), f"{what}, heads", NAMES, **heads)


@pytest.mark.parametrize("in_turn", sample([True, False], True))
def test_features(in_turn):
    run(features, 4, in_turn)


def long(rank):
    """More tiles than one, of queries and of keys, in each shard."""
    group = dist.group.WORLD
    for asked in (dict(causal=True), dict(causal=True, window=(700, 0), softcap=5.0), {}):
        case = Case(2, 2, seqlen=1100, **asked)
        zigzag, contiguous = td.zigzag(1100, group), td.contiguous(1100, group)
        compare(case, zigzag, "long, stream", method="stream")
        compare(case, zigzag, "long, stream by runs", (), method="stream", bitwise=False)
        compare(case, contiguous, "long, heads", NAMES, method="heads", deterministic=True)


def repeats(rank):
    """The same bits every time, whatever ranks wait for."""
    case = Case(4, 2, causal=True, sinks=True, dtype=torch.bfloat16)
    layout = td.striped(case.seqlen, block=8)
    first = None
    for _ in range(4):
        found = case.run(
            lambda *x, **y: td.attention(*x, layout=layout, method="stream", **y),
            share=layout.shard,
        )
        first = found if first is None else first
        assert all(map(torch.equal, found, first))


def moved(rank):
    """Bytes that are pulled: those of the keys that some query sees, and of no others."""
    group = dist.group.WORLD
    seqlen, window = 160, (12, 0)
    q, k, v = torch.randn(3, 1, seqlen, 2, 16).unbind(0)
    for layout in (td.zigzag(seqlen, group), td.contiguous(seqlen, group)):
        arena = arena_of(group, q.device)
        before = arena.pulled
        td.attention(*map(layout.shard, (q, k, v)), layout=layout, window=window, method="stream")
        seen = sum(b - a for a, b in keys_of(layout.spans, Band(*window)))
        assert arena.pulled - before == 2 * (seen - layout.tokens) * 2 * 16 * 4
        runs = len(layout.runs[rank])
        assert seen - layout.tokens <= runs * window[0]
        before = arena.pulled
        td.attention(*map(layout.shard, (q, k, v)), layout=layout, method="heads")
        rows = seqlen - layout.tokens  # of q, k and v half of the heads, of out the other half
        assert arena.pulled - before == (3 * rows + layout.tokens) * 1 * 16 * 4


def other_forms(rank):
    """Orders of dimensions, packed tensors, autocast, no gradient, one rank, a mesh."""
    case = Case(4, 2, causal=True)
    q, k, v = case.q, case.k, case.v
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    layout = td.zigzag(case.seqlen, mesh)
    expected = layout.shard(tilewise.attention(q, k, v, causal=True))
    mine = [layout.shard(x) for x in (q, k, v)]
    heads_first = [x.transpose(1, 2) for x in mine]
    for method in (None, "stream", "heads"):
        asked = dict(layout=layout, causal=True, method=method)
        out = td.attention(*heads_first, order="bhsd", **asked)
        assert torch.equal(out.transpose(1, 2), expected)
        with torch.autocast("cpu", torch.bfloat16):
            out = td.attention(*mine, **asked)
        halves = [x.bfloat16() for x in (q, k, v)]
        assert torch.equal(out, layout.shard(tilewise.attention(*halves, causal=True)))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    tilewise.attention(*leaves, causal=True).sum().backward()
    for method in ("stream", "heads"):  # a gradient that is one number, expanded
        shards = [x.clone().requires_grad_() for x in mine]
        td.attention(*shards, layout=layout, causal=True, method=method).sum().backward()
        for x, whole in zip(shards, leaves):
            torch.testing.assert_close(x.grad, layout.shard(whole.grad))
    packed = layout.packed([0, 50, case.seqlen])
    starts = torch.tensor([0, 50, case.seqlen], dtype=torch.int32)
    lengths = dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
    whole = tilewise.attention(q[1], k[1], v[1], causal=True, return_lse=True, **lengths)
    found = td.attention(*(x[1] for x in mine), layout=packed, causal=True, return_lse=True)
    assert torch.equal(found[0], layout.shard(whole[0], 0))
    assert torch.equal(found[1], layout.shard(whole[1], 1))
    found = td.attention(*mine, layout=packed, causal=True)  # documents in each row of a batch
    assert torch.equal(found[1], layout.shard(whole[0], 0))


def wrong(rank):
    """A rank with other inputs is an error on all of them, by name, and the group goes on."""
    layout = td.contiguous(20)
    q = torch.randn(1, 10, 2, 16)
    with pytest.raises(
        td.RankMismatch, match=r"rank 1 called .*q \(1, 20, 2, 8\).*rank 0 called .*16"
    ):
        x = q[..., : 16 - 8 * rank].contiguous()
        td.attention(x, x, x, layout=layout)
    with pytest.raises(
        td.RankMismatch, match=r"rank 1 called .*causal=True.*rank 0 .*causal=False"
    ):
        td.attention(q, q, q, layout=layout, causal=bool(rank))
    with pytest.raises(td.RankMismatch, match="called .*bfloat16.*called .*float32"):
        x = q.bfloat16() if rank else q
        td.attention(x, x, x, layout=layout)
    with pytest.raises(td.RankMismatch, match="with a gradient.*without a gradient"):
        x = q.clone().requires_grad_(rank == 1)
        td.attention(x, x, x, layout=layout)
    sinks = torch.full((2,), 1.0)
    for calls in range(3):  # a known call, too
        with (
            pytest.raises(td.RankMismatch, match=r"sinks=\(2,\) of values")
            if calls == 2
            else (contextlib.nullcontext())
        ):
            held = sinks + rank * (calls == 2)
            td.attention(q, q, q, layout=layout, sinks=held)
    x, expected = (q[:, :9], ArgumentError) if rank else (q, td.RankMismatch)
    with pytest.raises(expected, match="rank 1 has 10 tokens of 20"):
        td.attention(x, x, x, layout=layout)
    with pytest.raises(td.RankMismatch, match="zigzag over 2 ranks.*contiguous over 2 ranks"):
        other = td.zigzag(20) if rank else layout
        td.attention(q, q, q, layout=other)
    x = q.clone().requires_grad_()
    out, lse = td.attention(x, x, x, layout=layout, method="heads", return_lse=True)
    with pytest.raises(td.RankMismatch, match=r"with gradients \[True, True\].*\[True, False\]"):
        (out.sum() + lse.sum() if rank else out.sum()).backward()
    assert td.attention(q, q, q, layout=layout).shape == q.shape


def refused(rank):
    """What no method serves, and what one does not, before any rank waits."""
    layout = td.contiguous(20)
    q, k = torch.randn(1, 10, 2, 16), torch.randn(1, 10, 1, 16)
    learned = torch.randn(40, requires_grad=True)
    starts = torch.tensor([0, 20], dtype=torch.int32)
    wanted = {
        'method="stream" supports': (dict(k=k, v=k, method="heads"), NotImplementedError),
        'counts heads.*method="stream"': (
            dict(dropout_p=0.5, dropout_rng=torch.tensor([1, 2]), method="heads"),
            NotImplementedError,
        ),
        "the documents|layout.packed": (dict(cu_seqlens_q=starts), NotImplementedError),
        "page_table: no method": (dict(page_table=starts), NotImplementedError),
        "score_mod of positions": (dict(bias=q), NotImplementedError),
        "as mask_mod": (dict(block_mask=q), NotImplementedError),
        "captured": (dict(score_mod=lambda s, b, h, i, j: s + learned[i]), NotImplementedError),
        "all ranks must drop the same": (dict(dropout_p=0.5), ArgumentError),
        'differ from those of one process.*method="heads" or method="stream"': (
            dict(method="ring"),
            NotImplementedError,
        ),
        'no positions in the whole.*method="stream"': (
            dict(method="ring", bitwise=False, mask_mod=lambda b, h, i, j: i >= j),
            NotImplementedError,
        ),
        "method='rings'": (dict(method="rings"), ArgumentError),
        "causal='left'": (dict(causal="left"), ArgumentError),
        "the order of dimensions is order=": (dict(layout="bhsd"), ArgumentError),
        "without a process group": (dict(layout=td.contiguous(20, 2)), ArgumentError),
        "unexpected keyword": (dict(causl=True), TypeError),
    }
    for match, (asked, error) in wanted.items():
        given = dict(q=q, k=q, v=q, layout=layout) | asked
        with pytest.raises((error, td.RankMismatch), match=match):
            td.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def two(rank):
    long(rank)
    repeats(rank)
    moved(rank)
    other_forms(rank)
    wrong(rank)
    refused(rank)


def test_two_ranks():
    run(two, 2)


@pytest.mark.parametrize("name", ["causal", "documents, much", "dropout", "lse and sinks"])
def test_one_rank_calls_plainly(name):
    case = Case(4, 2, **(FEATURES | OF_HEADS)[name])
    expected = case.one_process()
    shuffled = td.from_positions([torch.randperm(case.seqlen)], 1)
    for layout in map(case.deal, (td.zigzag(case.seqlen, 1), shuffled)):
        attend = functools.partial(td.attention, layout=layout)
        found = case.run(attend, share=layout.shard)
        for what, x, whole in zip(NAMES, found, expected):
            dim = 2 if what == "lse" else 1
            assert torch.equal(x, whole if what == "dsinks" else layout.shard(whole, dim)), what


def test_a_perturbed_document_moves_no_other():
    case = Case(2, 1, docs=(0, 60, 173), causal=True)
    layout = case.deal(td.zigzag(173, 1))
    before = td.attention(case.q, case.k, case.v, layout=layout, causal=True)
    case.k[:, :60] += 1
    after = td.attention(case.q, case.k, case.v, layout=layout, causal=True)
    assert torch.equal(before[:, 60:], after[:, 60:]) and not torch.equal(before, after)


def test_every_argument_of_attention_is_served_or_refused_by_name():
    whole, shards = (
        set(inspect.signature(x).parameters) for x in (tilewise.attention, td.attention)
    )
    assert whole - shards == set(NOT_SERVED)  # `layout` is the layout of shards there
