"""The exercises' checks: each accepts its answer and refuses wrong ones."""

import importlib
import subprocess
import sys

import pytest
import torch

pytest.importorskip("matplotlib")

from tour.lessons import NAMES, ROOT, defined_in, number_of  # noqa: I001 (finds `lesson`)
from lesson import Exercises, NotYet, expect, hopper_parts, hopper_steps, progress
from tour.wrong_answers import EXERCISES

from tilewise.testing import build, stats


def empty(x):
    raise NotYet


def solutions(number):
    return importlib.import_module(f"lesson.solutions_{number}")


def test_every_check_is_tried():
    tried = {(number, f"check_{check}") for number, check, _, _ in EXERCISES}
    numbers = [number_of(name) for name in NAMES]
    there = [(n, x) for n in numbers for x in vars(solutions(n)) if x.startswith("check_")]
    assert tried == set(there) and all(wrong for *_, wrong in EXERCISES)


@pytest.mark.parametrize(
    ("number", "check", "answer", "wrong"),
    [pytest.param(*x, id=f"{x[0]}-{x[1]}") for x in EXERCISES],
)
def test_a_check_accepts_its_answer_and_refuses_wrong_ones(
    number, check, answer, wrong, capsys, tmp_path
):
    module = solutions(number)
    run = getattr(module, f"check_{check}")
    extra = ()
    if check == "share_prefix":  # it runs the lesson's kernels
        extra = (defined_in("08_decoding", "decode", tmp_path).decode,)
    assert run(getattr(module, answer), *extra) is True
    assert ": right. " in capsys.readouterr().out
    for other in wrong:
        assert run(other, *extra) is False, other
        assert ": not yet. " in capsys.readouterr().out


def checked_square():
    exercises = Exercises("99")

    @exercises.check(3, lambda x: x * x)
    def check_square(answer):
        expect(answer(2), 4, "2 squared")
        return "2 squared"

    return exercises, check_square


def test_what_an_exercise_says(capsys):
    exercises, check = checked_square()
    exercises.show()
    assert not check(empty) and not check(lambda x: x) and not check(lambda x: x / 0)
    assert not check(lambda x: [x][x]) and check(lambda x: x * x)
    exercises.show()
    assert capsys.readouterr().out.splitlines() == [
        "exercises of lesson 99: empty 3. All lessons: python tour",
        "exercise 3: empty. Write your lines in place of `raise NotYet`.",
        "exercise 3: not yet. 2 squared: 2, expected 4",
        "exercise 3: not yet. ZeroDivisionError: division by zero",
        "exercise 3: not yet. Out of bounds: list index out of range",
        "exercise 3: right. 2 squared",
        "exercises of lesson 99: right 3. All lessons: python tour",
    ]


def test_answers_are_checked_in_place_of_stubs(capsys, monkeypatch):
    monkeypatch.setenv("TOUR_ANSWERS", "1")
    _, check = checked_square()
    assert check(empty) and check(lambda x: x)


def test_lessons_ship_empty_stubs_and_one_command_says_so(capsys):
    progress.show()
    puzzles, *lines, _ = capsys.readouterr().out.splitlines()
    assert puzzles == "puzzles             0 of 8 done: empty 1 2 3 4 5 6 7 8"
    assert [line.split()[0] for line in lines] == NAMES
    assert {line[20:] for line in lines} == {"0 of 2 done: empty 1 2", "0 of 1 done: empty 1"}
    progress.show("01")
    assert capsys.readouterr().out.count("Write your lines") == 2
    with pytest.raises(SystemExit, match="no lesson 1: there are 00, "):
        progress.show("1")


