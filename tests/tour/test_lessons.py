"""Every lesson of the tour: it has what a lesson has, and its cells run in a new process."""

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
    code_of,
    helper,
    lesson_cells,
    number_of,
    prose_of,
    run_in_new_process,
    run_lesson,
    source_of,
)

QUICK = {"01_vector_add"}  # the sample of `make test`: seconds
# Their own tests run them with figures, and call what is timed.
WITH_FIGURES = {"00_gpu", "01_vector_add", "02_matmul", "02b_tile_order", "03_softmax"}
LESSONS = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow, id=name) for name in NAMES
]
EXERCISE = re.compile(r"^## Exercise (\d): ", re.MULTILINE)
ANSWER = re.compile(r"\{literalinclude\} /\.\./tour/lesson/(\w+)\.py\n:pyobject: (\w+)")


def test_there_are_lessons():
    assert NAMES[0] == "00_gpu" and len(NAMES) == len({number_of(name) for name in NAMES})


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_opens_with_one_idea_and_what_a_reader_can_do(name):
    first, *_ = lesson_cells(name)
    assert first.is_prose and first.text.startswith(f"# {number_of(name)}. ")
    idea = re.search(r"^\*\*The idea:\*\* (.*?)\n\n", first.text, re.MULTILINE | re.DOTALL)
    assert idea and idea[1].count(". ") == 0 and idea[1].endswith("."), "one sentence"
    listed = re.search(r"^After this lesson you can\n\n((?:- .*\n(?:  .*\n)*)+)", first.text, re.M)
    assert listed and 1 <= len(re.findall("^- ", listed[1], re.MULTILINE)) <= 3


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_is_short(name):
    code = code_of(name)
    imports = re.findall(r"^\s*(?:import|from) .*", code, re.MULTILINE)
    assert len(imports) <= 5, imports
    assert len(source_of(name).splitlines()) <= 420


@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_has_its_parts(name):
    code = code_of(name)
    assert re.search(r"^@(triton|gluon)\.jit", code, re.MULTILINE), "a kernel to change"
    assert re.search(r"\bassert\b|assert_close|\bcheck\(", code), "a check"
    assert f'Figures("{name}")' in code, "figures with their machine"


@pytest.mark.parametrize("name", NAMES)
def test_every_exercise_is_checked_and_its_answer_shown(name):
    numbers = EXERCISE.findall(prose_of(name))
    assert numbers == [str(number + 1) for number in range(len(numbers))] and numbers
    solutions = helper(name, "solutions")
    checks = {x for x in vars(solutions) if x.startswith("check_")}
    assert set(re.findall(rf"solutions_{number_of(name)}\.(check_\w+)\(", code_of(name))) == checks
    assert len(checks) == len(numbers) == prose_of(name).count("<summary>An answer</summary>")
    assert prose_of(name).count("**Hint:** ") == len(numbers)
    chinese = (FOLDER / "zh" / f"{name}.md").read_text(encoding="utf-8")
    assert chinese.count("**提示**：") == len(numbers)
    for module, shown in ANSWER.findall(prose_of(name)):
        assert module == f"solutions_{number_of(name)}" and hasattr(solutions, shown)


@pytest.mark.parametrize("name", NAMES)
def test_prose_keeps_to_the_page(name):
    for cell in lesson_cells(name):
        if cell.is_prose:
            assert "TODO" not in cell.text
            assert cell.text.count("```") % 2 == 0, "a fence is open"
            assert cell.text.count("<details>") == cell.text.count("</details>")


@pytest.mark.parametrize("name", LESSONS)
def test_code_cells_run_in_a_new_process(name, tmp_path):
    ran = run_in_new_process(name, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = re.findall(r"^exercise (\d): (right|not yet)\.", ran.stdout, re.MULTILINE)
    assert sorted(found) == [(number, "right") for number in EXERCISE.findall(prose_of(name))]
    pictures = list(tmp_path.glob("*.png"))
    assert pictures and all(picture.stem.startswith(number_of(name)) for picture in pictures)


def test_a_new_process_has_only_what_the_cells_import(tmp_path, monkeypatch):
    """A name that this process has, or an earlier text, is no help to the cells."""
    import tour.lessons as module

    for wrong in ("print(torch.ones(1))", "print(Figures)"):
        monkeypatch.setattr(module, "code_of", lambda name, wrong=wrong: wrong + "\n")
        ran = module.run_in_new_process("01_vector_add", tmp_path)
        assert ran.returncode == 1 and "NameError" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITH_FIGURES])
def test_a_lesson_goes_on_with_figures(name, tmp_path):
    """What it prints and draws of recorded rows, with rows that this test makes up."""
    ran = run_lesson(name, tmp_path, Invented)
    asked = [x.asked for x in vars(ran.module).values() if isinstance(x, Invented)]
    assert asked and any(asked) and ran.pictures
    assert ran.on_page == len(ran.pictures)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_lesson_runs_on_a_gpu(name, tmp_path):
    """As a reader runs it: compiled, and measured."""
    where = {"TILEWISE_PICTURES": str(tmp_path), "MPLBACKEND": "Agg"}
    where["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parent / "src"), *sys.path])
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    where["TOUR_ANSWERS"] = "1"
    done = subprocess.run(command, env=os.environ | where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "not yet" not in done.stdout and list(tmp_path.glob("*.png"))
