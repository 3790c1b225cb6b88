"""What `make test` leaves to `make test-all` is there, and is chosen as CONTRIBUTING says."""

import re
from itertools import product
from pathlib import Path

import pytest
from helpers import covered, watch
from helpers.covered import Seen

ROOT = Path(__file__).parents[2]
ARCS = "ab", "bc", "cd"


def seen(test, seconds, *arcs, is_kept=False, runs_elsewhere=False):
    return Seen(test, seconds, is_kept=is_kept, runs_elsewhere=runs_elsewhere, arcs=arcs)


def test_what_cheaper_tests_run_too_is_left_out():
    tests = [seen("whole", 3, *ARCS), seen("first", 1, "ab", "bc"), seen("second", 2, "cd")]
    assert covered.covered(tests) == {"whole"}
    assert covered.covered([*tests, seen("third", 1.5, "cd")]) == {"whole", "second"}
    assert covered.covered(tests[:2]) == {"first"}


@pytest.mark.parametrize("cheap", [covered.CHEAP - 0.01, covered.CHEAP + 0.01])
def test_cheap_tests_stay(cheap):
    tests = [seen(f"test[{case}]", cheap + case / 1e3, "ab") for case in range(3)]
    assert covered.covered(tests) == (set() if cheap < covered.CHEAP else {"test[1]", "test[2]"})


@pytest.mark.parametrize("is_kept, is_cheap, runs_elsewhere", [*product((False, True), repeat=3)])
def test_what_stays_though_others_run_it(is_kept, is_cheap, runs_elsewhere):
    seconds = covered.CHEAP_FUNCTION * (0.9 if is_cheap else 1.1)
    kinds = dict(is_kept=is_kept, runs_elsewhere=runs_elsewhere)
    tests = [seen("test[a]", seconds, "ab", **kinds), seen("cheaper", 0.01, "ab")]
    assert covered.covered(tests) == (set() if any([is_cheap, *kinds.values()]) else {"test[a]"})


def test_a_function_has_one_line_if_no_case_stays():
    tests = [seen(x, 1, "ab") for x in ("a[1]", "a[2]", "b[1]", "b[2]", "c")]
    assert covered.names({"a[1]", "a[2]", "b[2]", "c"}, tests) == ["a", "b[2]", "c"]


def test_what_a_part_does_not_run_stays_left_out():
    tests = [seen(x, 1, "ab") for x in ("a[1]", "b[1]", "b[2]")]
    before = ["a[2]", "b[3]", "c", "d[1]"]
    assert covered.names({"a[1]", "b[2]"}, tests, before) == ["a", "b[2]", "b[3]", "c", "d[1]"]


def test_the_order_of_tests_changes_nothing():
    tests = [seen(f"test[{case}]", 1, *ARCS) for case in range(5)]
    assert covered.covered(tests) == covered.covered(tests[::-1])


def test_functions_of_the_file_are_there():
    lines = covered.read()
    assert len(lines) > 100
    for name in {line.partition("[")[0] for line in lines}:
        file, function = name.split("::")
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text("utf-8"), re.M), name


def test_what_always_runs():
    assert not [x for x in covered.read() if x.startswith(watch.KEPT)]
