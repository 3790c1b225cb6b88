"""Times under sustained load: long spans, after load, in random order, beside flushed ones."""

import math
import random
from collections import Counter
from itertools import pairwise

import pytest
from helpers.made_rows import pair, row

from benchmarks.bench import append, load, run_suite
from benchmarks.bench.providers import Provider, standard_attention
from benchmarks.bench.row import validate
from benchmarks.bench.shapes import square
from benchmarks.bench.sustained import (
    LEAST_ROUNDS,
    SPAN_MS,
    Plan,
    cpu_span,
    measure,
    plan_for,
    time_sustained,
)
from benchmarks.bench.timer import CallFailed, ratio
from benchmarks.bench.ways import FLUSHED, SUSTAINED, rate_of, ratio_of, way_of

SMALL = square("fwd", 32, 16, True, dtype="float32", tokens=64, hidden=32)


class Card:
    """Spans on a clock of its own: calls are slower by half once the card has been under load."""

    def __init__(self, **costs):
        self.costs, self.spans, self.now = costs, [], 0.0
        self.calls = {name: (lambda name=name: name) for name in costs}

    def span(self, call, count):
        name = call()
        each = self.costs[name] * (1.0 if self.now < 1000 else 1.5)
        self.now += each * count
        self.spans.append((name, count, each * count, self.now))
        return each

    def plan(self, seed=0, **changes):
        return Plan(self.span, random.Random(seed), **changes)

    def rounds(self, count):
        """The spans of the rounds, without what came before."""
        width = len(self.costs)
        spans = self.spans[-count * width :]
        return [spans[at : at + width] for at in range(0, len(spans), width)]


def test_spans_are_long_and_load_precedes_them():
    card = Card(a=0.15, b=3.0)
    times = time_sustained(card.calls, card.plan())
    rounds = card.rounds(LEAST_ROUNDS)
    assert all(spent >= 10.0 for spans in rounds for _, _, spent, _ in spans)
    before = [span for span in card.spans if span[3] <= rounds[0][0][3] - rounds[0][0][2] + 1e-9]
    assert sum(spent for _, _, spent, _ in before) >= 2000.0
    assert {name for name, *_ in before} == {"a", "b"}
    assert times["a"] == pytest.approx([0.225] * LEAST_ROUNDS)


def test_a_first_estimate_that_is_too_long_makes_no_short_span():
    """The host's time, of launches that nothing hides yet, is in the first span."""
    card = Card(a=0.1)

    def span(call, count):
        is_first = not card.spans
        return card.span(call, count) + (5.0 if is_first else 0.0)

    time_sustained(card.calls, Plan(span, random.Random(0)))
    assert all(spent >= 10.0 for spans in card.rounds(LEAST_ROUNDS) for _, _, spent, _ in spans)


def test_orders_are_drawn_from_a_seed_and_are_balanced():
    def orders(seed):
        card = Card(a=1.0, b=1.0, c=1.0)
        time_sustained(card.calls, card.plan(seed, rounds=600, load_ms=0))
        return [[name for name, *_ in spans] for spans in card.rounds(600)]

    drawn = orders(0)
    assert drawn == orders(0) != orders(1)
    assert all(sorted(names) == ["a", "b", "c"] for names in drawn)
    firsts = Counter(names[0] for names in drawn)
    followed = Counter(two for names in drawn for two in pairwise(names))
    assert min(firsts.values()) > 160 and max(firsts.values()) < 240  # of 200
    assert len(followed) == 6 and min(followed.values()) > 160 and max(followed.values()) < 240


def test_each_shape_has_orders_of_its_own():
    plan = plan_for("cpu", 8)
    first, second = ([plan.draw.sample("abc", 3) for _ in range(8)] for _ in range(2))
    assert first != second
    assert plan_for("cpu", 8).draw.sample("abc", 3) == first[0]


def test_rounds_are_eight_or_more():
    assert [plan_for("cpu", asked).rounds for asked in (2, 5, 12)] == [8, 8, 12]


