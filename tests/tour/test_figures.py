"""The lessons' figures: recorded rows are found, measured ones are recorded as rows."""

import lesson
import pytest
import triton.testing
from tour.lessons import code_of, helper

from benchmarks.bench import row


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """A file with a time and a value of one lesson, and a time of another."""
    fields = dict(row.stamp("tour/00_test", "cpu"), p20_ms=1.0, p80_ms=1.0, rounds_ms=[1.0])
    fields |= dict(tflops=0.0, max_error=None, bound=None, shape={"n": 1})
    rows = [
        row.Row(**fields, provider="ours", median_ms=2.5),
        row.Row(**fields, provider="size", median_ms=0.0, extra={"value": 7.0}),
        row.Row(**fields | dict(suite="tour/01_other"), provider="theirs", median_ms=1.0),
    ]
    path = tmp_path / "rows.jsonl"
    row.append(path, rows)
    monkeypatch.setattr(lesson, "RECORDED", path)
    return path


def test_recorded_rows_are_found_by_shape_and_name(recorded, monkeypatch):
    figures = lesson.Figures("00_test")
    calls = dict.fromkeys(["theirs", "ours"])
    assert figures.times({"n": 1}, calls) == {"ours": 2.5}
    assert figures.times({"n": 2}, calls) == {}
    assert figures.value({"n": 1}, "size", lambda: 0.0) == 7.0
    assert figures.value({"n": 1}, "other", lambda: 0.0) is None
    assert "recorded 20" in figures.machine
    monkeypatch.setitem(lesson.RECORDED_IN, "00b_test", "00_test")
    assert lesson.Figures("00b_test").times({"n": 1}, calls) == {"ours": 2.5}
    assert "nothing recorded yet" in lesson.Figures("02_test").machine


def test_what_is_measured_is_recorded(tmp_path, monkeypatch):
    """As on a GPU, with a clock that this test makes up."""
    path = tmp_path / "measured.jsonl"
    monkeypatch.setenv("TILEWISE_RECORD", str(path))
    monkeypatch.setattr(lesson, "ON_GPU", True)
    called = []

    def do_bench(call, warmup, rep, return_mode):
        call()
        assert (warmup, rep, return_mode) == (10.0, 30.0, "median")
        return 1.0 + len(called) % 3

    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    figures = lesson.Figures("00_test")
    calls = {name: lambda name=name: called.append(name) for name in ("a", "b", "c")}
    found = figures.times({"n": 1}, calls, flops=4e9, rounds=4)
    assert figures.value({"n": 1}, "size", lambda: 7) == 7.0
    assert sorted(called) == sorted("abc" * 4)
    rounds = ["".join(called[i : i + 3]) for i in range(0, 12, 3)]
    assert {"".join(sorted(x)) for x in rounds} == {"abc"} and len(set(rounds)) > 1
    *times, value = row.load(path)
    assert [x.provider for x in times] == ["a", "b", "c"] and value.extra == {"value": 7.0}
    for one in times:
        assert one.median_ms == found[one.provider] and len(one.rounds_ms) == 4
        assert one.tflops == pytest.approx(4 / one.median_ms)
        assert min(one.rounds_ms) <= one.p20_ms <= one.median_ms <= one.p80_ms


def test_no_row_of_lesson_07_is_lost_by_a_name():
    """Steps that were renamed are found under the name that rows have."""
    pictures = helper("07_hopper", "pictures")
    named = {one["provider"] for one in lesson.recorded_rows("tour/07_hopper")}
    code, renamed = code_of("07_hopper"), {old: new for new, old in pictures.RECORDED_AS.items()}
    for name in named - {"tilewise", "SDPA"}:
        assert f'"{renamed.get(name, name)}":' in code
