"""Regressions beyond noise: what is compared with what, and when a change counts."""

import pytest
from helpers.made_rows import made

from benchmarks.bench import append
from benchmarks.bench.shapes import square
from benchmarks.bench.timer import Spread
from benchmarks.changes import Choice, changes_between, rule
from benchmarks.sides import Side, read

SMALL = square("fwd", 32, 16, True, dtype="float32", tokens=64, hidden=32)
LARGE = SMALL._replace(seqlen_q=64, seqlen_k=64)
STEADY = [1.0, 1.01, 0.99, 1.0, 1.0]


def row(provider="tilewise", times=STEADY, **changes):
    spread = Spread.of(times)
    fields = dict(shape=SMALL._asdict(), provider=provider, rounds_ms=list(times), tflops=1.0)
    fields |= dict(median_ms=spread.median, p20_ms=spread.p20, p80_ms=spread.p80)
    return made(**(fields | changes))


def by(factor, times=STEADY):
    return [factor * time for time in times]


def both(a, b, **choice):
    return changes_between(Side("a", a), Side("b", b), Choice(**choice))


def only(a, b, **choice):
    (change,) = both(a, b, **choice).changes
    return change


def memory(peak, **changes):
    return row(times=[0.0], extra={"peak_bytes": peak}, **changes)


def test_a_peer_in_the_same_run_takes_the_machine_out():
    """The second machine takes twice as long, for all."""
    change = only([row(), row("fa3", by(1.2))], [row(times=by(2)), row("fa3", by(2.4))])
    assert (change.measure, change.peer, change.verdict) == ("ratio", "fa3", "noise")
    assert change.a.median == pytest.approx(1.2) and change.cost == pytest.approx(1)


def test_what_is_slower_beside_its_peer_regressed():
    a, b = [row(), row("fa3", by(1.2))], [row(times=by(0.5)), row("fa3", by(0.5))]
    change = only(a, b)
    assert change.verdict == "regressed" and change.cost == pytest.approx(1.2)
    assert only(b, a).verdict == "improved"
    assert both(a, b).has_regressed and not both(b, a).has_regressed


def test_rounds_are_held_side_by_side():
    """Times differ by a factor of two from round to round, the ratio hardly."""
    drift = [1.0, 1.4, 2.0, 1.2, 1.7]
    change = only(
        [row(times=drift), row("fa3", by(1.2, drift))],
        [row(times=by(1.1, drift)), row("fa3", by(1.2, drift))],
    )
    assert change.verdict == "regressed" and change.cost == pytest.approx(1.1)


def test_without_a_common_peer_times_are_plain_and_it_is_said():
    found = both([row(), row("fa3")], [row(times=by(1.1)), row("cudnn")])
    assert [(x.measure, x.peer, x.verdict) for x in found.changes] == [("time", "", "regressed")]
    assert "only comparable on one machine" in found.notes[0]


def test_a_peer_of_another_run_or_of_other_rounds_is_none():
    other_run = [row(), row("fa3", run="1")]
    fewer = [row(), row("fa3", STEADY[:3])]
    for rows in (other_run, fewer):
        assert only(rows, [row(), row("fa3")]).measure == "time"


def test_the_peer_is_the_first_of_an_order_or_the_one_asked_for():
    rows = [row(), row("efficient"), row("flash"), row("tilewise:portable"), row("cudnn")]
    peers = [change.peer for change in both(rows, rows).changes]
    assert peers == ["cudnn", "cudnn"]  # of both that begin with tilewise
    assert only(rows[:3], rows[:3]).peer == "efficient"
    assert only(rows, rows, peer="flash", providers=("tilewise",)).peer == "flash"
    assert only(rows, rows, peer="fa3", providers=("tilewise",)).measure == "time"
    assert only(rows, rows, providers=("cudnn",)).peer == "efficient"


def loaded(factor, peer=1.2):
    """Ours and fa3's, slower by a factor under load and the same with pauses."""
    ours = row(sustained_ms=by(factor))
    return [ours, row("fa3", by(1.2), sustained_ms=by(peer))]


def test_sustained_times_are_compared_where_both_sides_have_them():
    change = only(loaded(1.0), loaded(1.1))
    assert (change.verdict, change.way, change.peer) == ("regressed", "sustained", "fa3")
    assert change.cost == pytest.approx(1.1)
    assert only(loaded(1.0)[:1], loaded(1.1)[:1]).way == "sustained"  # in plain milliseconds


def test_an_old_row_is_compared_by_flushed_times_and_it_is_said():
    old = [row(), row("fa3", by(1.2))]
    found = both(old, loaded(1.1))
    assert [(x.verdict, x.way) for x in found.changes] == [("noise", "flushed")]
    assert any("1 in flushed times" in note for note in found.notes)
    assert not any("flushed" in note for note in both(old, old).notes)


