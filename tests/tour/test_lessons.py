"""Every lesson of the tour: it has what a lesson has, runs, and its exercises are solvable."""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("matplotlib")

from tour.lessons import (
    FOLDER,
    NAMES,
    Invented,
    cells_of,
    code_of,
    prose_of,
    run_lesson,
    solutions_of,
    solve,
)

QUICK = {"00_gpu", "01_vector_add", "03_softmax"}  # the sample of `make test`: seconds each
# Their own tests run them with figures, and call what is timed.
WITH_FIGURES = {"00_gpu", "01_vector_add", "02_matmul", "03_softmax"}
LESSONS = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow, id=name) for name in NAMES
]


def test_there_are_lessons():
    assert NAMES[0] == "00_gpu" and len(NAMES) == len({name[:2] for name in NAMES})


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_has_its_parts(name):
    first, *_ = cells_of(name)
    assert first.is_prose and first.text.startswith(f"# {name[:2]}. ")
    assert "you can" in first.text or "You can" in first.text, "what will the reader be able to do?"
    code = code_of(name)
    assert re.search(r"^@(triton|gluon)\.jit", code, re.MULTILINE), "a kernel to change"
    assert re.search(r"\bassert\b|assert_close|assert_within|\bjudge\(", code), "a check"
    assert re.search(r"^\s*show\(", code, re.MULTILINE), "a picture"
    assert f'Figures("{name}")' in code, "figures with their machine"


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_has_two_exercises_with_solutions(name):
    exercises = re.findall(r"^\*\*\d\.\*\*", prose_of(name), re.MULTILINE)
    solutions = solutions_of(name)
    assert len(exercises) >= 2 and len(solutions) == len(exercises)
    for solution in solutions:
        assert re.search(r"^\s*(assert |torch\.testing\.assert_)", solution, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_prose_keeps_to_the_page(name):
    for cell in cells_of(name):
        if cell.is_prose:
            assert "TODO" not in cell.text
            assert cell.text.count("```") % 2 == 0, "a fence is open"
            assert cell.text.count("<details>") == cell.text.count("</details>")


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_runs_and_its_exercises_are_solved(name, lesson, tmp_path):
    ran = lesson(name)
    assert ran.pictures, "no picture was drawn"
    assert all(picture.stem.startswith(name[:2]) for picture in ran.pictures)
    for number in range(len(solutions_of(name))):
        solve(name, number, vars(ran.module), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITH_FIGURES])
def test_a_lesson_goes_on_with_figures(name, tmp_path):
    """What it prints and draws of recorded rows, with rows that this test makes up."""
    ran = run_lesson(name, tmp_path, Invented)
    asked = [x.asked for x in vars(ran.module).values() if isinstance(x, Invented)]
    assert asked and any(asked) and ran.pictures


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_runs_on_a_gpu(name, tmp_path):
    """As a reader runs it: compiled, and measured."""
    where = {"TILEWISE_PICTURES": str(tmp_path), "MPLBACKEND": "Agg"}
    where["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parent / "src"), *sys.path])
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, env=os.environ | where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert list(tmp_path.glob("*.png"))
