"""Layouts, held to brute force: each position dealt once, equal tokens, work, order of runs."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise.distributed as td
from tilewise.distributed.layouts.work import Band, Span, pairs
from tilewise.errors import ArgumentError

LENGTHS = st.integers(0, 90)
RANKS = st.integers(1, 7)


@st.composite
def layouts(draw):
    """A layout of any kind, with documents or without."""
    seqlen, ranks = draw(LENGTHS), draw(RANKS)
    cuts = sorted(draw(st.lists(st.integers(0, seqlen), max_size=4)))
    starts = [0, *cuts, seqlen]
    kind = draw(st.sampled_from("contiguous zigzag striped documents from_positions".split()))
    if kind == "documents":
        return td.documents(starts, ranks, chunk=draw(st.integers(1, 20)))
    if kind == "from_positions":
        order = draw(st.permutations(range(seqlen)))
        ends = sorted(
            draw(st.lists(st.integers(0, seqlen), min_size=ranks - 1, max_size=ranks - 1))
        )
        parts = [order[a:b] for a, b in zip([0, *ends], [*ends, seqlen])]
        layout = td.from_positions([torch.tensor(x, dtype=torch.long) for x in parts], ranks)
    elif kind == "striped":
        layout = td.striped(seqlen, ranks, block=draw(st.integers(1, 20)))
    else:
        layout = getattr(td, kind)(seqlen, ranks)
    return layout.packed(starts) if draw(st.booleans()) else layout


def of_rank(layout, rank):
    return [i for start, stop in layout.runs[rank] for i in range(start, stop)]


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_each_position_is_dealt_once_and_comes_back(layout):
    dealt = [of_rank(layout, rank) for rank in range(layout.ranks)]
    assert sorted(itertools.chain(*dealt)) == list(range(layout.seqlen))
    assert layout.counts == tuple(map(len, dealt))
    x = torch.arange(2 * layout.seqlen * 3).view(2, layout.seqlen, 3)
    parts = [layout.at(rank).shard(x) for rank in range(layout.ranks)]
    for part, positions in zip(parts, dealt):
        assert torch.equal(part, x[:, positions])
    assert torch.equal(layout.unshard(parts), x)


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_spans_and_positions_are_those_of_documents(layout):
    starts = layout.cu_seqlens or (0, layout.seqlen)
    first = [max(x for x in starts if x <= i) for i in range(layout.seqlen)]
    last = [min(x for x in starts if x > i) for i in range(layout.seqlen)]
    for rank in range(layout.ranks):
        mine, at = layout.at(rank), of_rank(layout, rank)
        assert mine.positions.tolist() == [i - first[i] for i in at]
        rows = [(span.row, span.start) for span in mine.spans]
        assert rows == sorted(rows, key=lambda x: x[0])
        found = [i for span in mine.spans for i in range(span.start, span.stop)]
        assert found == at
        for span in mine.spans:
            assert at[span.row] == span.start
            assert {(first[i], last[i]) for i in range(span.start, span.stop)} == {span[3:]}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_pairs_are_those_counted_one_by_one(data):
    first = data.draw(st.integers(0, 10))
    last = first + data.draw(st.integers(1, 20))
    start = data.draw(st.integers(first, last))
    stop = data.draw(st.integers(start, last))
    left, right = data.draw(st.integers(-1, 25)), data.draw(st.integers(-1, 25))
    seen = sum(
        (left < 0 or i - left <= j) and (right < 0 or j <= i + right)
        for i in range(start, stop)
        for j in range(first, last)
    )
    assert pairs(Span(0, start, stop, first, last), Band(left, right)) == seen


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_zigzag_leaves_equal_work_and_contiguous_does_not(ranks):
    layout = td.zigzag(16 * ranks, ranks)
    assert len(set(layout.work(causal=True))) == 1 and len(set(layout.counts)) == 1
    work = td.contiguous(16 * ranks, ranks).work(causal=True)
    assert work == tuple(sorted(work)) and (ranks == 1 or work[0] < work[-1])


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_documents_of_zipf_lengths_are_balanced(seed, ranks):
    draw = random.Random(seed)
    starts = [0]
    while starts[-1] < 65536:
        starts.append(min(65536, starts[-1] + int(100 * draw.paretovariate(0.7))))
    layout = td.documents(starts, ranks)
    work = layout.work(causal=True)
    assert max(layout.counts) - min(layout.counts) <= 1
    assert max(work) <= 1.01 * sum(work) / ranks
    assert layout == td.documents(starts, ranks)  # all ranks make the same


def test_labels_are_moved_before_they_are_dealt():
    labels = torch.arange(24).view(2, 12)
    layout = td.zigzag(12, 3)
    moved = layout.shifted(labels)
    assert moved[0].tolist() == [*range(1, 12), -100]
    assert layout.at(0).shard(moved)[0].tolist() == [1, 2, 11, -100]
    assert layout.shifted(labels, ignored=-1)[1, -1] == -1
    packed = layout.packed(torch.tensor([0, 0, 5, 12])).shifted(labels)
    assert packed[1].tolist() == [13, 14, 15, 16, -100, 18, 19, 20, 21, 22, 23, -100]
    assert td.contiguous(0, 2).shifted(labels[:, :0]).shape == (2, 0)


def test_equal_layouts_are_one_key():
    first, second = td.zigzag(64, 4), td.zigzag(64, 4)
    assert first == second and hash(first) == hash(second)
    assert len({first, second, first.at(1), td.contiguous(64, 4), first.packed([0, 9, 64])}) == 4


def test_shards_are_differentiable():
    x = torch.randn(1, 10, 2, requires_grad=True)
    layout = td.zigzag(10, 2)
    layout.shard(x).sum().backward()
    assert x.grad[0, :, 0].nonzero().flatten().tolist() == of_rank(layout, 0)


def test_explain_names_the_slowest_rank():
    lines = td.contiguous(64, 2).packed([0, 40, 64]).explain(window=(8, 0)).splitlines()
    assert lines[0] == "contiguous, 64 tokens over 2 ranks, 2 documents, causal, window (8, 0)"
    assert len(lines) == 4 and lines[2].split()[:3] == ["0", "32", "1"]


WRONG = {
    "seqlen=-1": lambda: td.contiguous(-1, 2),
    "at least 1 rank": lambda: td.contiguous(8, 0),
    "not initialized": lambda: td.zigzag(8),
    "block=0": lambda: td.striped(8, 2, block=0),
    "never decrease": lambda: td.documents([0, 5, 3], 2),
    "number of tokens, 8": lambda: td.zigzag(8, 2).packed([0, 7]),
    "each of 0 to 3 must": lambda: td.from_positions(torch.tensor([[0, 1], [1, 3]]), 2),
    "positions of 2 ranks": lambda: td.from_positions(torch.tensor([[0, 1], [2, 3]]), 3),
    "rank=2": lambda: td.zigzag(8, 2).at(2),
    "deals 8": lambda: td.zigzag(8, 2).shard(torch.zeros(1, 4)),
    "exchange parts": lambda: td.zigzag(8, 2).unshard(torch.zeros(1, 4)),
    "the number of parts is 1": lambda: td.zigzag(8, 2).unshard([torch.zeros(1, 4)]),
    "the part of rank 1": lambda: td.zigzag(8, 2).unshard([torch.zeros(4), torch.zeros(3)]),
    "before they are dealt": lambda: td.zigzag(8, 2).shifted(torch.zeros(1, 4)),
}


@pytest.mark.parametrize("match", WRONG)
def test_wrong_arguments_are_named(match):
    with pytest.raises(ArgumentError, match=match):
        WRONG[match]()
