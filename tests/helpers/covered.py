"""Tests that run what cheaper ones run, too: `make test` leaves them to `make test-all`.

covered.txt has a line for each function that is left out, or for each case of one some of whose
cases stay. `make tiers` measures all tests and rewrites it (helpers/watch.py).
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

FILE = Path(__file__).with_name("covered.txt")
# CPU seconds below which a test stays, and below which a function keeps its cheapest case
CHEAP, CHEAP_FUNCTION = 0.1, 0.2


class Seen(NamedTuple):
    """What one test cost, and what it ran."""

    test: str
    seconds: float
    is_kept: bool
    "By its file, or as a test of examples at random"
    runs_elsewhere: bool
    "In processes of its own or in a compiler, whose lines are not seen"
    arcs: tuple
    "Pairs of lines of a file, one run after the other, each once"

    @property
    def function(self) -> str:
        """The test without its case."""
        return self.test.partition("[")[0]


def covered(tests: Iterable[Seen]) -> set[str]:
    """The tests, from the most expensive down, all of whose arcs tests that stay have, too.

    A function that is cheap counts as an arc, and so does one whose code runs elsewhere.
    """
    tests = sorted(tests, key=lambda x: (-x.seconds, x.test))
    single = {x.function for x in tests if x.seconds < CHEAP_FUNCTION or x.runs_elsewhere}
    arcs = {x.test: (*x.arcs, *({x.function} & single)) for x in tests}
    stay = Counter(arc for test in arcs for arc in arcs[test])
    left_out = set()
    for x in tests:
        if x.is_kept or x.seconds < CHEAP or any(stay[arc] == 1 for arc in arcs[x.test]):
            continue
        stay.subtract(arcs[x.test])
        left_out.add(x.test)
    return left_out


def names(left_out: set[str], tests: Iterable[Seen], before: Iterable[str] = ()) -> list[str]:
    """The lines of the file: a function none of whose cases stays has one. Lines from `before` are
    of tests that were not run, and stay.
    """
    stays = {x.function for x in tests if x.test not in left_out}
    functions = {test: test.partition("[")[0] for test in left_out}
    lines = {test if of in stays else of for test, of in functions.items()}
    return sorted(lines | {x for x in before if x.partition("[")[0] not in lines})


def read() -> frozenset[str]:
    """The lines of the file."""
    return frozenset(x for x in FILE.read_text("utf-8").splitlines() if not x.startswith("#"))


def write(tests: list[Seen], before: Iterable[str] = ()) -> None:
    """Writes the file, and prints how much of these tests stays."""
    left_out = covered(tests)
    stay = sum(x.seconds for x in tests if x.test not in left_out)
    heading = "# Cheaper tests run what these run: written by `make tiers`"
    FILE.write_text("\n".join([heading, *names(left_out, tests, before), ""]), "utf-8")
    print(f"{len(left_out)} of {len(tests)} tests are slow")
    print(f"{stay:.0f} of {sum(x.seconds for x in tests):.0f} CPU seconds stay")


def mark(items: Iterable[pytest.Item]) -> None:
    """Tests of the file become slow."""
    listed = read()
    for item in items:
        if item.nodeid in listed or item.nodeid.partition("[")[0] in listed:
            item.add_marker("slow")
