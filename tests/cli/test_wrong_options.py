"""A wrong value of any option of any command is a usage error whose last line names the option."""

import click
import pytest

pytest.importorskip("rich")
testing = pytest.importorskip("click.testing")

from benchmarks.bench.commands import bench  # noqa: E402
from examples.demo.command import demo  # noqa: E402
from examples.generate.command import generate  # noqa: E402
from tilewise.cli import options, verify  # noqa: E402
from tilewise.cli.__main__ import main  # noqa: E402

ALL = click.Group("all", [*main.commands.values(), bench, demo, generate])

NO_VALUE = ("hoper", "-7", "nan", "inf", "1e400", "cuda:x", "tilewise:hoper", "/dev/null/x")
NO_FILE = ("/dev/null/x",)


def commands(command, path=()):
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name, subcommand in command.commands.items():
        yield from commands(subcommand, (*path, name))


TAKING_VALUES = [
    pytest.param(path, option, id=" ".join((*path, option.opts[0])))
    for path, command in commands(ALL)
    for option in command.params
    if not getattr(option, "is_flag", False)
]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    """A value that is let through costs no minutes."""

    def ran(*args):
        raise AssertionError("this value was taken")

    monkeypatch.setattr("tilewise.attention", ran)


def said(*arguments):
    """The last line of a usage error."""
    done = testing.CliRunner(env={"COLUMNS": "200"}).invoke(ALL, arguments)
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit), (arguments, done)
    line = done.output.splitlines()[-1]
    assert line.startswith("Error: "), (arguments, done.output)
    return line


@pytest.mark.parametrize(("path", "option"), TAKING_VALUES)
def test_a_wrong_value_is_a_usage_error_that_names_the_option(path, option):
    is_option = isinstance(option, click.Option)
    rest = ("causal",) if path == ("mask",) and is_option else ()
    for value in NO_FILE if isinstance(option.type, options.NewFile) else NO_VALUE:
        line = said(*path, *((option.opts[0], value) if is_option else ("--", value)), *rest)
        assert (option.opts[0] if is_option else option.make_metavar(click.Context(ALL))) in line


@pytest.mark.parametrize(
    "expression",
    ["gqa (window)", "gqa and", "()", "(" * 300, "not " * 3000, "gqa, window", "a if b"],
)
def test_words_that_are_joined_otherwise(expression):
    assert "-k" in said("verify", "-k", expression)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("bench --group 3", "--group"),
        ("bench decode --quick --queries 4k", "--queries"),
        ("bench modifiers --quick --cases documents --heads x", "--heads"),
        ("bench distributed --device cpu --documents 4096", "--documents"),
        ("bench distributed --device cpu --pass bwd", "--pass"),
        ("verify --dtype fp32,int3", "--dtype"),
    ],
)
def test_values_that_do_not_fit_each_other(arguments, named):
    assert named in said(*arguments.split())


def test_words_are_not_evaluated():
    assert verify.matches("gqa and not (tall or 3)", "gqa-4")
    with pytest.raises(ValueError, match="joined by"):
        verify.matches("gqa [0]", "gqa")
