"""What `make bench-all` would run: commands that there are, with options that they take."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.waits import DEADLINE

from benchmarks.__main__ import main
from benchmarks.bench.commands import bench

EXPERIMENTS = {"matmul", "memory", "io", "speedup", "blocks", "host", "cold", "cpu"}
ROOT = Path(__file__).resolve().parents[2]
BENCH = ["-m", "benchmarks", "bench"]
EXPERIMENT = ["-m", "benchmarks"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The arguments of each start of Python."""
    if shutil.which("make") is None:
        pytest.skip("no make is found on PATH")
    folder = tmp_path_factory.mktemp("make")
    python, log = folder / "python", folder / "log"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {log}\n')
    python.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-s", "bench-all", f"PYTHON={python}", f"RESULTS={folder / 'rows.jsonl'}"]
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=DEADLINE)
    return [shlex.split(line) for line in log.read_text().splitlines()]


def saved(group, words, monkeypatch):
    """Where the command that is meant would save its rows; it does not run."""
    seen = []
    for command in group.commands.values():
        monkeypatch.setattr(command, "callback", lambda **asked: seen.append(asked))
    done = CliRunner().invoke(group, words)
    assert done.exit_code == 0, done.output
    return seen[0]["save"]


def test_every_command_takes_its_options(lines, monkeypatch):
    asked = [line[len(BENCH) :] for line in lines if line[: len(BENCH)] == BENCH]
    assert len(asked) == 25
    for words in asked:
        assert saved(bench, words, monkeypatch).endswith("rows.jsonl")


def test_every_experiment_takes_its_options(lines, monkeypatch):
    asked = [line[len(EXPERIMENT) :] for line in lines if line[: len(EXPERIMENT)] == EXPERIMENT]
    asked = [words for words in asked if words[0] != "bench"]
    assert {words[0] for words in asked} == EXPERIMENTS
    for words in asked:
        assert saved(main, words, monkeypatch).endswith("rows.jsonl")


def test_what_pages_lead_with_is_timed_under_sustained_load(lines):
    """Dense, packed and GPT-2's; the backward beside FA3 and cuDNN."""
    asked = [line[len(BENCH) :] for line in lines if "--sustained" in line]
    whole = {" ".join(words) for words in asked}
    assert len(asked) == 9 and any("varlen" in words for words in asked)
    assert any("fp8" in words for words in asked)
    assert any("bwd" in words and "fa3,cudnn," in " ".join(words) for words in asked), whole


def test_packed_and_modifiers_and_every_lesson_are_there(lines):
    first = {line[len(BENCH)] for line in lines if line[: len(BENCH)] == BENCH}
    assert {"varlen", "modifiers", "decode"} <= first
    lessons = {line[0] for line in lines if line[0].startswith("tour/")}
    assert lessons == {f"tour/{path.name}" for path in (ROOT / "tour").glob("[0-9]*.py")}