@pytest.mark.parametrize(
    ("times", "threshold", "verdict"),
    [
        (by(1.02), 0.03, "small"),
        (by(1.02), 0.01, "regressed"),
        (by(1.04), 0.03, "regressed"),
        (by(0.96), 0.03, "improved"),
        ([0.9, 1.0, 1.2, 1.3, 1.4], 0.03, "noise"),  # 20 % more, and the intervals overlap
        ([2.0, 2.0], 0.03, "few rounds"),
    ],
)
def test_a_change_counts_beyond_both_noise_and_threshold(times, threshold, verdict):
    assert only([row()], [row(times=times)], threshold=threshold).verdict == verdict
    assert f"{100 * threshold:g} %" in rule(threshold)


def test_the_newest_row_counts_wherever_it_stands():
    new, old = row(times=by(1.5), date="2026-01-02T00:00:00+00:00"), row()
    found = both([row()], [new, old])
    assert found.changes[0].cost == pytest.approx(1.5) and found.left_out == {"older rows": 1}


def test_rows_from_before_a_field_of_shape_are_of_the_same_shape():
    early = {k: v for k, v in SMALL._asdict().items() if k not in SMALL._field_defaults}
    assert only([row(shape=early)], [row()]).verdict == "noise"


def test_what_is_not_the_same_measurement_is_kept_apart():
    eager, graph = (row(extra={"mode": mode}) for mode in ("eager", "graph"))
    lane = row("flex", extra={"lane": "flex"})
    found = both([eager, graph, row(device="another")], [eager, row(shape=LARGE._asdict())])
    assert [change.label for change in found.changes] == ["mode eager"]
    assert found.left_out == {"only in A": 2, "only in B": 1}
    assert only([row(), lane], [row(), lane]).peer == "flex"
    assert only([eager, row("flash")], [eager, row("flash")]).measure == "time"


def test_memory_is_compared_where_nothing_is_timed():
    assert only([memory(1000)], [memory(1020)]).verdict == "small"
    change = only([memory(1000)], [memory(1200)])
    assert (change.measure, change.verdict) == ("memory", "regressed")
    assert only([memory(1000)], [memory(800)]).verdict == "improved"


def test_what_has_neither_is_counted():
    full = row(times=[0.0], extra={"out_of_memory": "no room"})
    found = both([memory(1000)], [full])
    assert found.changes == []
    assert found.left_out == {"without a time or a peak of memory on both sides": 1}


def test_time_and_memory_of_one_row_are_two_figures():
    found = both([row(extra={"peak_bytes": 100})], [row(extra={"peak_bytes": 200})])
    assert [(x.measure, x.verdict) for x in found.changes] == [
        ("time", "noise"),
        ("memory", "regressed"),
    ]


def test_versions_that_differ_are_named():
    found = both([row(), row("fa3")], [row(triton="3.8"), row("fa3", triton="3.8")])
    assert any("triton is 3.6.0 in A and 3.8 in B (1 of 1)" in note for note in found.notes)


def test_another_kind_of_shape_is_taken():
    product = row(shape={"m": 64, "n": 32, "k": 16, "kind": "bf16"})
    assert only([product], [product]).shape == "m=64 n=32 k=16 kind=bf16"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows@home.jsonl"
    commits = ("27d2d19", "27d2d19+", "ff0ea288e7", "ff0ea288e7aaaa")
    append(path, [row(commit=name, run=f"{n}abc") for n, name in enumerate(commits)])
    return path


@pytest.mark.parametrize(
    ("which", "runs"),
    [
        ("", "0123"),
        ("@27d2", "0"),
        ("@27d2d19", "0"),
        ("@27d2d190000000", "0"),  # a name in full, where the row has it cut
        ("@27d2d19+", "1"),
        ("@ff0e", "23"),  # one commit, cut to other lengths
        ("@3abc", "3"),
    ],
)
def test_a_commit_or_a_run_is_chosen(file, which, runs):
    side = read(f"{file}{which}")
    assert [row.run[0] for row in side.rows] == list(runs)


@pytest.mark.parametrize(
    ("which", "message"),
    [("@beef", "commits: 27d2d19, 27d2d19+"), ("@", "begins with ''"), ("@2", "more than one")],
)
def test_what_is_no_commit_or_run_is_named(file, which, message):
    with pytest.raises(ValueError, match="rows@home.jsonl: ") as error:
        read(f"{file}{which}")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\n{]\n", "line 2"),
        (b"{}\n", "line 1: field 'date' is missing"),
        (b"\n\xff\n", "line 2: it is not UTF-8"),
        (b"\n", "it holds no row"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text)
    with pytest.raises(ValueError, match="rows.jsonl") as error:
        read(str(path))
    assert message in str(error.value)


def test_rounds_are_numbers():
    """Else a comparison would stumble over them."""
    from benchmarks.bench.row import validate

    with pytest.raises(ValueError, match="rounds_ms.*'fast'"):
        validate({**row().__dict__, "rounds_ms": [1.0, "fast"]})
