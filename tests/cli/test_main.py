"""The command itself: quick help, lazy commands, exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

import tilewise  # noqa: E402
from tilewise.cli.__main__ import main  # noqa: E402
from tilewise.cli.options import IntList  # noqa: E402


def invoke(*arguments):
    return testing.CliRunner().invoke(main, arguments)


def test_help_imports_nothing_that_measures():
    """What `import tilewise` brings is there anyway."""
    code = (
        "import runpy, sys, tilewise\n"
        "sys.argv, before = ['tilewise', '--help'], set(sys.modules)\n"
        "try: runpy.run_module('tilewise', run_name='__main__')\n"
        "except SystemExit as done: assert not done.code\n"
        "added = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "assert not added & {'triton', 'transformers', 'matplotlib'}, added\n"
        "assert 'tilewise.bench' not in sys.modules\n"
    )
    here = str(Path(tilewise.__file__).parents[1])
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": here}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    for name in main.commands:
        assert name in done.stdout


def test_the_version():
    assert invoke("--version").output == f"tilewise, version {tilewise.__version__}\n"


def test_unknown_commands_and_options_are_usage_errors():
    assert invoke("fly").exit_code == 2
    assert invoke("info", "--wings").exit_code == 2
    assert invoke("bench", "--against", "missing").exit_code == 2
    assert invoke("bench", "--suite", "nothing").exit_code == 2


@pytest.mark.parametrize("command", ["bench", "verify", "demo", "generate"])
def test_exit_code_3_without_a_gpu(command, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke(command, "--device", "cuda")
    assert done.exit_code == 3
    assert "tilewise info" in done.output


def test_lists_of_numbers():
    convert = IntList().convert
    assert convert("1k,4k,64", None, None) == (1024, 4096, 64)
    assert convert((1, 2), None, None) == (1, 2)


def test_bench_prints_rows_as_json(tmp_path):
    import json

    small = "--seqlen 32 --headdim 16 --tokens 64 --hidden 32 --dtype fp32 --causal yes".split()
    quick = "--rounds 2 --round-ms 1 --device cpu --against standard --json".split()
    done = invoke("bench", "fwd", *small, *quick, "--save", str(tmp_path / "rows.jsonl"))
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["provider"] for row in rows] == ["tilewise", "standard"]
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 2
