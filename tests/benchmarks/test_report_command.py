"""`python -m benchmarks report` and `make` targets around it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.report.command import report

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "benchmarks" / "results" / "h200.jsonl"


def run(*args):
    return CliRunner().invoke(report, list(map(str, args)))


def test_a_page_and_its_words(tmp_path):
    done = run(ROWS, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "index.html" in done.output
    assert (tmp_path / "index.html").read_text().startswith("<!doctype html>")
    assert "matmul" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_folders_hold_files(tmp_path):
    assert run(ROWS.parent, "--out", tmp_path).exit_code == 0


def test_what_holds_no_rows_is_named(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps({"date": 1}) + "\n")
    done = run(broken)
    assert done.exit_code == 2 and "broken.jsonl" in done.output
    empty = run(tmp_path / "none")
    assert empty.exit_code == 2