def test_the_tour_is_a_module_to_run_too():
    command = [sys.executable, "-m", "tour", "1"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "no lesson 1: there are 00, " in answer.stderr


LEARNERS = """import triton
import triton.language as tl
from lesson import NotYet, solutions_01

print("is not run")
BLOCK = undefined


@triton.jit
def axpy_kernel(a, x, y, z, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    {line}


solutions_01.check_axpy(axpy_kernel)
"""


def test_a_learner_sees_what_is_done(tmp_path, capsys, monkeypatch):
    states = {}
    monkeypatch.setattr(solutions("01").exercises, "states", {1: "empty", 2: "empty"})
    written = {
        "empty": "raise NotYet",
        "not yet": "tl.store(z + offs, tl.load(x + offs))",
        "right": "solutions_01.axpy_kernel(a, x, y, z, n, BLOCK)",
    }
    for state, text in written.items():
        path = tmp_path / f"01_{state.split()[0]}.py"
        path.write_text(LEARNERS.format(line=text), encoding="utf-8")
        states[state] = str(progress.of_lesson(path))
    assert states == {
        "empty": "empty 1 2",
        "not yet": "not yet 1, empty 2",
        "right": "right 1, empty 2",
    }
    said = capsys.readouterr().out
    assert "is not run" not in said and "not yet. Out of bounds: load in program (0, 0, 0)" in said


def test_a_lesson_that_is_being_written_hides_no_other(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "TOUR", tmp_path)
    (tmp_path / "01_broken.py").write_text("def kernel(:\n", encoding="utf-8")
    (tmp_path / "02_fine.py").write_text("", encoding="utf-8")
    progress.show()
    _, broken, fine, _ = capsys.readouterr().out.splitlines()
    assert broken.startswith("01_broken           SyntaxError: ") and fine.startswith("02_fine")


def test_what_is_expected_of_a_tensor():
    expect(torch.ones(2), torch.ones(2), "ones")
    expect(torch.ones(2), torch.full((2,), 1.5), "near", atol=0.5)
    expect(torch.full((2,), -torch.inf), torch.full((2,), -torch.inf), "masked", atol=0.5)
    for wrong in (torch.ones(3), torch.zeros(2), torch.full((2,), torch.nan)):
        with pytest.raises(AssertionError, match="ones: "):
            expect(wrong, torch.ones(2), "ones", atol=0.5)


def test_the_first_wrong_element_is_named():
    got, exact = (
        torch.tensor([[1.0, 2.0], [3.0, torch.nan]]),
        torch.tensor([[1.0, 2.0], [3.5, 4.0]]),
    )
    with pytest.raises(AssertionError) as caught:
        expect(got, exact, "out")
    assert str(caught.value) == ("out: element [1, 0] is 3, expected 3.5; 2 of 4 are wrong")
    with pytest.raises(AssertionError, match="off by 0.5 where 0.1 is allowed; 2 of 4"):
        expect(got, exact, "out", atol=0.1)


F, H, N = torch.empty(64), torch.empty(64, dtype=torch.bfloat16), 64
KERNELS = [
    ("00", "strided_write_kernel", (F, F, N, 3), dict(BLOCK=256)),
    ("01", "axpy_kernel", (2.0, F, F, F, N), dict(BLOCK=256)),
    ("01", "persistent_add_kernel", (F, F, F, N), dict(BLOCK=256)),
    ("02", "linear_relu_kernel", (F, F, F, F, N, N, N, N, N, N), dict(
        BLOCK_M=32, BLOCK_N=32, BLOCK_K=16)),
    ("03", "lse_kernel", (F, F, N), dict(BLOCK=256)),
    ("03", "weighted_sum_kernel", (F, F, F, N), dict(BLOCK=128, D=16)),
    ("05", "dq_kernel", (F, F, F, F, F, F, F, N, 0.25), dict(D=16, BLOCK_M=32, BLOCK_N=32)),
]  # fmt: skip


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize(("number", "kernel", "args", "meta"), KERNELS, ids=[x[1] for x in KERNELS])
def test_answers_compile(number, kernel, args, meta):
    assert stats(build(getattr(solutions(number), kernel), *args, **meta))["spill_stores"] == 0


@pytest.mark.compile
@pytest.mark.slow
def test_the_answer_of_the_race_compiles():
    found = hopper_parts.needs(hopper_steps.specialised(solutions("07").compute_with_waits), 128)
    assert found["HGMMA"] and not found["spill_stores"]
