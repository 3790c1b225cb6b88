"""No test asserts how long something takes, and what ends a wait is told by `helpers/waits.py`."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
CLOCK = re.compile(r"\b(monotonic|perf_counter|(process|thread)_time|time\.time)(_ns)?\(|ru_.time")
# What prints how long it ran, and what the rest waits by
PROGRAMS = {
    *("conftest.py", "helpers/watch.py"),
    *("fuzz/__main__.py", "fuzz/many.py", "integrations/sweep/__main__.py"),
}
READ_A_CLOCK = PROGRAMS | {"helpers/waits.py"}
ARGUMENTS = {"timeout", "seconds", "deadline", "minutes"}
WAITS = {"acquire", "alarm", "join"}
HAS_ONE = re.compile(rf"\b({'|'.join(ARGUMENTS)})\b.*=|\.({'|'.join(WAITS)})\(\d")


def sources():
    for path in sorted(TESTS.rglob("*.py")):
        yield path.relative_to(TESTS).as_posix(), path.read_text()


def told_here(call: ast.Call):
    """Numbers of seconds in a call, which a busy machine may pass."""
    named = [x.value for x in call.keywords if x.arg in ARGUMENTS]
    if isinstance(call.func, ast.Attribute) and call.func.attr in WAITS:
        named += call.args
    return [x for x in named if isinstance(x, ast.Constant) and type(x.value) in (int, float)]


def defaults(function: ast.FunctionDef):
    spec = function.args
    last = spec.args[len(spec.args) - len(spec.defaults) :]
    pairs = [*zip(last, spec.defaults), *zip(spec.kwonlyargs, spec.kw_defaults)]
    return [x for name, x in pairs if name.arg in ARGUMENTS and isinstance(x, ast.Constant)]


def test_no_test_reads_a_clock():
    readers = {name for name, text in sources() if CLOCK.search(text)}
    assert readers <= READ_A_CLOCK | {"structure/test_waits.py"}


def test_time_outs_are_those_of_the_helper():
    time_outs = []
    for name, text in sources():
        if not HAS_ONE.search(text):  # most, which need not be parsed
            continue
        for node in ast.walk(ast.parse(text)):
            seconds = told_here(node) if isinstance(node, ast.Call) else []
            if isinstance(node, ast.FunctionDef):
                seconds = [x for x in defaults(node) if x.value is not None]
            time_outs += [f"{name}:{x.lineno}: {x.value} s" for x in seconds]
    assert not time_outs


def test_pages_say_one_time_of_the_tests():
    """Which `make test` prints at its end, and no test asserts."""
    pages = {"README.md", "CONTRIBUTING.md", "Makefile", "README.zh-CN.md"}
    said = {x: re.findall(r"(?:at most|至多) (\d+) ", (ROOT / x).read_text("utf-8")) for x in pages}
    assert all("15" in numbers for numbers in said.values()), said
