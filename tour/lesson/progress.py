"""Parts of a lesson, executed alone: its checks for progress, its definitions."""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import sys
import types
from collections.abc import Callable
from pathlib import Path

from .exercises import RIGHT, Exercises

TOUR = Path(__file__).resolve().parents[1]
PUZZLES = TOUR / "puzzles"


def show(number: str | None = None) -> None:
    """Prints a line for each lesson; for one lesson, what its checks say.

    Raises:
        SystemExit: there is no lesson of this number.
    """
    lessons = {
        path.name.split("_")[0]: path for path in sorted(TOUR.glob("[0-9]*.py"))
    }
    if number:
        if number not in lessons:
            raise SystemExit(f"no lesson {number}: there are {', '.join(lessons)}")
        print(line("", of_lesson(lessons[number])))
        return
    with contextlib.redirect_stdout(io.StringIO()):
        puzzles = of_puzzles()
    print(line("puzzles", puzzles))
    for path in lessons.values():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exercises = of_lesson(path)
        except Exception as error:  # of a lesson that is being written
            print(f"{path.stem:20}{type(error).__name__}: {error}")
        else:
            print(line(path.stem, exercises))
    print("What is wrong: python tour/puzzles, python tour 03, and so on.")


def line(name: str, exercises: Exercises) -> str:
    """How many exercises are done, and the state of each."""
    done = list(exercises.states.values()).count(RIGHT)
    return f"{name:20}{done} of {len(exercises.states)} done: {exercises}".lstrip()


def of_lesson(path: Path) -> Exercises:
    """The exercises of a lesson, checked; what the checks say is printed."""
    run_checks(path)
    number = path.name.split("_")[0]
    return importlib.import_module(f"lesson.solutions_{number}").exercises


def of_puzzles() -> Exercises:
    """The puzzles, checked; what the checks say is printed."""
    if str(PUZZLES) not in sys.path:
        sys.path.append(str(PUZZLES))
    for path in sorted(PUZZLES.glob("[0-9]_*.py")):
        try:
            run_checks(path)
        except Exception as error:  # of a puzzle that is being written
            print(f"{path.name}: {type(error).__name__}: {error}")
    return importlib.import_module("checks").exercises


def run_checks(path: Path) -> None:
    """Executes what a lesson imports and defines, and its calls of checks."""
    run_part(path, lambda node: defines(node) or calls_check(node))


def definitions_of(lesson: str) -> types.ModuleType:
    """What another lesson imports and defines; the rest of its cells does not run.

    `definitions_of("02_matmul").plain_matmul`: with what a learner changed there.
    """
    return run_part(TOUR / f"{lesson}.py", defines)


def run_part(path: Path, is_part: Callable[[ast.stmt], bool]) -> types.ModuleType:
    """The statements of a lesson that `is_part` accepts, executed as a module."""
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module  # classes look their module up
    for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
        if is_part(node):
            # A constant that needs what is computed in between is left out.
            with contextlib.suppress(NameError):
                code = compile(ast.Module([node], []), str(path), "exec")
                exec(code, vars(module))
    return module


def defines(node: ast.stmt) -> bool:
    """Whether a statement is an import, a function, a class, or a CONSTANT."""
    if isinstance(node, ast.Assign):
        return all(isinstance(x, ast.Name) and x.id.isupper() for x in node.targets)
    return isinstance(
        node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    )


def calls_check(node: ast.stmt) -> bool:
    """Whether a statement is `check_add(...)` or `solutions_01.check_add(...)`."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    return ast.unparse(node.value.func).split(".")[-1].startswith("check_")
