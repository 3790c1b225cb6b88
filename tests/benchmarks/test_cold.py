"""The first call of a process: what the processes are given, and the rows."""

import pytest
from click.testing import CliRunner

from benchmarks import cold
from benchmarks.__main__ import main
from benchmarks.bench import load
from benchmarks.bench.run import Outcome
from benchmarks.cold import ChildFailed, first_calls, rounds_of, run_cold, shape_for


@pytest.fixture
def small(monkeypatch):
    """A shape that is checked in no time."""
    shape = shape_for("cpu")._replace(seqlen_q=64, seqlen_k=64, nheads=1, nheads_k=1)
    monkeypatch.setattr(cold, "shape_for", lambda device: shape)


def test_an_empty_cache_then_the_same_one_filled(monkeypatch):
    caches = []

    def first(shape, device, cache):
        caches.append(cache)
        return [2.0, 1.0]

    monkeypatch.setattr(cold, "first_calls", first)
    shape = shape_for("cuda")
    assert [name for name, _ in rounds_of(shape, "cuda", 2)] == ["empty", "warm"] * 2
    assert caches[0] == caches[1] != caches[2] == caches[3]
    assert [name for name, _ in rounds_of(shape, "cpu", 2)] == ["none"] * 2
    assert (shape.seqlen_q, shape.nheads, shape.headdim, shape.causal) == (1024, 16, 128, True)


def test_rows(small, monkeypatch, tmp_path):
    times = iter([[30.0, 3.0], [10.0, 1.0], [20.0, 2.0]])
    monkeypatch.setattr(cold, "first_calls", lambda *asked: next(times))
    file = tmp_path / "rows.jsonl"
    rows = run_cold(rounds=3, save=file, show=lambda line: None)
    assert load(file) == rows and [row.median_ms for row in rows] == [20.0, 2.0]
    assert [row.shape["direction"] for row in rows] == ["fwd", "bwd"]
    assert rows[0].rounds_ms == [30.0, 10.0, 20.0] and rows[0].extra == {"cache": "none"}
    assert rows[0].max_error <= rows[0].bound


def test_rows_of_decoding(small, monkeypatch):
    seen = []
    monkeypatch.setattr(cold, "first_calls", lambda shape, *asked: seen.append(shape) or [5.0])
    (row,) = run_cold(rounds=1, call="decode", show=lambda line: None)
    assert row.shape["direction"] == "decode" and row.median_ms == 5.0
    assert (seen[0].seqlen_q, seen[0].seqlen_k) == (1, 64)


@pytest.mark.slow
def test_a_process_that_decodes(small):
    (row,) = run_cold(rounds=1, call="decode", show=lambda line: None)
    assert row.median_ms > 0


def test_rows_hold_the_command_that_takes_them_again(small, monkeypatch, tmp_path):
    monkeypatch.setattr(cold, "first_calls", lambda *asked: [3.0, 2.0])
    file = tmp_path / "rows.jsonl"
    asked = ["cold", "--device", "cpu", "--save", str(file), "--rounds", "1"]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert {row.command for row in load(file)} == {"cold --device cpu --rounds 1"}


def test_a_wrong_call_is_not_timed(small, monkeypatch):
    monkeypatch.setattr(cold, "first_calls", None)
    wrong = Outcome(shape_for("cpu"), "tilewise", None, wrong="dq: far off")
    monkeypatch.setattr(cold.Stage, "ready", lambda stage, one: wrong)
    assert run_cold(show=lambda line: None) is wrong


@pytest.mark.slow
def test_a_process_of_its_own():
    found = first_calls(shape_for("cpu")._replace(seqlen_q=64, nheads=1), "cpu", None)
    assert len(found) == 2 and min(found) > 0


def test_a_process_that_fails_says_why(monkeypatch):
    monkeypatch.setattr(cold, "CHILD", "import sys; sys.exit('no such device')")
    with pytest.raises(ChildFailed, match="no such device"):
        first_calls(shape_for("cpu"), "cpu", None)


def test_a_process_is_told_its_cache(monkeypatch):
    code = "import json, os; print(json.dumps([float(os.environ['TRITON_CACHE_DIR'])]))"
    monkeypatch.setattr(cold, "CHILD", code)
    assert first_calls(shape_for("cpu"), "cpu", "7") == [7.0]
