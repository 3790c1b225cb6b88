"""The command itself: quick help, lazy commands, exit codes."""

import importlib
import os
import re
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
        "assert 'tilewise.explain' not in sys.modules\n"
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


@pytest.mark.parametrize("command", ["bench", "demo", "generate"])
def test_a_program_of_the_repository_is_named(command):
    done = invoke(command, "--quick", "--device", "cpu")
    assert done.exit_code == 2 and command not in main.commands
    (line,) = done.output.splitlines()[-1:]
    assert re.match(rf"Error: `tilewise {command}` is `python -m .+` now, in a clone", line)
    package, _, name = re.findall(r"-m ([\w.]+)( (\w+))?`", line)[0]
    program = importlib.import_module(f"{package}.__main__").main
    assert name in program.commands if name else program.callback


def test_where_bench_is_now():
    said = r"tilewise.bench is benchmarks.bench now, in a clone of tilewise's repository"
    for text in (
        "import tilewise.bench",
        "from tilewise import bench",
        "import tilewise.bench.row",
    ):
        with pytest.raises(ImportError, match=said):
            exec(text)
    with pytest.raises(AttributeError, match="it is benchmarks.bench in a clone of the repository"):
        _ = tilewise.bench
    assert not hasattr(tilewise, "bench")


def test_exit_code_3_without_a_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke("verify", "--device", "cuda")
    assert done.exit_code == 3
    assert "tilewise info" in done.output


def test_lists_of_numbers():
    convert = IntList().convert
    assert convert("1k,4k,64", None, None) == (1024, 4096, 64)
    assert convert((1, 2), None, None) == (1, 2)
