"""`python -m benchmarks compare`: tables, JSON, exit codes, wrong usage."""

import dataclasses
import json

import pytest
from helpers.made_rows import made

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

from benchmarks.__main__ import main  # noqa: E402
from benchmarks.bench import append  # noqa: E402
from benchmarks.bench.shapes import square  # noqa: E402
from benchmarks.compare import shortened  # noqa: E402

SHORT, LONG = (square("fwd", seqlen, 64, False) for seqlen in (512, 1024))


def rows(commit, ms, **peers):
    """Both shapes, ours and peers, in one run."""
    return [
        made(
            commit=commit,
            run=f"run{commit}",
            shape=shape._asdict(),
            provider=name,
            median_ms=float(time),
            rounds_ms=[float(time)] * 5,
            tflops=1.0,
        )
        for shape in (SHORT, LONG)
        for name, time in {"tilewise": ms, **peers}.items()
    ]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    append(path, rows("aaaaaaa", 1, fa3=1.2) + rows("bbbbbbb", 2, fa3=2) + rows("ccccccc", 1))
    return str(path)


def invoke(*arguments, width=110):
    runner = testing.CliRunner(env={"COLUMNS": str(width)})
    return runner.invoke(main, ["compare", *arguments])


def test_a_regression_beside_a_peer(file):
    done = invoke(f"{file}@aaaaaaa", f"{file}@bbbbbbb")
    assert done.exit_code == 1, done.output
    assert "tilewise and fa3, interleaved: time of fa3 / time of ours" in done.output
    assert done.output.count("regressed") == 3 and "+20.0 %" in done.output
    assert "p20-p80 intervals" in done.output and "more than 3 %" in done.output
    assert "2 compared: 2 regressed." in done.output


def test_the_other_way_round_nothing_regressed(file):
    done = invoke(f"{file}@bbb", f"{file}@aaa")
    assert done.exit_code == 0 and "2 compared: 2 improved." in done.output


def test_the_threshold_is_in_percent(file):
    done = invoke(f"{file}@aaa", f"{file}@bbb", "--threshold", "21")
    assert done.exit_code == 0 and "more than 21 %" in done.output and "2 small" in done.output


def test_plain_times_say_so(file):
    done = invoke(f"{file}@aaa", f"{file}@ccc")
    assert done.exit_code == 0, done.output
    assert "tilewise, plain milliseconds" in done.output
    said = " ".join(done.output.split())
    assert "2 in plain milliseconds, as no peer" in said
    assert "only comparable on one machine" in said


def test_json_holds_all(file):
    done = invoke(f"{file}@aaa", f"{file}@runbbb", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1 and found["regressed"] and "p20-p80" in found["rule"]
    one = found["changes"][0]
    assert (one["shape"], one["provider"], one["peer"]) == (str(SHORT), "tilewise", "fa3")
    assert one["cost"] == pytest.approx(1.2) and one["a"]["median"] == pytest.approx(1.2)


def test_another_provider_without_a_peer(file):
    done = invoke(f"{file}@aaa", f"{file}@bbb", "--provider", "fa3", "--peer", "tilewise")
    assert done.exit_code == 0 and "fa3 and tilewise, interleaved" in done.output


def test_memory_has_a_table_of_its_own(tmp_path):
    paths = []
    for name, peak in (("old", 1 << 20), ("new", 1 << 21)):
        row = rows("a", 0)[0]
        row = dataclasses.replace(row, median_ms=0.0, rounds_ms=[0.0], extra={"peak_bytes": peak})
        append(tmp_path / name, [row])
        paths.append(str(tmp_path / name))
    done = invoke(*paths)
    assert done.exit_code == 1, done.output
    assert "peak memory in MiB" in done.output and "+100.0 %" in done.output


def test_what_cannot_be_read_exits_with_2(file, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n{]\n")
    for source, message in (
        (str(bad), "bad.jsonl, line 2"),
        (str(tmp_path / "none.jsonl"), "none.jsonl"),
        (f"{file}@beef", "no commit or run begins with 'beef'"),
    ):
        done = invoke(file, source)
        assert done.exit_code == 2 and message in done.output, done.output


def test_nothing_in_common_is_no_pass(file):
    done = invoke(file, file, "--provider", "flash")
    assert done.exit_code == 2 and "nothing to compare of flash" in done.output
    assert "timed on NVIDIA H200" in done.output


def test_help_says_the_rule_and_the_syntax():
    done = invoke("--help")
    assert done.exit_code == 0
    assert "FILE@WHICH" in done.output and "p20-p80" in done.output


@pytest.mark.parametrize(
    ("shapes", "head", "rest"),
    [
        (["fwd a x y", "fwd b x y"], "fwd ... x y", ["a", "b"]),
        (["a x", "b x"], "... x", ["a", "b"]),
        (["a b", "a b"], "shape", ["a b", "a b"]),
        (["x a a", "x a"], "x ...", ["a a", "a"]),
        (["a b", "c d"], "shape", ["a b", "c d"]),
    ],
)
def test_what_all_shapes_share_is_said_once(shapes, head, rest):
    from types import SimpleNamespace

    changes = [SimpleNamespace(shape=shape, label="") for shape in shapes]
    assert shortened(changes) == (head, rest)
