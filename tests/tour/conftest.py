"""Lessons for tests: each runs once a session, its pictures go to a temporary folder."""

import pytest
from tour.lessons import run_lesson


@pytest.fixture(scope="session")
def lesson(tmp_path_factory):
    """`lesson("01_vector_add")` is that lesson, run: what it defined, printed and drew."""
    ran = {}

    def run(name):
        if name not in ran:
            ran[name] = run_lesson(name, tmp_path_factory.mktemp(name))
        return ran[name]

    return run