@pytest.mark.parametrize("device, least", [("cpu", 1.0), ("cuda", 10.0)])
def test_spans_are_as_long_as_asked(device, least):
    assert plan_for(device, 8).span_ms == least
    assert plan_for(device, 8, span_ms=70).span_ms == 70


def test_both_ways_are_measured():
    card = Card(a=1.0, b=2.0)
    clock = lambda call, count: [card.costs[call()] / 2] * count  # noqa: E731
    times = measure(card.calls, clock, 3, 10.0, card.plan(load_ms=0.0, rounds=8))
    assert times["b"].flushed == [1.0] * 3 and times["b"].sustained == [2.0] * 8
    assert ratio(times["a"].sustained, times["b"].sustained).median == 2.0
    assert measure(card.calls, clock, 3, 10.0, None)["a"].sustained == []
    assert measure({}, clock, 3, 10.0, card.plan()) == {}


def test_a_call_that_raises_under_load_is_named():
    def fails():
        raise RuntimeError("no memory")

    def span(call, count):
        call()
        return 1.0

    with pytest.raises(CallFailed, match="b: no memory"):
        time_sustained({"a": int, "b": fails}, Plan(span, random.Random(0), load_ms=0))


def test_a_provider_that_raises_under_load_has_no_row_and_others_go_on(tmp_path, monkeypatch):
    loaded = []

    def span(call, count):
        loaded.append(1)
        return cpu_span(call, count)

    def attend(q, k, v):
        if loaded:
            raise RuntimeError("no kernel any more")
        return standard_attention(q, k, v, True)

    monkeypatch.setattr("benchmarks.bench.sustained.cpu_span", span)
    late = Provider("late", lambda shape, device: None, lambda shape, device: attend)
    file, lines = tmp_path / "rows.jsonl", []
    quick = dict(rounds=1, round_ms=1, sustained=True, save=file, show=lines.append)
    done = run_suite([SMALL], ["standard", late, "flash"], **quick)
    assert "no kernel any more" in done[1].refused and done[1].row is None
    rows = load(file)
    assert [one.provider for one in rows] == ["standard", "flash"]
    assert all(len(one.rounds_ms) == 1 and len(one.sustained_ms) == LEAST_ROUNDS for one in rows)
    assert all(one.extra["span_ms"] == SPAN_MS["cpu"] for one in rows)
    assert done[0].sustained.median == 1.0
    assert done[2].sustained == ratio(rows[0].sustained_ms, rows[1].sustained_ms)
    assert sum(line.strip().startswith("sustained") for line in lines) == 2


def test_rows_round_trip_with_and_without(tmp_path):
    rows = [row(), row(sustained_ms=[1.5, 1.25], joules=0.5)]
    append(tmp_path / "rows.jsonl", rows)
    assert load(tmp_path / "rows.jsonl") == rows
    early = dict(rows[0].__dict__)
    del early["sustained_ms"], early["joules"]
    assert validate(early) == early


@pytest.mark.parametrize("times", [["fast"], [0.0], [1.0, math.nan], [True], 3.0])
def test_times_that_are_none_are_refused(times):
    with pytest.raises(ValueError, match="sustained_ms"):
        validate({**row().__dict__, "sustained_ms": times})


def test_a_ratio_is_of_the_way_that_both_have():
    ours, theirs = pair(1.0, 1.5)
    loaded = row(sustained_ms=[2.0, 4.0, 2.0]), row("fa3", sustained_ms=[2.2, 4.4, 9.0])
    assert way_of(*loaded) == SUSTAINED and way_of(loaded[0], theirs) == FLUSHED
    assert ratio_of(*loaded).median == pytest.approx(1.1)
    assert ratio_of(ours, theirs).median == 1.5
    assert rate_of(loaded[0], SUSTAINED) == pytest.approx(loaded[0].tflops / 2)
    other_rounds = row("fa3", sustained_ms=[2.0])
    assert way_of(loaded[0], other_rounds) == FLUSHED
